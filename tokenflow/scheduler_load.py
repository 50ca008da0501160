"""Whether what is taken on can be carried for as long as it lasts: load against capacity.

Owns the test of schedulability, made from learned costs; it only reads the view.
"""

from __future__ import annotations

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.lazy import lazy
from tokenflow.scheduler_tiers import loads
from tokenflow.scheduler_view import CANCELLING, View
from tokenflow.types import FloatArray, IntArray

_SURELY = 1.0 + 1e-9
"""Beyond this ratio, one sum is greater than the other however both were rounded."""

_Sums = tuple[float, float, float, float, float]
"""Of a set of streams: how many, read rates, contexts, KV tokens/s of turns, blocks at the end."""


class Load:
    """What a set of streams needs against its capacity Γ, newcomers added one by one.

    Γ is the decode speed of a full batch of the set at the mean context of what it still has to
    generate, half-way from now to its full length: measuring it now would admit on contexts that
    are still short. Less the time that recomputing takes, once the KV of the set outgrows the tiers
    that hold it, and that of copies for which steps wait, once it outgrows the device. A set that
    started together grows old together and is slower in the end, but what it generated before, when
    it was faster, is unread or has ended some of it: over the whole life the mean counts. Streams
    that their clients hold paused do not count: they generate nothing, and if many are released at
    once, their clients asked for the crowd.

    Σ R <= ρ·Γ is enough (TokenFlow, section 4.3). Beyond it a set can still be carried if what its
    readers have unread bridges the time until enough of it has ended: the tokens due by any
    instant t must not exceed a share of Γ·t (see `_Due`). So a burst of short answers starts beside
    long streams that are far ahead, although all together read faster than the engine writes.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        s, kv, policy = view.snapshot.sessions, view.snapshot.kv, view.policy
        self._is_reserved = kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
        self._num_pool_tokens = kv.num_total_blocks * kv.tokens_per_block
        self._loads = loads(view.snapshot)
        served = s.started & ~s.held & (s.state != CANCELLING)
        served[view.starting] = ~s.held[view.starting]
        rows = self._served = served.nonzero()[0]
        # Nobody can be given more than a token a step; a reader that is faster waits for each.
        self._max_rate = 1.0 / view.step_s
        # A stream that takes turns runs each time from the low share to beyond the high one.
        self._min_turn = max(policy.min_quantum_s / view.step_s, 1.0)
        self._rate, context, turned = self._needs(rows)
        self._added: list[int] = []
        self._due: _Due | None = None
        self._sums: _Sums = (
            float(len(rows)),
            float(self._rate.sum()),
            float(context.sum()),
            float(turned.sum()),
            float(s.num_blocks_final[rows].sum()),
        )
        self._next: tuple[int, _Sums] = (-1, self._sums)
        self._ahead: list[_Sums] = []

    def _needs(self, rows: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of each of `rows`: tokens/s that it needs, its mean context from now on, and KV tokens/s
        of its turns."""
        s, policy = self._view.snapshot.sessions, self._view.policy
        max_tokens = s.max_tokens[rows]
        context = s.num_prompt_tokens[rows] + 0.5 * (s.num_generated[rows] + max_tokens)
        rate = np.minimum(s.read_rate[rows], self._max_rate)
        turn = np.minimum(np.maximum(policy.turn_share * max_tokens, self._min_turn), max_tokens)
        return rate, context, rate * context / turn

    def num_admitted(self, rows: IntArray) -> int:
        """How many of the first of `rows` have Σ R <= ρ·Γ when they are added one after the other;
        some more may be admitted all the same."""
        limit, num = self._view.policy.load_limit, 0
        self._ahead = self._with_each(rows)
        for sums in self._ahead:
            if sums[1] > limit * self._capacity_of(sums):
                break
            num += 1
        return num

    def add_first(self, rows: IntArray) -> None:
        """Count `rows`, the first of those that `num_admitted` was asked about last, as served."""
        self._sums = self._ahead[len(rows) - 1]
        self._next = (-1, self._sums)
        self._added += rows.tolist()
        self._due = None

    def add(self, row: int) -> None:
        """Count `row` as served."""
        self._sums = self._with(row)
        self._next = (-1, self._sums)
        self._added.append(row)
        if self._due is not None:
            self._due.add(row)

    def admits(self, row: int) -> bool:
        """True if the set with `row` can be carried."""
        policy, capacity = self._view.policy, self._capacity(row)
        if self._with(row)[1] <= policy.load_limit * capacity:
            return True
        if self._due is None:
            self._due = _Due(self._view, self._served, self._rate)
            for added in self._added:
                self._due.add(added)
        return self._due.fits(row, policy.bridge_limit * capacity)

    def _capacity(self, row: int) -> float:
        """Γ in tokens/s of the set with `row`."""
        return self._capacity_of(self._with(row))

    def _capacity_of(self, sums: _Sums) -> float:
        """Γ in tokens/s of a set."""
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        num, _, sum_context, turned, sum_final = sums
        if self._is_reserved:
            in_pool = kv.num_total_blocks * num / sum_final
        else:
            in_pool = self._num_pool_tokens * num / sum_context
        batch = max(1, int(min(kv.max_batch_size, num, in_pool)))
        step_s = costs.step_s(batch, batch * sum_context / num)
        # Each turn starts by bringing back what the pool could not keep. The pool lets go of what
        # was paused first, which is due first: the whole overflow meets each resume, up to its own
        # length.
        overflow = sum_context - self._num_pool_tokens
        left = self._share_left(turned, overflow, num / sum_context)
        return (batch / step_s) * left

    def _share_left(self, turned: float, overflow: float, per_mean: float) -> float:
        """Share of the engine's time that bringing streams back leaves for decoding.

        turned: KV tokens/s of the streams whose turn begins. overflow: KV tokens of the set that
        the device does not hold. per_mean: 1 / mean KV tokens of a stream. What the host takes of
        them is copied there, and back where that is not slower than computing: the time for which
        steps wait is lost, and a link that is busy all the time is the limit.
        """
        if overflow <= 0:
            return 1.0
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        out_share = min(1.0, overflow * per_mean)
        lost_share = out_share
        if self._loads:
            num_lost = max(0.0, overflow - kv.num_host_blocks * kv.tokens_per_block)
            lost_share = min(1.0, num_lost * per_mean)
        recompute = turned * lost_share / costs.prefill_tokens_per_s
        if not kv.num_host_blocks:
            return max(0.0, 1.0 - recompute)
        turned_blocks = turned / kv.tokens_per_block
        offload = turned_blocks * out_share * costs.offload_block_s
        onboard = turned_blocks * (out_share - lost_share) * costs.onboard_block_s
        left = max(0.0, 1.0 - recompute - costs.copy_wait_share * (offload + onboard))
        link = max(offload, onboard) if kv.has_tiering else offload + onboard
        return left if link <= 1.0 else min(left, 1.0 / link)

    def _with(self, row: int) -> _Sums:
        """The sums with `row`, which is not served."""
        known, sums = self._next
        if known == row:
            return sums
        s, policy = self._view.snapshot.sessions, self._view.policy
        num, sum_rate, sum_context, turned, sum_final = self._sums
        max_tokens = int(s.max_tokens[row])
        context = int(s.num_prompt_tokens[row]) + 0.5 * (int(s.num_generated[row]) + max_tokens)
        rate = min(float(s.read_rate[row]), self._max_rate)
        turn = min(max(policy.turn_share * max_tokens, self._min_turn), float(max_tokens))
        sums = (
            num + 1.0,
            sum_rate + rate,
            sum_context + context,
            turned + rate * context / turn,
            sum_final + float(s.num_blocks_final[row]),
        )
        self._next = (row, sums)
        return sums

    def _with_each(self, rows: IntArray) -> list[_Sums]:
        """The sums with the first of `rows`, with the first two, and so on."""
        final = self._view.snapshot.sessions.num_blocks_final[rows]
        rate, context, turned = self._needs(rows)
        values = np.array([np.ones(len(rows)), rate, context, turned, final])
        start = np.array(self._sums)[:, None]
        sums = np.concatenate([start, values], axis=1).cumsum(axis=1)
        return list(map(tuple, sums[:, 1:].T.tolist()))


