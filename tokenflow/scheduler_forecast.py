"""Whether what is taken on can be carried: load against capacity, prefill under way, ways back.

Owns the forecasts. All are made from learned costs and only read the view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.scheduler_view import CANCELLING, PREEMPTED, PREFILLING, RESUMING, View
from tokenflow.types import FloatArray, IntArray

_NUM_DEADLINE_BATCHES = 4
"""Deadlines looked at by `can_bring_back`, in batches: what lies beyond is a question of rates,
which the schedulability test answers."""


class Load:
    """What a set of streams needs against its capacity Γ, newcomers added one by one.

    Γ is the decode speed of a full batch of the set at its mid-life context, prompt + half the
    output limit: measuring it now would admit on contexts that are still short. Less the time that
    recomputing takes, once the KV of the set outgrows the pool. A set that started together also
    grows old together, so Γ is never taken higher than what it can decode at full length without
    that margin. Streams that their clients hold paused do not count: they generate nothing, and if
    many are released at once, their clients asked for the crowd.

    Σ R <= ρ·Γ is enough (TokenFlow, section 4.3). Beyond it a set can still be carried if what its
    readers have unread bridges the time until enough of it has ended: the tokens due by any
    instant t must not exceed a share of Γ·t (see `_Due`). So a burst of short answers starts beside
    long streams that are far ahead, although all together read faster than the engine writes.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        s = view.snapshot.sessions
        served = s.started & (s.state != CANCELLING)
        served |= (s.state == PREFILLING) | (s.state == RESUMING)
        served &= ~s.held
        self._context = s.num_prompt_tokens + 0.5 * s.max_tokens
        # Nobody can be given more than a token a step; a reader that is faster waits for each.
        self._rate = np.minimum(s.read_rate, 1.0 / view.step_s)
        context, rate = self._context[served], self._rate[served]
        self._served = np.flatnonzero(served)
        self._added: list[int] = []
        self._due: _Due | None = None
        self._sums = (
            float(len(rate)),
            float(rate.sum()),
            float(context.sum()),
            float((rate * context).sum()),
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
        at_full_length = self._capacity_at_full_length(row)
        if self._with(row)[1] <= min(policy.load_limit * capacity, at_full_length):
            return True
        if self._due is None:
            self._due = _Due(self._view, self._served, self._rate)
            for added in self._added:
                self._due.add(added)
        return self._due.fits(row, policy.bridge_limit * min(capacity, at_full_length))

    def _capacity(self, row: int) -> float:
        """Γ in tokens/s of the set with `row`."""
        kv, policy = self._view.snapshot.kv, self._view.policy
        costs = self._view.snapshot.costs
        num, _, sum_context, rate_context, sum_final = self._with(row)
        pool_tokens = kv.num_total_blocks * kv.tokens_per_block
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            in_pool = kv.num_total_blocks * num / sum_final
        else:
            in_pool = pool_tokens * num / sum_context
        batch = max(1, int(min(kv.max_batch_size, num, in_pool)))
        step_s = costs.step_s(batch, batch * sum_context / num)
        # A stream runs the share R·step of the time, turn by turn; each turn starts by recomputing
        # what the pool could not keep. The pool drops what was paused first, which is due first:
        # the whole overflow meets each resume, up to its own length.
        lost_share = min(1.0, max(0.0, sum_context - pool_tokens) * num / sum_context)
        turns_per_token = step_s / max(policy.typical_turn_s, step_s)
        recompute = rate_context * turns_per_token * lost_share / costs.prefill_tokens_per_s
        return (batch / step_s) * max(0.0, 1.0 - recompute)

    def _capacity_at_full_length(self, row: int) -> float:
        """Decode speed in tokens/s of the set with `row` when all of it is about to end."""
        kv, costs = self._view.snapshot.kv, self._view.snapshot.costs
        num, _, _, _, sum_final = self._with(row)
        batch = max(1, int(min(kv.max_batch_size, num, kv.num_total_blocks * num / sum_final)))
        context = sum_final * kv.tokens_per_block / num
        return batch / costs.step_s(batch, batch * context)

    def _with(self, row: int) -> tuple[float, float, float, float, float]:
        s = self._view.snapshot.sessions
        num, sum_rate, sum_context, rate_context, sum_final = self._sums
        context, rate = float(self._context[row]), float(self._rate[row])
        return (
            num + 1.0,
            sum_rate + rate,
            sum_context + context,
            rate_context + rate * context,
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


class PrefillBudget:
    """How much prefill may be under way at once, in seconds of the engine.

    Decoding goes on beside chunked prefill, but slower: what is under way together must fit in
    the least slack of the readers that stay, or in the time of one step. One is always allowed.
    """

    def __init__(self, view: View) -> None:
        s = view.snapshot.sessions
        self._num_tokens = s.num_resume_tokens
        self._rate = view.snapshot.costs.prefill_tokens_per_s
        self._taken_s = float(s.num_resume_tokens[view.starting].sum()) / self._rate
        slack = s.slack_s[view.running]
        self._limit_s = max(view.step_s, float(slack.min()) if len(slack) else float("inf"))

    def seconds(self, row: int) -> float:
        """Prefill time of `row`."""
        return float(self._num_tokens[row]) / self._rate

    def allows(self, row: int) -> bool:
        """True if the prefill of `row` may be started now."""
        return self._taken_s <= 0 or self._taken_s + self.seconds(row) <= self._limit_s

    def take(self, row: int) -> None:
        """Count the prefill of `row` as under way."""
        self._taken_s += self.seconds(row)


def can_bring_back(
    view: View,
    *,
    paused: Sequence[int],
    placed: Sequence[int],
    free_slots: int,
    free_blocks: int,
) -> bool:
    """True if everybody paused, with `paused` too, finds a slot and its blocks by its deadline.

    placed: rows that this plan starts or resumes. free_*: left after them. Deadlines D_k = S_k −
    t_resume. A slot comes free when its stream has earned the slack to be paused, or ends; given
    to somebody brought back, it comes free again a cycle later. What the pool could not keep is
    computed again before its deadline, and so is everybody's who is due earlier: that may take a
    share of the time until then, or resumes end in nothing but recomputing.
    """
    s = view.snapshot.sessions
    out = np.zeros(len(s), dtype=np.bool_)
    out[view.paused] = True
    out[view.pausing] = True
    out[list(placed)] = False
    out[list(paused)] = True
    out_rows = np.flatnonzero(out)
    if not len(out_rows):
        return True
    deadlines, needs, recompute_s = _deadlines(view, out_rows)
    if (np.cumsum(recompute_s) > view.policy.recompute_share * deadlines).any():
        return False
    staying = view.running[~out[view.running]]
    coming = np.concatenate([view.starting, np.asarray(placed, dtype=np.int64)])
    rows = np.concatenate([staying, coming])
    if not len(rows):
        return True
    lead_s = np.zeros(len(rows))
    prefill_s = s.num_resume_tokens[coming] / view.snapshot.costs.prefill_tokens_per_s
    lead_s[len(staying) :] = 2 * view.step_s + prefill_s
    times = lead_s + _earn_s(view, rows)
    cycle_s = _cycle_s(view, np.concatenate([rows, out_rows]))
    num_rounds = 1 + len(deadlines) // len(rows) if np.isfinite(cycle_s) else 1
    times = (times[:, None] + cycle_s * np.arange(num_rounds) if num_rounds > 1 else times).ravel()
    given_back = view.frees[rows]
    given_back[len(rows) - len(placed) :] = view.need[list(placed)]
    blocks = np.repeat(given_back, num_rounds)
    order = np.argsort(times, kind="stable")
    available = np.searchsorted(times[order], deadlines, side="right")
    freed = np.concatenate([[0], np.cumsum(blocks[order])])[available]
    enough_slots = free_slots + available >= np.arange(1, len(deadlines) + 1)
    enough_blocks = free_blocks + freed >= np.cumsum(needs)
    return bool(enough_slots.all() and enough_blocks.all())


def _deadlines(view: View, rows: IntArray) -> tuple[FloatArray, IntArray, FloatArray]:
    """Seconds until each of `rows` must be enqueued, nearest first; their block needs; the seconds
    that recomputing each takes."""
    s, policy = view.snapshot.sessions, view.policy
    paused = s.state[rows] == PREEMPTED
    tokens = np.where(paused, s.num_resume_tokens[rows], view.tokens_after_pause(rows))
    waited_s = np.where(paused, view.snapshot.now - s.wait_since_time[rows], 0.0)
    patience_s = np.where(
        s.has_reader[rows], s.slack_s[rows], policy.max_machine_pause_s - waited_s
    )
    deadlines = np.maximum(patience_s - view.resume_s(tokens - 1), 0.0)
    recompute_s = (tokens - 1) / view.snapshot.costs.prefill_tokens_per_s
    order = np.argsort(deadlines, kind="stable")
    order = order[: _NUM_DEADLINE_BATCHES * view.snapshot.kv.max_batch_size]
    return deadlines[order], view.need[rows[order]], recompute_s[order]


def _earn_s(view: View, rows: IntArray) -> FloatArray:
    """Seconds until each of `rows`, once decoding, may be paused or has ended."""
    s, policy = view.snapshot.sessions, view.policy
    goal_s = policy.conservativeness * view.round_trip_s + policy.slack_margin_s
    slack = np.where(s.started[rows], s.slack_s[rows], 0.0)
    gain = 1.0 / (view.step_s * s.read_rate[rows]) - 1.0
    missing_s = np.maximum(goal_s - slack, 0.0)
    earned_s = np.where(missing_s > 0, np.where(gain > 0, missing_s, np.inf), 0.0)
    earned_s = earned_s / np.maximum(gain, 1e-9)
    end_s = (s.max_tokens[rows] - s.num_generated[rows]) * view.step_s
    may = s.pausable[rows]
    may = may & (s.has_reader[rows] | (s.num_pauses[rows] < policy.max_machine_pauses))
    result: FloatArray = np.where(may, np.minimum(earned_s, end_s), end_s)
    return result


def _cycle_s(view: View, rows: IntArray) -> float:
    """Seconds from giving a slot to a mean stream of `rows` until it may be paused again."""
    policy = view.policy
    rate = float(view.snapshot.sessions.read_rate[rows].mean())
    gain = 1.0 / (view.step_s * rate) - 1.0
    if gain <= 0:
        return float("inf")
    goal_s = policy.conservativeness * view.round_trip_s + policy.slack_margin_s
    return 2 * view.step_s + goal_s / gain
