"""Whether what is drafted can be carried out in time: prefill under way, ways back.

Owns the forecasts of the next seconds. All are made from learned costs and only read the view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.scheduler_view import PREEMPTED, View
from tokenflow.types import FloatArray, IntArray

_NUM_DEADLINE_BATCHES = 4
"""Deadlines looked at by `can_bring_back`, in batches: what lies beyond is a question of rates,
which the schedulability test answers."""

_MAX_ROUNDS = 8
"""Times that the same blocks are given on and come free again, looked at by `can_bring_back`."""


class PrefillBudget:
    """How much prefill may be under way at once, in seconds of the engine.

    Decoding goes on beside chunked prefill, but slower: what is under way together must fit in
    the least slack of the readers that stay, or in the time of one step. One is always allowed, and
    the next before it is done: what is enqueued later than that finds the engine decoding alone for
    a step. Whoever is being started reads its first token, and wants the second, while the others
    are still prefilled: so not more than a reader of the started ones takes for a token.
    """

    def __init__(self, view: View) -> None:
        s = view.snapshot.sessions
        self._sessions = s
        self._rate = view.snapshot.costs.prefill_tokens_per_s
        self._taken_s = self._left_s(view)
        self._soon_s = view.snapshot.costs.plan_interval_s
        slack = s.slack_s[view.running]
        self._step_s = view.step_s
        self._limit_s = float(slack.min()) if len(slack) else float("inf")
        for row in view.starting.tolist():
            self._limit(row)

    def seconds(self, row: int) -> float:
        """Prefill time of `row`."""
        return float(self._sessions.num_resume_tokens[row]) / self._rate

    def allows(self, row: int) -> bool:
        """True if the prefill of `row` may be started now."""
        if self._taken_s <= self._soon_s:
            return True
        return self._taken_s + self.seconds(row) <= max(self._step_s, self._limit_s)

    def take(self, row: int) -> None:
        """Count the prefill of `row` as under way."""
        self._taken_s += self.seconds(row)
        self._limit(row)

    def _left_s(self, view: View) -> float:
        """Seconds of what is under way that are still to come: one after the other, in the order in
        which they were enqueued, each from the first boundary after that."""
        s, now = self._sessions, view.snapshot.now
        rows = view.starting[np.argsort(s.wait_since_time[view.starting], kind="stable")]
        end_time = 0.0
        for row in rows.tolist():
            begin_time = float(s.wait_since_time[row]) + view.step_s
            end_time = max(end_time, begin_time) + self.seconds(row)
        return max(0.0, end_time - now)

    def _limit(self, row: int) -> None:
        if self._sessions.has_reader[row]:
            self._limit_s = min(self._limit_s, 1.0 / float(self._sessions.read_rate[row]))


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
    to somebody brought back, it comes free again a cycle later; and so do its blocks where a host
    tier keeps what they held (elsewhere that is computed again, and rounds for the sake of blocks
    would end in nothing else). What neither tier could keep is computed again before its deadline,
    and so is everybody's who is due earlier: that may take a share of the time until then, or
    resumes end in nothing but recomputing. What is on the host crosses the link before its
    deadline, behind everybody's who is due earlier.
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
    deadlines, needs, recompute_s, onboard_s = _deadlines(view, out_rows)
    if (np.cumsum(recompute_s) > view.policy.recompute_share * deadlines).any():
        return False
    if onboard_s.any() and (np.cumsum(onboard_s) > deadlines + onboard_s).any():
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
    given_back = view.frees[rows]
    given_back[len(rows) - len(placed) :] = view.need[list(placed)]
    num_rounds = 1
    if np.isfinite(cycle_s):
        for_blocks = int(needs.sum()) // max(1, int(given_back.sum()))
        num_rounds += max(len(deadlines) // len(rows), min(_MAX_ROUNDS, for_blocks))
    times = (times[:, None] + cycle_s * np.arange(num_rounds) if num_rounds > 1 else times).ravel()
    blocks = np.repeat(given_back, num_rounds)
    order = np.argsort(times, kind="stable")
    available = np.searchsorted(times[order], deadlines, side="right")
    freed = np.concatenate([[0], np.cumsum(blocks[order])])[available]
    enough_slots = free_slots + available >= np.arange(1, len(deadlines) + 1)
    enough_blocks = free_blocks + freed >= np.cumsum(needs)
    return bool(enough_slots.all() and enough_blocks.all())


def _deadlines(view: View, rows: IntArray) -> tuple[FloatArray, IntArray, FloatArray, FloatArray]:
    """Seconds until each of `rows` must be enqueued, nearest first; their block needs; the seconds
    that computing again and loading each take."""
    s, policy, costs = view.snapshot.sessions, view.policy, view.snapshot.costs
    paused = s.state[rows] == PREEMPTED
    tokens_later, blocks_later = view.overflow.after_pause(rows)
    tokens = np.where(paused, view.ways.num_tokens[rows], tokens_later)
    blocks = np.where(paused, view.ways.num_blocks[rows], blocks_later)
    waited_s = np.where(paused, view.snapshot.now - s.wait_since_time[rows], 0.0)
    patience_s = np.where(
        s.has_reader[rows], s.slack_s[rows], policy.max_machine_pause_s - waited_s
    )
    deadlines = np.maximum(patience_s - view.resume_s(tokens - 1, blocks), 0.0)
    recompute_s = (tokens - 1) / costs.prefill_tokens_per_s
    onboard_s = blocks * costs.onboard_block_s
    order = np.argsort(deadlines, kind="stable")
    order = order[: _NUM_DEADLINE_BATCHES * view.snapshot.kv.max_batch_size]
    return deadlines[order], view.need[rows[order]], recompute_s[order], onboard_s[order]


def _earn_s(view: View, rows: IntArray) -> FloatArray:
    """Seconds until each of `rows`, once decoding, may be paused or has ended."""
    s, policy = view.snapshot.sessions, view.policy
    goal_s = view.pause_slack_s
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
    rate = float(view.snapshot.sessions.read_rate[rows].mean())
    gain = 1.0 / (view.step_s * rate) - 1.0
    if gain <= 0:
        return float("inf")
    return max(view.away_s, 2 * view.step_s + view.pause_slack_s / gain)