class _Due:
    """Tokens that must have been generated by each instant, so that no reader runs dry.

    A stream with usable slack u, rate R and n tokens to come needs none before u, then R per
    second, and none after u + n/R: the sum is piecewise linear, so comparing it with a line at its
    corners compares it everywhere. Slack is usable beyond some pauses with their margins. A
    stream that has not started, or has no reader, needs its rate from now on.
    Most sets that cannot be carried fail at two instants that are known at once; the corners are
    only put in order where that does not tell.
    rows: those that are served. rate: their tokens/s.
    """

    def __init__(self, view: View, rows: IntArray, rate: FloatArray) -> None:
        s, policy = view.snapshot.sessions, view.policy
        margin_s = policy.slack_margin_s + policy.conservativeness * view.round_trip_s
        margin_s *= policy.bridge_margins  # what streams need left over to take turns
        self._sessions, self._max_rate = s, 1.0 / view.step_s
        slack = np.where(s.started[rows] & s.has_reader[rows], s.slack_s[rows], 0.0)
        self._rate = rate
        self._span_s = (s.max_tokens[rows] - s.num_generated[rows]) / rate
        self._start = np.maximum(slack - margin_s, 0.0)
        self._end = self._start + self._span_s
        self._has_added = False

    def add(self, row: int) -> None:
        """Count `row`, which starts now."""
        rate, end = self._line_of(row)
        corners, tokens = self._line
        place = int(corners.searchsorted(end))
        if place == len(corners) or corners[place] != end:
            at_end = self._at(end)
            corners = np.concatenate([corners[:place], [end], corners[place:]])
            tokens = np.concatenate([tokens[:place], [at_end], tokens[place:]])
        self._line = corners, tokens + rate * np.minimum(corners, end)
        self._has_added = True

    def fits(self, row: int, capacity: float) -> bool:
        """True if nothing is due earlier than `capacity` (tokens/s) makes it, with `row`."""
        rate, end = self._line_of(row)
        if not self._has_added and self._surely_not(rate, end, capacity):
            return False
        corners, tokens = self._line
        if self._at(end) + rate * end > capacity * end:
            return False
        return bool((tokens + rate * np.minimum(corners, end) <= capacity * corners).all())

    def _surely_not(self, rate: float, end: float, capacity: float) -> bool:
        """True if the tokens due by the mean stream's length, or its end, are too many, however
        sums are rounded; a newcomer reads `rate` until `end`."""
        num = len(self._rate)
        for times in (self._span_s, self._end) if num else ():
            instant = float(times.sum()) / num
            read_s = np.minimum(np.maximum(instant - self._start, 0.0), self._span_s)
            tokens = float(self._rate.dot(read_s)) + rate * min(instant, end)
            if tokens > capacity * instant * _SURELY:
                return True
        return False

    @lazy
    def _line(self) -> tuple[FloatArray, FloatArray]:
        """Corners in order, from 0, and the tokens due by each."""
        corners = np.concatenate([self._start, self._end])
        order = corners.argsort(kind="stable")
        slopes = np.concatenate([self._rate, -self._rate])[order].cumsum()
        corners = np.concatenate([[0.0], corners[order]])
        tokens = np.zeros(len(corners))
        np.cumsum(slopes[:-1] * (corners[2:] - corners[1:-1]), out=tokens[2:])
        return corners, tokens

    def _line_of(self, row: int) -> tuple[float, float]:
        """Rate of `row`, and the instant at which it has read all if it starts now."""
        s = self._sessions
        rate = min(float(s.read_rate[row]), self._max_rate)
        return rate, int(s.max_tokens[row] - s.num_generated[row]) / rate

    def _at(self, instant: float) -> float:
        """Tokens due by then, on the line between two corners."""
        corners, tokens = self._line
        after = int(corners.searchsorted(instant, side="right"))
        if after == len(corners):
            return float(tokens[-1])
        left, right = float(corners[after - 1]), float(corners[after])
        begin, end = float(tokens[after - 1]), float(tokens[after])
        return begin + (end - begin) / (right - left) * (instant - left)
