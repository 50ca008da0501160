"""What the engine's work costs now, learned from its iterations, pauses and resumes.

Owns the online model `step seconds = base + per_sequence * generating + per_context_token * KV
tokens read + prefill tokens / prefill rate`, without the time for which steps waited for copies
between the KV tiers: those are learned by the block (copy_costs.py). Two parts that fail
differently are kept apart:
- the *shape* (the four coefficients, never negative): weighted ridge fit over a sliding window,
  older iterations fade, outliers are down-weighted by their distance in medians (Huber);
- the *level*: median ratio of the last few iterations to the shape's prediction. It follows a
  change of speed within a few iterations and ignores single hiccups.

The prior is a slow engine, so that nothing is paused on a guess. It is scaled to the level seen
from the first iteration on, and only lends its proportions to coefficients that the iterations so
far cannot tell apart.

Pure: no clock; observations carry their durations.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tokenflow.copy_costs import CopyCostModel
from tokenflow.executor.api import IterationStats
from tokenflow.types import CostEstimate, FloatArray

_SCALES = np.array([1.0, 8.0, 2048.0, 256.0])
"""Units of the features [1, generating sequences, KV tokens read, prefill tokens]."""

_PRIOR = np.array([0.150, 0.040, 0.040, 0.500])
"""Seconds per scaled feature of an engine slower than any we know: 0.15 s a step, 8 more sequences
40 ms, 2,048 more KV tokens 40 ms, prefill 512 tokens/s."""

_WINDOW = 256
_HALF_LIFE = 96.0
_NUM_LEVEL = 15
_REFIT_EVERY = 8
_RIDGE = 0.3
"""Weight of the prior's proportions, in iterations."""

_NUM_ROUND_TRIPS = 16
_ROUND_TRIP_QUANTILE = 0.75
_PRIOR_STEPS = 2.0
"""A pause or resume not yet observed is taken as so many steps: the one in flight and its own."""


