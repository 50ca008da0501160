"""What the engine's work costs now, learned from its iterations, pauses and resumes.

Owns the online model `step seconds = base + per_sequence * generating + per_context_token * KV
tokens read + prefill tokens / prefill rate`, without the time for which steps waited for copies
between the KV tiers: those are learned by the block (copy_costs.py). Steps with prefill have a base
of their own, because an accelerator reads its weights while it computes a chunk: with one base for
both, a burst of prefill would make decoding alone look faster than it is. Two parts that fail
differently are kept apart:
- the *shape* (the coefficients, never negative): weighted ridge fit over a sliding window, older
  iterations fade, outliers are down-weighted by their distance in medians (Huber);
- the *level*: median ratio of the last few iterations to the shape's prediction. It follows a
  change of speed within a few iterations and ignores single hiccups.

The prior is a slow engine, so that nothing is paused on a guess. It is scaled to the level seen
from the first iteration on, and only lends its proportions to coefficients that the first
iterations cannot tell apart. Later what was learned does: in a burst all contexts are alike for a
long time.

Pure: no clock; observations carry their durations.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from tokenflow.copy_costs import CopyCostModel
from tokenflow.executor.api import IterationStats
from tokenflow.types import CostEstimate, FloatArray

_SCALES = np.array([1.0, 1.0, 8.0, 2048.0, 256.0])
"""Units of the features [decodes only, has prefill, generating sequences, KV tokens read, prefill
tokens]; the first two are 1 or 0."""

_NUM_FEATURES = len(_SCALES)
_PREFILL = _NUM_FEATURES - 1
_IS_BASE = np.array([1.0, 1.0, 0.0, 0.0, 0.0])

_PRIOR = np.array([0.150, 0.150, 0.040, 0.040, 0.500])
"""Seconds per scaled feature of an engine slower than any we know: 0.15 s a step, 8 more sequences
40 ms, 2,048 more KV tokens 40 ms, prefill 512 tokens/s."""

_WINDOW = 256
_HALF_LIFE = 96.0
_NUM_LEVEL = 15
_NUM_FIRST = 2 * _NUM_LEVEL
_REFIT_EVERY = 8
"""The shape is fitted anew with each of the first iterations, then with each eighth."""
_NUM_OF_KIND = 4
_OLD_WEIGHT = 0.3
"""The last iterations of each kind stay in the fit, with this weight when they have left the
window. A kind is so much prefill, or so many sequences of such a length, in powers of two. After a
long time in which all contexts are alike, or nobody is prefilled, the fit would have to guess again
what longer ones or a prefill cost; a guess that is too low takes in more streams than can be
served."""

_RENEWAL = 0.02
_MIN_PROPORTION = 0.02
"""The ridge pulls towards what was learned so far, renewed by this share with each fit, so that
what the last iterations cannot tell apart stays as it was; a coefficient near 0 is held no tighter
than this share of the prior's."""

_RIDGE = 0.3
"""Weight of the prior's proportions, in iterations."""

_NUM_ROUND_TRIPS = 16
_ROUND_TRIP_QUANTILE = 0.75
_PRIOR_STEPS = 2.0
"""A pause or resume not yet observed is taken as so many steps: the one in flight and its own."""


_Features = tuple[bool, bool, int, int, int]
_Numbered = tuple[int, _Features, float]
"""Number of an iteration from 1, its features in their own units, its seconds."""


