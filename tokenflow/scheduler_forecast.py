"""Whether what is taken on can be carried: load against capacity, prefill under way, ways back.

Owns the forecasts. All are made from learned costs and only read the view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.scheduler_view import View
from tokenflow.types import FloatArray, IntArray, SessionState

_NUM_DEADLINE_BATCHES = 4
"""Deadlines looked at by `can_bring_back`, in batches: what lies beyond is a question of rates,
which the schedulability test answers."""


class Load:
    """Σ R of a set of streams against its capacity Γ, newcomers added one by one.

    Γ is the decode speed of a full batch of the set at its mid-life context, prompt + half the
    output limit: measuring it now would admit on contexts that are still short. Less the time that
    recomputing takes, once the KV of the set outgrows the pool.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        s = view.snapshot.sessions
        served = s.started & (s.state != SessionState.CANCELLING)
        served |= (s.state == SessionState.PREFILLING) | (s.state == SessionState.RESUMING)
        self._context = s.num_prompt_tokens + 0.5 * s.max_tokens
        context, rate = self._context[served], s.read_rate[served]
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

    def admits(self, row: int) -> bool:
        """True if Σ R with `row` stays within ρ·Γ of that set."""
        kv, policy = self._view.snapshot.kv, self._view.policy
        costs = self._view.snapshot.costs
        num, sum_rate, sum_context, rate_context, sum_final = self._with(row)
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
        return sum_rate <= policy.load_limit * (batch / step_s) * max(0.0, 1.0 - recompute)

    def _with(self, row: int) -> tuple[float, float, float, float, float]:
        s = self._view.snapshot.sessions
        num, sum_rate, sum_context, rate_context, sum_final = self._sums
        context, rate = float(self._context[row]), float(s.read_rate[row])
        return (
            num + 1.0,
            sum_rate + rate,
            sum_context + context,
            rate_context + rate * context,
            sum_final + float(s.num_blocks_final[row]),
        )


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
    to somebody brought back, it comes free again a cycle later.
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
    deadlines, needs = _deadlines(view, out_rows)
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


def _deadlines(view: View, rows: IntArray) -> tuple[FloatArray, IntArray]:
    """Seconds until each of `rows` must be enqueued, nearest first, and their block needs."""
    s, policy = view.snapshot.sessions, view.policy
    paused = s.state[rows] == SessionState.PREEMPTED
    tokens = np.where(paused, s.num_resume_tokens[rows], view.tokens_after_pause(rows))
    waited_s = np.where(paused, view.snapshot.now - s.wait_since_time[rows], 0.0)
    patience_s = np.where(
        s.has_reader[rows], s.slack_s[rows], policy.max_machine_pause_s - waited_s
    )
    deadlines = np.maximum(patience_s - view.resume_s(tokens - 1), 0.0)
    order = np.argsort(deadlines, kind="stable")
    order = order[: _NUM_DEADLINE_BATCHES * view.snapshot.kv.max_batch_size]
    return deadlines[order], view.need[rows[order]]


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
