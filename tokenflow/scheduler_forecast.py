"""Whether what is drafted can be carried out in time: prefill under way, ways back.

Owns the forecasts of the next seconds. All are made from learned costs and only read the view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tokenflow.scheduler_sure import MAX_ROUNDS, surely_back
from tokenflow.scheduler_view import PREEMPTED, View, highest, lowest, num_first
from tokenflow.types import FloatArray, IntArray

_NUM_DEADLINE_BATCHES = 4
"""Deadlines looked at by `can_bring_back`, in batches: what lies beyond is a question of rates,
which the schedulability test answers."""


class PrefillBudget:
    """How much prefill may be under way at once, in seconds of the engine.

    Decoding goes on beside chunked prefill, but slower: what is under way together must fit in
    the least slack of the readers that stay, or in the time of one step. One is always allowed, and
    the next before it is done: what is enqueued later than that finds the engine decoding alone for
    a step. Whoever is being started reads its first token, and wants the second, while the others
    are still prefilled: so not more than a reader of the started ones takes for a token.

    tokens_per_s: of prefill.
    """

    def __init__(self, view: View) -> None:
        s = view.snapshot.sessions
        self._sessions = s
        self.tokens_per_s = view.snapshot.costs.prefill_tokens_per_s
        self._taken_s = self._left_s(view)
        self._soon_s = view.snapshot.costs.plan_interval_s
        self._step_s = view.step_s
        self._limit_s = lowest(s.slack_s[view.running]) if len(view.running) else math.inf
        self._limit(view.starting)

    def seconds(self, row: int) -> float:
        """Prefill time of `row`."""
        return float(self._sessions.num_resume_tokens[row]) / self.tokens_per_s

    def allows(self, row: int) -> bool:
        """True if the prefill of `row` may be started now."""
        if self._taken_s <= self._soon_s:
            return True
        return self._taken_s + self.seconds(row) <= max(self._step_s, self._limit_s)

    def take(self, row: int) -> None:
        """Count the prefill of `row` as under way."""
        self._taken_s += self.seconds(row)
        if self._sessions.has_reader[row]:
            self._limit_s = min(self._limit_s, 1.0 / float(self._sessions.read_rate[row]))

    def take_first(self, rows: IntArray, seconds: FloatArray) -> int:
        """`allows` and `take` for one of `rows`, one or more, after the other, as far as they are
        allowed; returns how many those are. seconds: prefill time of each."""
        taken_s = np.empty(len(rows) + 1)
        taken_s[0], taken_s[1:] = self._taken_s, seconds
        taken_s = np.add.accumulate(taken_s)
        num = len(rows)
        if taken_s[-2] > self._soon_s:  # else each begins before those ahead of it are done
            num = self._num_allowed(rows, taken_s)
        self._taken_s = float(taken_s[num])
        self._limit(rows[:num])
        return num

    def _num_allowed(self, rows: IntArray, taken_s: FloatArray) -> int:
        """How many of the first of `rows` are allowed; taken_s [n + 1]: under way before each, and
        after the last."""
        s = self._sessions
        token_s = np.where(s.has_reader[rows], 1.0 / s.read_rate[rows], np.inf)
        limit_s = np.minimum.accumulate(np.concatenate([[self._limit_s], token_s[:-1]]))
        allowed = taken_s[1:] <= np.maximum(limit_s, self._step_s)
        return num_first((taken_s[:-1] <= self._soon_s) | allowed)

    def _left_s(self, view: View) -> float:
        """Seconds of what is under way that are still to come: one after the other, in the order in
        which they were enqueued, each from the first boundary after that; once the first has begun
        not less than a step, with which it ends."""
        s, rows = self._sessions, view.starting
        if not len(rows):
            return 0.0
        rows = rows[s.wait_since_time[rows].argsort(kind="stable")]
        begin_times = (s.wait_since_time[rows] + view.step_s).tolist()
        prefill_s = (s.num_resume_tokens[rows] / self.tokens_per_s).tolist()
        end_time = 0.0
        for begin_time, seconds in zip(begin_times, prefill_s, strict=True):
            end_time = max(end_time, begin_time) + seconds
        least_s = view.step_s if begin_times[0] < view.snapshot.now else 0.0
        return max(least_s, end_time - view.snapshot.now)

    def _limit(self, rows: IntArray) -> None:
        """Not more from now on than a reader of `rows` takes for a token."""
        s = self._sessions
        if len(rows):
            rate = s.read_rate[rows][s.has_reader[rows]]
            if len(rate):
                self._limit_s = min(self._limit_s, 1.0 / highest(rate))


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
    rows = np.array(paused, dtype=np.int64), np.array(placed, dtype=np.int64)
    return surely_back(view, *rows, free_slots=free_slots, free_blocks=free_blocks) or back_in_time(
        view, *rows, free_slots=free_slots, free_blocks=free_blocks
    )


def back_in_time(
    view: View,
    paused_rows: IntArray,
    placed_rows: IntArray,
    *,
    free_slots: int,
    free_blocks: int,
) -> bool:
    """As `can_bring_back`, by everybody's own deadline."""
    s, costs = view.snapshot.sessions, view.snapshot.costs
    out = np.zeros(len(s), dtype=np.bool_)
    out[view.paused] = True
    out[view.pausing] = True
    out[placed_rows] = False
    out[paused_rows] = True
    out_rows = out.nonzero()[0]
    if not len(out_rows):
        return True
    deadlines, needs, recompute_s, onboard_s = _deadlines(view, out_rows)
    if np.count_nonzero(recompute_s.cumsum() > view.policy.recompute_share * deadlines):
        return False
    if onboard_s is not None and np.count_nonzero(onboard_s.cumsum() > deadlines + onboard_s):
        return False
    staying = view.running[~out[view.running]]
    coming = np.concatenate([view.starting, placed_rows])
    rows = np.concatenate([staying, coming])
    if not len(rows):
        return True
    times = _earn_s(view, rows)
    prefill_s = s.num_resume_tokens[coming] / costs.prefill_tokens_per_s
    times[len(staying) :] += 2 * view.step_s + prefill_s
    given_back = view.frees[rows]
    given_back[len(rows) - len(placed_rows) :] = view.need[placed_rows]
    cycle_s = _cycle_s(view, np.concatenate([rows, out_rows]))
    if math.isfinite(cycle_s):
        for_blocks = int(np.add.reduce(needs)) // max(1, int(np.add.reduce(given_back)))
        num_rounds = 1 + max(len(deadlines) // len(rows), min(MAX_ROUNDS, for_blocks))
        if num_rounds > 1:
            if not _fits_at_once(times, given_back, deadlines, needs - free_blocks):
                return False
            times = (times[:, None] + cycle_s * np.arange(num_rounds)).ravel()
            given_back = given_back.repeat(num_rounds)
    in_time = times <= deadlines[-1]
    times, given_back = times[in_time], given_back[in_time]
    order = times.argsort(kind="stable")
    available = times[order].searchsorted(deadlines, side="right")
    freed = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.accumulate(given_back[order], out=freed[1:])
    late = free_slots + available < np.arange(1, len(deadlines) + 1)
    late |= free_blocks + freed[available] < needs.cumsum()
    return not np.count_nonzero(late)


def _fits_at_once(
    times: FloatArray, given_back: IntArray, deadlines: FloatArray, short: IntArray
) -> bool:
    """True if at each of `deadlines` what has come free once, at `times`, is as much as its stream
    is `short` of: however often blocks are given on, they are there once at any one instant."""
    order = times.argsort(kind="stable")
    freed = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.accumulate(given_back[order], out=freed[1:])
    available = times[order].searchsorted(deadlines, side="right")
    return not np.count_nonzero(freed[available] < short)


def _deadlines(
    view: View, rows: IntArray
) -> tuple[FloatArray, IntArray, FloatArray, FloatArray | None]:
    """Seconds until each of `rows` must be enqueued, nearest first; their block needs; the seconds
    that computing again and loading each take (None: nothing is loaded)."""
    s, policy, costs = view.snapshot.sessions, view.policy, view.snapshot.costs
    paused, ways = s.state[rows] == PREEMPTED, view.ways
    tokens_later, blocks_later = view.overflow.after_pause(rows)
    tokens = np.where(paused, ways.num_tokens[rows], tokens_later)
    patience_s, has_reader = s.slack_s[rows], s.has_reader[rows]
    if np.count_nonzero(has_reader) < len(rows):
        waited_s = np.where(paused, view.snapshot.now - s.wait_since_time[rows], 0.0)
        patience_s = np.where(has_reader, patience_s, policy.max_machine_pause_s - waited_s)
    recompute_s = (tokens - 1) / costs.prefill_tokens_per_s
    resume_s, onboard_s = costs.resume_s + recompute_s, None
    if costs.onboard_block_s:
        onboard_s = np.where(paused, ways.num_blocks[rows], blocks_later) * costs.onboard_block_s
        resume_s = resume_s + onboard_s
    deadlines = np.maximum(patience_s - resume_s, 0.0)
    order = deadlines.argsort(kind="stable")
    order = order[: _NUM_DEADLINE_BATCHES * view.snapshot.kv.max_batch_size]
    onboard_s = None if onboard_s is None else onboard_s[order]
    return deadlines[order], view.need[rows[order]], recompute_s[order], onboard_s


def _earn_s(view: View, rows: IntArray) -> FloatArray:
    """Seconds until each of `rows`, once decoding, may be paused or has ended."""
    s = view.snapshot.sessions
    slack = np.where(s.started[rows], s.slack_s[rows], 0.0)
    gain = 1.0 / (view.step_s * s.read_rate[rows]) - 1.0
    missing_s = np.maximum(view.turn_slack_s - slack, 0.0)
    earned_s = missing_s / np.maximum(gain, 1e-9)
    if lowest(gain) <= 0:
        earned_s[(gain <= 0) & (missing_s > 0)] = np.inf
    # What others will need by a deadline must not hang on an answer that is expected to be over.
    end_s: FloatArray = view.num_to_come[rows] * view.step_s
    result: FloatArray = np.where(s.pausable[rows], np.minimum(earned_s, end_s), end_s)
    return result


def _cycle_s(view: View, rows: IntArray) -> float:
    """Seconds from giving a slot to a mean stream of `rows` until it may be paused again."""
    rate = float(np.add.reduce(view.snapshot.sessions.read_rate[rows])) / len(rows)
    gain = 1.0 / (view.step_s * rate) - 1.0
    if gain <= 0:
        return float("inf")
    return max(view.turn_s, 2 * view.step_s + view.turn_slack_s / gain)