class CostModel:
    """Learns from observations; `estimate` gives the current figures.

    Until the first iteration the prior counts. Iterations without work or duration are ignored.
    """

    def __init__(self) -> None:
        self._window = _Window()
        self._kinds: defaultdict[tuple[int, ...], deque[_Numbered]] = defaultdict(
            lambda: deque(maxlen=_NUM_OF_KIND)
        )
        self._shape = _PRIOR.copy()
        self._proportions = _PRIOR.copy()
        self._level = 1.0
        self._num_observed = self._num_levelled = 0
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
        prefills = batching.num_ctx_tokens > 0
        raw = (
            not prefills,
            prefills,
            batching.num_gen_requests,
            stats.num_gen_context_tokens,
            batching.num_ctx_tokens,
        )
        self._estimate = None
        self._window.append(raw, seconds)
        self._num_observed += 1
        self._kinds[_kind_of(raw)].append((self._num_observed, raw, seconds))
        if self._num_observed <= _NUM_FIRST or self._num_observed % _REFIT_EVERY == 0:
            self._refit()

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
        self._learn_level()
        recompute_s = max(0, num_tokens - 1) * self._prefill_s_per_token()
        onboard_s = num_onboarded_blocks * self._copies.onboard_block_s
        self._resumes.append(max(0.0, seconds - recompute_s - onboard_s))

    def estimate(self, plan_interval_s: float) -> CostEstimate:
        """The current figures; `plan_interval_s` is the caller's time between two plans."""
        known = self._estimate
        if known is None or known.plan_interval_s != plan_interval_s:
            known = self._estimate = self._current(plan_interval_s)
        return known

    def _refit(self) -> None:
        features, seconds = self._window.features, self._window.seconds
        older = self._older_than(self._num_observed - len(seconds) + 1)
        self._shape = _fit(features, seconds, *older, self._proportions)
        renewal = _RENEWAL if self._num_observed > _NUM_FIRST else 1.0
        self._proportions = self._proportions + renewal * (self._shape - self._proportions)

    def _older_than(self, num: int) -> tuple[FloatArray, FloatArray]:
        """Features [m, 5] (scaled) and seconds [m] of the last ones of each kind that came before
        iteration `num`, from 1."""
        older = [entry for kind in self._kinds.values() for entry in kind if entry[0] < num]
        raw = np.array([raw for _, raw, _ in older], dtype=np.float64).reshape(-1, _NUM_FEATURES)
        return raw / _SCALES, np.array([seconds for _, _, seconds in older])

    def _learn_level(self) -> None:
        """Bring the level up to the last observation, when somebody asks."""
        if self._num_observed == self._num_levelled:
            return
        self._num_levelled = self._num_observed
        predicted = self._window.features[-_NUM_LEVEL:] @ self._shape
        ratios = self._window.seconds[-_NUM_LEVEL:] / predicted
        self._level = _upper_median(ratios.tolist())

    def _current(self, plan_interval_s: float) -> CostEstimate:
        self._learn_level()
        theta = self._shape * self._level / _SCALES
        step_s = self._recent_step_s()
        return CostEstimate(
            prefill_tokens_per_s=1.0 / self._prefill_s_per_token(),
            step_base_s=float(theta[0]),
            step_per_sequence_s=float(theta[2]),
            step_per_context_token_s=float(theta[3]),
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
        return max(float(self._shape[_PREFILL] * self._level / _SCALES[_PREFILL]), 1e-9)

    def _recent_step_s(self) -> float:
        """Median duration of the last iterations (the prior's full step before the first)."""
        recent = self._window.seconds[-_NUM_LEVEL:]
        return _upper_median(recent.tolist()) if len(recent) else float(_PRIOR[1:_PREFILL].sum())


def _kind_of(raw: _Features) -> tuple[int, ...]:
    _, _, num_generating, num_context_tokens, num_prefill_tokens = raw
    if num_prefill_tokens:
        return (num_prefill_tokens.bit_length(),)
    mean_context = num_context_tokens // max(1, num_generating)
    return (num_generating.bit_length(), mean_context.bit_length())


class _Window:
    """The last iterations, oldest first."""

    def __init__(self) -> None:
        self._all_features = np.empty((8 * _WINDOW, _NUM_FEATURES))
        self._all_seconds = np.empty(8 * _WINDOW)
        self._end = 0

    def append(self, raw: _Features, seconds: float) -> None:
        """One more iteration, with its features in their own units."""
        if self._end == len(self._all_seconds):
            num = _WINDOW - 1
            self._all_features[:num] = self._all_features[-num:]
            self._all_seconds[:num] = self._all_seconds[-num:]
            self._end = num
        self._all_features[self._end] = raw
        self._all_seconds[self._end] = seconds
        self._end += 1

    @property
    def features(self) -> FloatArray:
        """[n, 5], scaled."""
        scaled: FloatArray = self._all_features[max(0, self._end - _WINDOW) : self._end] / _SCALES
        return scaled

    @property
    def seconds(self) -> FloatArray:
        """[n]."""
        recent: FloatArray = self._all_seconds[max(0, self._end - _WINDOW) : self._end]
        return recent


def _upper_median(values: list[float]) -> float:
    """The middle one, the greater of two."""
    return sorted(values)[len(values) // 2]


def _median(values: FloatArray) -> float:
    """As np.median, which takes several times as long for a few hundred values."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return 0.5 * float(ordered[middle - 1] + ordered[middle])


def _round_trip(observed: deque[float], step_s: float) -> float:
    """Upper quartile of what was observed, but never under the step that is waited for: an engine
    that slowed down is believed before its next pause."""
    if not observed:
        return _PRIOR_STEPS * step_s
    ordered = sorted(observed)
    return max(ordered[int(_ROUND_TRIP_QUANTILE * (len(ordered) - 1))], step_s)


def _fit(
    features: FloatArray,
    seconds: FloatArray,
    old_features: FloatArray,
    old_seconds: FloatArray,
    proportions: FloatArray,
) -> FloatArray:
    """Non-negative coefficients [5] for features [n, 5] (scaled) and seconds [n], oldest first, and
    for older ones, [m, 5] and [m].

    Three rounds of reweighting, by the spread of each kind, so that many of the one do not make
    outliers of the few of the other; the ridge pulls towards `proportions` [5] scaled to the median
    speed.
    """
    ages = np.arange(len(seconds) - 1, -1, -1.0)
    prior = proportions * _median(seconds / (features @ proportions))
    fade = np.concatenate([np.full(len(old_seconds), _OLD_WEIGHT), 0.5 ** (ages / _HALF_LIFE)])
    features = np.concatenate([old_features, features])
    seconds = np.concatenate([old_seconds, seconds])
    min_spread = 1e-3 * _median(seconds)
    prefills = features[:, 1] > 0
    kinds = [kind for kind in (prefills, ~prefills) if kind.any()]
    spread = np.empty(len(seconds))
    weights, theta = fade, prior
    for _ in range(3):
        theta = _solve_nonnegative(features, seconds, weights, prior)
        residuals = np.abs(seconds - features @ theta)
        for kind in kinds:
            spread[kind] = 2.0 * _median(residuals[kind]) + min_spread
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
    least = _MIN_PROPORTION * (prior.max() / _PRIOR.max()) * _PRIOR
    strength = _RIDGE * (float(prior @ prior) / np.maximum(prior, least) ** 2) * 0.25
    normal.flat[:: _NUM_FEATURES + 1] += strength
    target = target + strength * prior
    theta = np.linalg.solve(normal, target)
    active = theta >= 0
    while not active.all():
        index = np.flatnonzero(active)
        theta = np.zeros(_NUM_FEATURES)
        theta[index] = np.linalg.solve(normal[np.ix_(index, index)], target[index])
        still_active = active & (theta >= 0)
        if (still_active == active).all():
            break
        active = still_active
    return np.maximum(theta, 1e-3 * prior * _IS_BASE)
