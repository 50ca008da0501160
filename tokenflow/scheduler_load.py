"""Whether what is taken on can be carried for as long as it lasts: load against capacity.

Owns the test of schedulability, made from learned costs; it only reads the view.
"""

from __future__ import annotations

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.scheduler_tiers import loads
from tokenflow.scheduler_view import CANCELLING, PREFILLING, RESUMING, View
from tokenflow.types import FloatArray, IntArray


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
        s, policy = view.snapshot.sessions, view.policy
        served = s.started & (s.state != CANCELLING)
        served |= (s.state == PREFILLING) | (s.state == RESUMING)
        served &= ~s.held
        self._context = s.num_prompt_tokens + 0.5 * (s.num_generated + s.max_tokens)
        # Nobody can be given more than a token a step; a reader that is faster waits for each.
        self._rate = np.minimum(s.read_rate, 1.0 / view.step_s)
        # A stream that takes turns runs each time from the low share to beyond the high one.
        turn = np.maximum(policy.turn_share * s.max_tokens, policy.min_quantum_s / view.step_s)
        self._turned = self._rate * self._context / np.clip(turn, 1.0, s.max_tokens)
        context, rate = self._context[served], self._rate[served]
        self._served = np.flatnonzero(served)
        self._added: list[int] = []
        self._due: _Due | None = None
        self._sums = (
            float(len(rate)),
            float(rate.sum()),
            float(context.sum()),
            float(self._turned[served].sum()),
            float(s.num_blocks_final[served].sum()),
        )

    def add(self, row: int) -> None:
        """Count `row` as served."""
        self._sums = self._with(row)
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
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        num, _, sum_context, turned, sum_final = self._with(row)
        pool_tokens = kv.num_total_blocks * kv.tokens_per_block
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            in_pool = kv.num_total_blocks * num / sum_final
        else:
            in_pool = pool_tokens * num / sum_context
        batch = max(1, int(min(kv.max_batch_size, num, in_pool)))
        step_s = costs.step_s(batch, batch * sum_context / num)
        # Each turn starts by bringing back what the pool could not keep. The pool lets go of what
        # was paused first, which is due first: the whole overflow meets each resume, up to its own
        # length.
        left = self._share_left(turned, sum_context - pool_tokens, num / sum_context)
        return (batch / step_s) * left

    def _share_left(self, turned: float, overflow: float, per_mean: float) -> float:
        """Share of the engine's time that bringing streams back leaves for decoding.

        turned: KV tokens/s of the streams whose turn begins. overflow: KV tokens of the set that
        the device does not hold. per_mean: 1 / mean KV tokens of a stream. What the host takes of
        them is copied there, and back where that is not slower than computing: the time for which
        steps wait is lost, and a link that is busy all the time is the limit.
        """
        snapshot = self._view.snapshot
        kv, costs = snapshot.kv, snapshot.costs
        out_share = min(1.0, max(0.0, overflow) * per_mean)
        lost_share = out_share
        if loads(snapshot):
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

    def _with(self, row: int) -> tuple[float, float, float, float, float]:
        s = self._view.snapshot.sessions
        num, sum_rate, sum_context, turned, sum_final = self._sums
        context, rate = float(self._context[row]), float(self._rate[row])
        return (
            num + 1.0,
            sum_rate + rate,
            sum_context + context,
            turned + float(self._turned[row]),
            sum_final + float(s.num_blocks_final[row]),
        )


class _Due:
    """Tokens that must have been generated by each instant, so that no reader runs dry.

    A stream with usable slack u, rate R and n tokens to come needs none before u, then R per
    second, and none after u + n/R: the sum is piecewise linear, so comparing it with a line at its
    corners compares it everywhere. Slack is usable beyond some pauses with their margins. A
    stream that has not started, or has no reader, needs its rate from now on.
    rate: tokens/s of every row [n]. rows: those that are served.
    """

    def __init__(self, view: View, rows: IntArray, rate: FloatArray) -> None:
        s, policy = view.snapshot.sessions, view.policy
        margin_s = policy.slack_margin_s + policy.conservativeness * view.round_trip_s
        margin_s *= policy.bridge_margins  # what streams need left over to take turns
        self._rate = rate
        self._span_s = (s.max_tokens - s.num_generated) / rate
        slack = np.where(s.started[rows] & s.has_reader[rows], s.slack_s[rows], 0.0)
        start, rate = np.maximum(slack - margin_s, 0.0), rate[rows]
        corners = np.concatenate([start, start + self._span_s[rows]])
        order = np.argsort(corners)
        slopes = np.cumsum(np.concatenate([rate, -rate])[order])
        self._corners = corners[order]
        self._tokens = np.zeros(len(corners))
        np.cumsum(slopes[:-1] * np.diff(self._corners), out=self._tokens[1:])

    def add(self, row: int) -> None:
        """Count `row`, which starts now."""
        end = float(self._span_s[row])
        place = int(np.searchsorted(self._corners, end))
        if place == len(self._corners) or self._corners[place] != end:
            tokens = self._at(end)
            self._corners = np.insert(self._corners, place, end)
            self._tokens = np.insert(self._tokens, place, tokens)
        self._tokens = self._tokens + self._rate[row] * np.minimum(self._corners, end)

    def fits(self, row: int, capacity: float) -> bool:
        """True if nothing is due earlier than `capacity` (tokens/s) makes it, with `row`."""
        rate, end = float(self._rate[row]), float(self._span_s[row])
        tokens = self._tokens + rate * np.minimum(self._corners, end)
        at_end = self._at(end) + rate * end
        return bool((tokens <= capacity * self._corners).all() and at_end <= capacity * end)

    def _at(self, instant: float) -> float:
        if not len(self._corners):
            return 0.0
        corners = np.concatenate([[0.0], self._corners])
        return float(np.interp(instant, corners, np.concatenate([[0.0], self._tokens])))
