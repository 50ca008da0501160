"""How far a figure would move if it were measured again: percentile bootstrap intervals.

Owns the resampling. Over runs the sample is one value per seed, and two policies are compared on
the same seeds (paired: a seed is the same requests for both). Over the requests of one run the
sample is one value per request; since they share a machine they are not independent, and such an
interval only says how much a percentile hangs on single requests.

Pure: the random numbers come from a seed that is an argument. Same values and seed, same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenflow.metrics import FloatArray

NUM_RESAMPLES = 2000
LEVEL = 0.95
_MAX_DRAWS_AT_ONCE = 1 << 21

Statistic = Callable[[FloatArray], FloatArray]
"""[samples, values] -> [samples]."""


@dataclass(frozen=True, slots=True)
class Interval:
    """value: the figure itself. low, high: where `LEVEL` of its resamples lie."""

    value: float
    low: float
    high: float


def mean(samples: FloatArray) -> FloatArray:
    """Mean of each row."""
    return np.asarray(samples.mean(axis=-1), dtype=np.float64)


def percentile(q: float) -> Statistic:
    """Nearest-rank percentile of each row, as `tokenflow.metrics.percentile` defines it."""

    def of(samples: FloatArray) -> FloatArray:
        result = np.percentile(samples, q, axis=-1, method="inverted_cdf")
        return np.asarray(result, dtype=np.float64)

    return of


def interval(
    values: Sequence[float] | FloatArray,
    statistic: Statistic = mean,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """`statistic` of `values`, and its interval. One value is its own interval: nothing is known
    of its spread. NaN thrice when there are none."""
    known = np.asarray(values, dtype=np.float64)
    if not len(known):
        return Interval(float("nan"), float("nan"), float("nan"))
    rng = np.random.Generator(np.random.PCG64(seed))
    rows = max(1, _MAX_DRAWS_AT_ONCE // len(known))
    parts = []
    for start in range(0, num_resamples, rows):
        shape = (min(rows, num_resamples - start), len(known))
        parts.append(statistic(known[rng.integers(len(known), size=shape)]))
    return _interval(float(statistic(known[None, :])[0]), np.concatenate(parts))


def paired_ratio(
    values: Sequence[float] | FloatArray,
    baseline: Sequence[float] | FloatArray,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean of `values` over mean of `baseline`, where position i of both is the same seed.

    Raises ValueError when the lengths differ. NaN thrice when the baseline's mean is 0, and for the
    ends of an interval when a resample's is.
    """
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(f"{len(ours)} values cannot be paired with {len(theirs)}")
    if not len(ours) or theirs.mean() == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn = rng.integers(len(ours), size=(num_resamples, len(ours)))
    below = theirs[drawn].mean(axis=1)
    ratios = np.divide(
        ours[drawn].mean(axis=1), below, out=np.full(num_resamples, np.nan), where=below != 0
    )
    return _interval(float(ours.mean() / theirs.mean()), ratios)


def _interval(value: float, resampled: FloatArray) -> Interval:
    tail = (1.0 - LEVEL) / 2 * 100
    low, high = np.percentile(resampled, (tail, 100 - tail))
    return Interval(value, float(low), float(high))