class CostModel:
    """Learns from observations; `estimate` gives the current figures.

    Until the first iteration the prior counts. Iterations without work or duration are ignored.
    """

    def __init__(self) -> None:
        self._features: deque[FloatArray] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._shape = _PRIOR.copy()
        self._level = 1.0
        self._num_observed = 0
        self._pauses: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)
        self._resumes: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)
        self._copies = CopyCostModel()
        self._estimate: CostEstimate | None = None  # until the next observation

    @property
    def num_observed(self) -> int:
        """Iterations learned from."""
        return self._num_observed

    def observe_iteration(self, stats: IterationStats) -> None:
        """Learn from one iteration of the engine."""
        batching = stats.inflight_batching_stats
        seconds = stats.iter_latency_ms / 1000.0
        if stats.kv_tier_stats is not None:
            self._estimate = None
            seconds -= self._copies.observe(stats.kv_tier_stats)
        if seconds <= 0 or batching.num_scheduled_requests <= 0:
            return
        raw = (1, batching.num_gen_requests, stats.num_gen_context_tokens, batching.num_ctx_tokens)
        self._estimate = None
        self._features.append(np.array(raw, dtype=np.float64) / _SCALES)
        self._seconds.append(seconds)
        self._num_observed += 1
        if self._num_observed <= 2 * _NUM_LEVEL or self._num_observed % _REFIT_EVERY == 0:
            self._shape = _fit(np.array(self._features), np.array(self._seconds))
        self._level = self._median_ratio()

    def observe_pause(self, seconds: float) -> None:
        """Learn from one pause: from cancel to its final response."""
        self._estimate = None
        self._pauses.append(max(0.0, seconds))

    def observe_resume(
        self, seconds: float, num_tokens: int, num_onboarded_blocks: int = 0
    ) -> None:
        """Learn from one resume: from enqueue to first token, with `num_tokens` recomputed
        (1 = all kept) and blocks brought back from the host. Both are taken off: they are charged
        per request."""
        self._estimate = None
        recompute_s = max(0, num_tokens - 1) * self._prefill_s_per_token()
        onboard_s = num_onboarded_blocks * self._copies.onboard_block_s
        self._resumes.append(max(0.0, seconds - recompute_s - onboard_s))

    def estimate(self, plan_interval_s: float) -> CostEstimate:
        """The current figures; `plan_interval_s` is the caller's time between two plans."""
        known = self._estimate
        if known is None or known.plan_interval_s != plan_interval_s:
            known = self._estimate = self._current(plan_interval_s)
        return known

    def _current(self, plan_interval_s: float) -> CostEstimate:
        theta = self._shape * self._level / _SCALES
        step_s = self._recent_step_s()
        return CostEstimate(
            prefill_tokens_per_s=1.0 / self._prefill_s_per_token(),
            step_base_s=float(theta[0]),
            step_per_sequence_s=float(theta[1]),
            step_per_context_token_s=float(theta[2]),
            pause_s=_round_trip(self._pauses, step_s),
            resume_s=_round_trip(self._resumes, step_s),
            plan_interval_s=plan_interval_s,
            offload_block_s=self._copies.offload_block_s,
            onboard_block_s=self._copies.onboard_block_s,
            copy_wait_share=self._copies.wait_share,
        )

    def _prefill_s_per_token(self) -> float:
        # A fit may see no cost in prefill at all (every chunk hidden in a step's noise); some
        # positive cost keeps rates finite.
        return max(float(self._shape[3] * self._level / _SCALES[3]), 1e-9)

    def _recent_step_s(self) -> float:
        """Median duration of the last iterations (the prior's full step before the first)."""
        if not self._seconds:
            return float(_PRIOR[:3].sum())
        recent = list(self._seconds)[-_NUM_LEVEL:]
        return sorted(recent)[len(recent) // 2]

    def _median_ratio(self) -> float:
        recent = list(self._seconds)[-_NUM_LEVEL:]
        predicted = np.array(list(self._features)[-len(recent) :]) @ self._shape
        ratios = sorted(s / p for s, p in zip(recent, predicted.tolist(), strict=True))
        return float(ratios[len(ratios) // 2])


def _round_trip(observed: deque[float], step_s: float) -> float:
    """Upper quartile of what was observed, but never under the step that is waited for: an engine
    that slowed down is believed before its next pause."""
    if not observed:
        return _PRIOR_STEPS * step_s
    ordered = sorted(observed)
    return max(ordered[int(_ROUND_TRIP_QUANTILE * (len(ordered) - 1))], step_s)


def _fit(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """Non-negative coefficients [4] for features [n, 4] (scaled) and seconds [n], oldest first.

    Three rounds of reweighting; the ridge pulls towards the prior scaled to the median speed.
    """
    ages = np.arange(len(seconds) - 1, -1, -1.0)
    fade = 0.5 ** (ages / _HALF_LIFE)
    prior = _PRIOR * float(np.median(seconds / (features @ _PRIOR)))
    weights, theta = fade, prior
    for _ in range(3):
        theta = _solve_nonnegative(features, seconds, weights, prior)
        residuals = np.abs(seconds - features @ theta)
        spread = 2.0 * float(np.median(residuals)) + 1e-3 * float(np.median(seconds))
        weights = fade * np.minimum(1.0, spread / np.maximum(residuals, 1e-12))
    return theta


def _solve_nonnegative(
    features: FloatArray, seconds: FloatArray, weights: FloatArray, prior: FloatArray
) -> FloatArray:
    """Weighted ridge around `prior`; coefficients that come out negative are set to 0 and the
    rest solved again. The fixed cost of a step stays positive (a share of the prior's)."""
    weighted = features * weights[:, None]
    normal = weighted.T @ features
    target = weighted.T @ seconds
    # In the prior's own proportions, so that a large coefficient is not held tighter than a small.
    strength = _RIDGE * (float(prior @ prior) / np.maximum(prior, 1e-12) ** 2) * 0.25
    normal[np.diag_indices(4)] += strength
    target = target + strength * prior
    active = np.ones(4, dtype=np.bool_)
    theta = np.zeros(4)
    for _ in range(4):
        index = np.flatnonzero(active)
        theta = np.zeros(4)
        theta[index] = np.linalg.solve(normal[np.ix_(index, index)], target[index])
        negative = theta < 0
        if not negative.any():
            break
        active &= ~negative
    return np.maximum(theta, [1e-3 * float(prior[0]), 0.0, 0.0, 0.0])
