"""The rules that allow: who may be paused, who must come back, what may never be paused.

Owns the thresholds. All functions are pure and only read the view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow.policies import rank
from tokenflow.scheduler_view import Draft, View
from tokenflow.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Victims:
    """Running rows that may be paused at all, first choice (lowest P: most slack) first.

    spare_s: slack beyond the round trip and margin; a newcomer's prefill must fit in it.
    rested: the row has run its quantum.
    """

    rows: list[int]
    spare_s: list[float]
    rested: list[bool]

    def for_due(self) -> list[tuple[int, float]]:
        """(row, spare) that may yield to a due resume: those that ran their quantum first, then the
        others, because limits on pauses must not make a reader stall."""
        able = list(zip(self.rows, self.spare_s, self.rested, strict=True))
        return [
            (row, spare)
            for wanted in (True, False)
            for row, spare, rested in able
            if rested is wanted
        ]

    def for_others(self) -> list[tuple[int, float]]:
        """(row, spare) that may yield to a newcomer or to a better balance."""
        able = zip(self.rows, self.spare_s, self.rested, strict=True)
        return [(row, spare) for row, spare, rested in able if rested]


def victims(view: View) -> Victims:
    """Rows that may be paused without a stall: S_i >= κ·(pause + offload + onboard + resume + plan
    interval) + ε, with what is to be recomputed. Copies are charged only where the pool is going to
    need the blocks. A stream without a reader may be paused a bounded number of times. One
    that ends within the round trip is left to end."""
    s, policy = view.snapshot.sessions, view.policy
    rows = view.running
    if not len(rows):
        return Victims([], [], [])
    costs, slack = view.snapshot.costs, s.slack_s[rows]
    num_tokens, num_blocks = view.overflow.after_pause(rows)
    round_trip_s = view.resume_s(num_tokens - 1, num_blocks) + view.overflow.offload_s(rows)
    round_trip_s += costs.pause_s + costs.plan_interval_s
    away_s = policy.slack_margin_s + view.away_s
    spare_s = slack - (policy.conservativeness * round_trip_s + away_s)
    left_s = (s.max_tokens[rows] - s.num_generated[rows]) * view.step_s
    may = s.pausable[rows] & s.started[rows] & (spare_s >= 0)
    may &= s.has_reader[rows] | (s.num_pauses[rows] < policy.max_machine_pauses)
    may &= left_s > costs.pause_s + costs.resume_s
    rows, spare_s = rows[may], spare_s[may]
    ran_s = view.snapshot.now - s.running_since_time[rows]
    order = _yielding_order(view, rows)
    return Victims(
        rows[order].tolist(),
        spare_s[order].tolist(),
        (ran_s[order] >= view.quantum_s).tolist(),
    )


def excess_order(view: View, rows: IntArray) -> IntArray:
    """`rows` in the order in which they get what is left beyond what readers need: those that would
    run alone in the end by what they have left, the others by what they have generated."""
    s = view.snapshot.sessions
    left = s.max_tokens - s.num_generated
    num_together = len(view.running) + len(view.starting)
    tail = left[rows] * num_together >= view.policy.tail_share * left.sum()
    result: IntArray = rows[np.lexsort((-s.num_generated[rows], -(left[rows] * tail)))]
    return result


def _yielding_order(view: View, rows: IntArray) -> IntArray:
    """Positions in `rows` of who yields first: the lower class; in it streams without a reader;
    then those well ahead, last in the order of excess first; then the others, with most slack
    first (lowest P)."""
    s, policy = view.snapshot.sessions, view.policy
    p = rank(policy, s.slack_s[rows], np.zeros(len(rows)), s.started[rows], s.priority[rows])
    place = np.empty(len(s), dtype=np.int64)
    place[excess_order(view, rows)] = np.arange(len(rows), 0, -1)
    ahead = s.slack_s[rows] * s.read_rate[rows] >= policy.high_share * s.max_tokens[rows]
    behind = np.where(ahead, place[rows], len(s) + 1)
    keys = (p, behind, s.has_reader[rows], s.priority[rows])
    result: IntArray = np.lexsort(keys)
    return result


def due_rows(view: View) -> list[int]:
    """Paused rows that must come back now, most urgent first: S <= κ·t_resume + ε + plan interval,
    or, without a reader, paused for the longest time allowed. At most what one plan can place and
    pass over."""
    s, policy = view.snapshot.sessions, view.policy
    rows = view.paused
    if not len(rows):
        return []
    slack, wait_s = s.slack_s[rows], view.snapshot.now - s.wait_since_time[rows]
    due = (slack <= due_slack_s(view, rows)) | ~s.started[rows]
    due |= ~s.has_reader[rows] & (wait_s >= policy.max_machine_pause_s)
    rows, wait_s = rows[due], wait_s[due]
    urgency = np.where(s.has_reader[rows] & s.started[rows], s.slack_s[rows], 0.0)
    order = np.lexsort((-wait_s, urgency))
    limit_rows = view.snapshot.kv.max_batch_size + policy.max_passes
    result: list[int] = rows[order[:limit_rows]].tolist()
    return result


def due_slack_s(view: View, rows: IntArray) -> FloatArray:
    """Slack in seconds at which each of the paused `rows` is due."""
    policy, ways = view.policy, view.ways
    resume_s = view.resume_s(ways.num_tokens[rows] - 1, ways.num_blocks[rows])
    limit: FloatArray = policy.conservativeness * resume_s
    return limit + (policy.slack_margin_s + view.snapshot.costs.plan_interval_s)


def half_kept(view: View, draft: Draft, row: int) -> bool:
    """True unless `row` can never be paused and its kind would hold more than half of the engine.

    One alone may be larger than half, or it could never run.
    """
    s, kv = view.snapshot.sessions, view.snapshot.kv
    if s.pausable[row]:
        return True
    fixed = _fixed(view, draft)
    num_blocks = int(s.num_blocks_final[fixed].sum()) + int(s.num_blocks_final[row])
    return not fixed or (
        2 * (len(fixed) + 1) <= kv.max_batch_size and 2 * num_blocks <= kv.num_total_blocks
    )


def blocks_left_at_full_length(view: View, draft: Draft) -> int:
    """Blocks that stay free when everybody in the engine, with those drafted, grows to the end."""
    final = view.snapshot.sessions.num_blocks_final
    num_blocks = int(final[view.running].sum()) + int(final[view.starting].sum())
    num_blocks += int(final[[*draft.resume, *draft.admit]].sum()) - int(final[draft.pause].sum())
    return view.snapshot.kv.num_total_blocks - num_blocks


def _fixed(view: View, draft: Draft) -> list[int]:
    """Rows in the engine, with those drafted, that can never be paused."""
    pausable = view.snapshot.sessions.pausable
    present = [*view.running.tolist(), *view.starting.tolist(), *draft.admit]
    return [row for row in present if not pausable[row]]


def admissible(view: View, draft: Draft) -> IntArray:
    """Waiting rows, without those of a kind that already holds its half of the slots: however many
    they are and however long they wait, they are in nobody's way."""
    pausable = view.snapshot.sessions.pausable[view.waiting]
    if pausable.all():
        return view.waiting
    num_fixed = len(_fixed(view, draft))
    if not num_fixed or 2 * (num_fixed + 1) <= view.snapshot.kv.max_batch_size:
        return view.waiting
    result: IntArray = view.waiting[pausable]
    return result
