"""What the engine's work costs now, learned from its iterations, pauses and resumes.

Owns the online model `step seconds = base + per_sequence * generating + per_context_token * KV
tokens read + prefill tokens / prefill rate`, without the time for which steps waited for copies
between the KV tiers: those are learned by the block (copy_costs.py). Steps with prefill have a base
of their own, because an accelerator reads its weights while it computes a chunk: with one base for
both, a burst of prefill would make decoding alone look faster than it is. Two parts that fail
differently are kept apart:
- the *shape* (the coefficients, never negative; cost_fit.py): weighted ridge fit over a sliding
  window, older iterations fade, outliers are down-weighted by their distance in medians (Huber);
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
from collections.abc import Sequence

import numpy as np

from tokenflow.copy_costs import CopyCostModel
from tokenflow.cost_fit import IS_BASE, NUM_FEATURES, PRIOR, fit
from tokenflow.executor.api import IterationStats
from tokenflow.types import CostEstimate, FloatArray

_SCALES = np.array([1.0, 1.0, 8.0, 2048.0, 256.0])
"""Units of the features [decodes only, has prefill, generating sequences, KV tokens read, prefill
tokens]; the first two are 1 or 0."""

_PREFILL = NUM_FEATURES - 1

_WINDOW = 256
_NUM_LEVEL = 15
_NUM_FIRST = 2 * _NUM_LEVEL
_REFIT_EVERY = 8
"""The shape is fitted anew with each of the first iterations, then with each eighth."""
_NUM_OF_KIND = 4
"""So many of the last iterations of each kind stay in the fit when they have left the window. A
kind is so much prefill, or so many sequences of such a length, in powers of two. After a long time
in which all contexts are alike, or nobody is prefilled, the fit would have to guess again what
longer ones or a prefill cost; a guess that is too low takes in more streams than can be served."""

_RENEWAL = 0.02
"""The fit is pulled towards what was learned so far, renewed by this share each time, so that what
the last iterations cannot tell apart stays as it was."""

_NUM_ROUND_TRIPS = 16
_ROUND_TRIP_QUANTILE = 0.75
_CROWD_MEMORY_S = 20.0
"""What a resume took is forgotten after so long: it waited for a crowd that is over. Where it took
so long that nobody may be paused any more, no shorter one would ever be seen."""
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
        self._shape = PRIOR.copy()
        self._proportions = PRIOR.copy()
        self._level = 1.0
        self._num_observed = self._num_levelled = 0
        self._pauses: deque[float] = deque(maxlen=_NUM_ROUND_TRIPS)
        self._resumes: deque[tuple[float, float]] = deque(maxlen=_NUM_ROUND_TRIPS)
        self._worked_s = 0.0  # all iterations together
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
        self._worked_s += seconds
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
        per request. What it waits for others counts, as long as the engine remembers: a crowd that
        comes back is slow to."""
        self._estimate = None
        self._learn_level()
        recompute_s = max(0, num_tokens - 1) * self._prefill_s_per_token()
        onboard_s = num_onboarded_blocks * self._copies.onboard_block_s
        self._resumes.append((self._worked_s, max(0.0, seconds - recompute_s - onboard_s)))

    def estimate(self, plan_interval_s: float) -> CostEstimate:
        """The current figures; `plan_interval_s` is the caller's time between two plans."""
        known = self._estimate
        if known is None or known.plan_interval_s != plan_interval_s:
            known = self._estimate = self._current(plan_interval_s)
        return known

    def _refit(self) -> None:
        features, seconds = self._window.features, self._window.seconds
        older = self._older_than(self._num_observed - len(seconds) + 1)
        self._shape = fit(features, seconds, *older, self._proportions, self._least())
        renewal = _RENEWAL if self._num_observed > _NUM_FIRST else 1.0
        self._proportions = self._proportions + renewal * (self._shape - self._proportions)

    def _least(self) -> FloatArray:
        """The least [5] that the coefficients can be: for steps that only decode, what they take
        besides their sequences and KV, from where that is most of it, those with the fewest
        sequences. An accelerator takes the longer for one more sequence the more there are, so that
        large batches alone make small ones look faster than they are."""
        least = np.zeros(NUM_FEATURES)
        known = [kind for kind, seen in self._kinds.items() if len(seen) == _NUM_OF_KIND]
        decoding = [kind for kind in known if len(kind) > 1]
        if decoding:
            rest = self._shape * (1.0 - IS_BASE) / _SCALES
            seen = self._kinds[min(decoding)]
            least[0] = max(0.0, min(seconds - float(rest @ raw) for _, raw, seconds in seen))
        return least

    def _older_than(self, num: int) -> tuple[FloatArray, FloatArray]:
        """Features [m, 5] (scaled) and seconds [m] of the last ones of each kind that came before
        iteration `num`, from 1."""
        older = [entry for kind in self._kinds.values() for entry in kind if entry[0] < num]
        raw = np.array([raw for _, raw, _ in older], dtype=np.float64).reshape(-1, NUM_FEATURES)
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
            resume_s=_round_trip(self._recent_resumes(), step_s),
            plan_interval_s=plan_interval_s,
            offload_block_s=self._copies.offload_block_s,
            onboard_block_s=self._copies.onboard_block_s,
            copy_wait_share=self._copies.wait_share,
        )

    def _recent_resumes(self) -> list[float]:
        """Seconds of those that are not forgotten."""
        since_s = self._worked_s - _CROWD_MEMORY_S
        return [seconds for worked_s, seconds in self._resumes if worked_s >= since_s]

    def _prefill_s_per_token(self) -> float:
        # A fit may see no cost in prefill at all (every chunk hidden in a step's noise); some
        # positive cost keeps rates finite.
        return max(float(self._shape[_PREFILL] * self._level / _SCALES[_PREFILL]), 1e-9)

    def _recent_step_s(self) -> float:
        """Median duration of the last iterations (the prior's full step before the first)."""
        recent = self._window.seconds[-_NUM_LEVEL:]
        return _upper_median(recent.tolist()) if len(recent) else float(PRIOR[1:_PREFILL].sum())


def _kind_of(raw: _Features) -> tuple[int, ...]:
    """One number with prefill; else two, fewer sequences first."""
    _, _, num_generating, num_context_tokens, num_prefill_tokens = raw
    if num_prefill_tokens:
        return (num_prefill_tokens.bit_length(),)
    mean_context = num_context_tokens // max(1, num_generating)
    return (num_generating.bit_length(), mean_context.bit_length())


class _Window:
    """The last iterations, oldest first."""

    def __init__(self) -> None:
        self._all_features = np.empty((8 * _WINDOW, NUM_FEATURES))
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


def _round_trip(observed: Sequence[float], step_s: float) -> float:
    """Upper quartile of what was observed, but never under the step that is waited for: an engine
    that slowed down is believed before its next pause."""
    if not observed:
        return _PRIOR_STEPS * step_s
    ordered = sorted(observed)
    return max(ordered[int(_ROUND_TRIP_QUANTILE * (len(ordered) - 1))], step_s)
