"""The coefficients of a step's seconds, fitted to the iterations that were seen.

Owns the fit and the prior that it starts from; the features are those of costs.py, scaled: [decodes
only, has prefill, generating sequences, KV tokens read, prefill tokens].
"""

from __future__ import annotations

import numpy as np

from tokenflow.types import FloatArray

NUM_FEATURES = 5
IS_BASE = np.array([1.0, 1.0, 0.0, 0.0, 0.0])

PRIOR = np.array([0.150, 0.150, 0.040, 0.040, 0.500])
"""Seconds per scaled feature of an engine slower than any we know: 0.15 s a step, 8 more sequences
40 ms, 2,048 more KV tokens 40 ms, prefill 512 tokens/s."""

_HALF_LIFE = 96.0
_OLD_WEIGHT = 0.3
"""An iteration fades by half in so many; those that are older than all that count weigh this."""

_RIDGE = 0.3
"""Weight of the proportions that are known, in iterations."""

_MIN_PROPORTION = 0.02
"""A coefficient near 0 is held no tighter than this share of the prior's."""


def fit(
    features: FloatArray,
    seconds: FloatArray,
    old_features: FloatArray,
    old_seconds: FloatArray,
    proportions: FloatArray,
    least: FloatArray,
) -> FloatArray:
    """Coefficients [5] of features [n, 5] (scaled) and seconds [n], oldest first, with older ones,
    [m, 5] and [m]; none is below `least` [5].

    Three rounds of reweighting, by the spread of each kind, so that many of the one do not make
    outliers of the few of the other; the ridge pulls towards `proportions` [5] scaled to the median
    speed.
    """
    ages = np.arange(len(seconds) - 1, -1, -1.0)
    prior = proportions * median(seconds / (features @ proportions))
    fade = np.concatenate([np.full(len(old_seconds), _OLD_WEIGHT), 0.5 ** (ages / _HALF_LIFE)])
    features = np.concatenate([old_features, features])
    seconds = np.concatenate([old_seconds, seconds])
    min_spread = 1e-3 * median(seconds)
    prefills = features[:, 1] > 0
    kinds = [kind for kind in (prefills, ~prefills) if kind.any()]
    spread = np.empty(len(seconds))
    weights, theta = fade, prior
    for _ in range(3):
        theta = _solve(features, seconds, weights, prior, least)
        residuals = np.abs(seconds - features @ theta)
        for kind in kinds:
            spread[kind] = 2.0 * median(residuals[kind]) + min_spread
        weights = fade * np.minimum(1.0, spread / np.maximum(residuals, 1e-12))
    return theta


def _solve(
    features: FloatArray,
    seconds: FloatArray,
    weights: FloatArray,
    prior: FloatArray,
    least: FloatArray,
) -> FloatArray:
    """Weighted ridge around `prior`; coefficients that come out below `least` are set to it and the
    rest solved again. The fixed cost of a step stays positive (a share of the prior's)."""
    weighted = features * weights[:, None]
    normal = weighted.T @ features
    target = weighted.T @ (seconds - features @ least)
    # In the prior's own proportions, so that a large coefficient is not held tighter than a small.
    least_prior = _MIN_PROPORTION * (prior.max() / PRIOR.max()) * PRIOR
    strength = _RIDGE * (float(prior @ prior) / np.maximum(prior, least_prior) ** 2) * 0.25
    normal.flat[:: NUM_FEATURES + 1] += strength
    target = target + strength * (prior - least)
    excess = np.linalg.solve(normal, target)
    active = excess >= 0
    while not active.all():
        index = np.flatnonzero(active)
        excess = np.zeros(NUM_FEATURES)
        excess[index] = np.linalg.solve(normal[np.ix_(index, index)], target[index])
        still_active = active & (excess >= 0)
        if (still_active == active).all():
            break
        active = still_active
    result: FloatArray = np.maximum(least + np.maximum(excess, 0.0), 1e-3 * prior * IS_BASE)
    return result


def median(values: FloatArray) -> float:
    """As np.median, which takes several times as long for a few hundred values."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return 0.5 * float(ordered[middle - 1] + ordered[middle])
