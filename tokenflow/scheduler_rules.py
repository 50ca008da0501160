"""The rules that allow: who may be paused, who must come back, what may never be paused.

Owns the thresholds. All functions are pure and only read the view.
"""

from __future__ import annotations

import numpy as np

from tokenflow.lazy import lazy
from tokenflow.policies import rank
from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_view import View, highest, lowest
from tokenflow.types import BoolArray, FloatArray, IntArray


class Victims:
    """Running rows that may be paused at all, first choice (lowest P: most slack) first; found when
    somebody asks.

    Of each row (row, spare): the slack beyond the round trip and margin; what a newcomer prefills,
    or a resume computes, must fit in it. A row is rested once it has run its quantum and can be
    away for as long as is asked of turns, and spent if it has no reader and was paused as often as
    is allowed.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def has_reader(self, row: int) -> bool:
        """False for a stream that nobody reads as it comes."""
        return bool(self._view.snapshot.sessions.has_reader[row])

    @lazy
    def rows(self) -> list[int]:
        """All of them."""
        rows: list[int] = self._found[0].tolist()
        return rows

    @lazy
    def spent(self) -> set[int]:
        """Rows that yield to nobody but a reader that would stall: a bound on pauses must not make
        one wait."""
        rows, _, _, spent = self._found
        return set(rows[spent].tolist())

    @lazy
    def others(self) -> tuple[IntArray, FloatArray]:
        """Those that may yield to a newcomer or to a better balance."""
        rows, spare_s, rested, spent = self._found
        may = rested & ~spent
        spare_s = spare_s - self._view.away_s
        if np.count_nonzero(may) == len(rows):
            return rows, spare_s
        return rows[may], spare_s[may]

    @lazy
    def for_due(self) -> list[tuple[int, float]]:
        """Those that may yield to a due resume: the rested first, then the others, because limits
        on pauses must not make a reader stall. But where turns have a least length, a stream must
        have run and be able to stay away for a whole cycle of such turns together: shorter ones,
        which do little but bring back and pause again, make all readers stall."""
        rows, spare_s = self._rested_first
        view = self._view
        if len(rows) and view.away_s:
            ran_s = view.snapshot.now - view.snapshot.sessions.running_since_time[rows]
            cycle_s = view.away_s * (1.0 + len(view.paused) / len(view.in_engine))
            may = ran_s + spare_s >= cycle_s
            rows, spare_s = rows[may], spare_s[may]
        return list(zip(rows.tolist(), spare_s.tolist(), strict=True))

    @lazy
    def for_growth(self) -> list[int]:
        """Those that may yield to the growth of others: all, the rested first."""
        rows: list[int] = self._rested_first[0].tolist()
        return rows

    @lazy
    def for_others(self) -> list[tuple[int, float]]:
        """As `others`, one by one."""
        rows, spare_s = self.others
        return list(zip(rows.tolist(), spare_s.tolist(), strict=True))

    @lazy
    def _rested_first(self) -> tuple[IntArray, FloatArray]:
        rows, spare_s, rested, _ = self._found
        order = (~rested).argsort(kind="stable")
        return rows[order], spare_s[order]

    @lazy
    def _found(self) -> tuple[IntArray, FloatArray, BoolArray, BoolArray]:
        return _victims(self._view)


class Pool:
    """Those of `able` that may still yield, in order, while a draft is filled.

    due: for due resumes, else for newcomers.
    """

    def __init__(self, draft: Draft, able: Victims, *, due: bool = False) -> None:
        self._draft, self._able, self._due = draft, able, due

    def for_row(self, draft: Draft, row: int, seconds: float) -> list[int] | None:
        """As Draft.victims_for, of those that can spare `seconds`."""
        if draft.fits(row):
            return []
        able = (v for v, spare_s in self._left if spare_s >= seconds)
        if self._due and self._able.spent and not self._able.has_reader(row):
            able = (v for v in able if v not in self._able.spent)
        return draft.victims_for(row, able)

    def take_out(self, rows: list[int]) -> None:
        """They were paused."""
        for row in rows:
            if self._left[0][0] == row:
                del self._left[0]
            else:
                self._left = [entry for entry in self._left if entry[0] != row]

    @lazy
    def _left(self) -> list[tuple[int, float]]:
        able = self._able.for_due if self._due else self._able.for_others
        named = self._draft.named_rows
        return [entry for entry in able if entry[0] not in named]


def victims(view: View) -> Victims:
    """Rows that may be paused without a stall: S_i >= κ·(pause + offload + onboard + resume + plan
    interval) + ε, with what is to be recomputed. Copies are charged only where the pool is going to
    need the blocks; there a stream must be able to stay away for a while too (`Victims.for_due`: or
    run for longer). A stream without a reader may be paused a bounded number of times, and beyond
    it only for a reader that would stall. One that ends within the round trip is left to end."""
    return Victims(view)


def _victims(view: View) -> tuple[IntArray, FloatArray, BoolArray, BoolArray]:
    s, policy = view.snapshot.sessions, view.policy
    costs, rows = view.snapshot.costs, view.running
    round_trip_s = _back_s(view, rows) + (costs.pause_s + costs.plan_interval_s)
    spare_s = s.slack_s[rows] - (policy.conservativeness * round_trip_s + policy.slack_margin_s)
    # Of an answer that ends before its limit nobody knows that it is about to.
    left_s = view.num_to_come[rows] * view.step_s
    may = s.started[rows] & (spare_s >= 0) & (left_s > costs.pause_s + costs.resume_s)
    if not view.all_pausable:
        may &= s.pausable[rows]
    if np.count_nonzero(may) < len(rows):
        rows, spare_s = rows[may], spare_s[may]
    if len(rows) > 1:
        order = _yielding_order(view, rows)
        rows, spare_s = rows[order], spare_s[order]
    ran_s = view.snapshot.now - s.running_since_time[rows]
    spent = np.zeros(len(rows), dtype=np.bool_)
    if not view.all_read:
        spent = ~s.has_reader[rows] & (s.num_pauses[rows] >= policy.max_machine_pauses)
    rested = ran_s >= view.quantum_s
    if view.away_s:
        rested &= spare_s >= view.away_s
    return rows, spare_s, rested, spent


def _back_s(view: View, rows: IntArray) -> FloatArray | float:
    """Seconds for copying what the device is going to need of the running `rows` out, and for
    their resumes."""
    if not view.overflow.num_blocks:
        return view.snapshot.costs.resume_s
    num_tokens, num_blocks = view.overflow.after_pause(rows)
    return view.resume_s(num_tokens - 1, num_blocks) + view.overflow.offload_s(rows)


def is_low(view: View, rows: IntArray) -> BoolArray:
    """True for those of `rows` that have little to read: a small share of their output, and not for
    long, the less so the less readers take of what the engine makes. Never without a reader, whose
    slack is infinite."""
    s, policy = view.snapshot.sessions, view.policy
    result: BoolArray = view.unread[rows] < policy.low_share * view.num_expected[rows]
    result &= s.slack_s[rows] < policy.low_slack_s * min(1.0, view.load)
    return result


def excess_order(view: View, rows: IntArray) -> IntArray:
    """`rows` in the order in which they get what is left beyond what readers need: those that would
    run alone in the end, if nobody else comes, by what they have left; the others by what they have
    generated."""
    result: IntArray = rows[_excess_places(view, rows)]
    return result


def _excess_places(view: View, rows: IntArray) -> IntArray:
    """Positions in `rows` of who comes first in the order of excess."""
    num_generated = view.snapshot.sessions.num_generated[rows]
    left = view.num_expected_to_come[rows]
    num_together = len(view.running) + len(view.starting)
    num_alone = view.policy.tail_share * view.num_left
    if not len(rows) or view.more_come or highest(left) * num_together < num_alone:
        return (-num_generated).argsort(kind="stable")
    tail = left * num_together >= num_alone
    places: IntArray = np.lexsort((-num_generated, -(left * tail)))
    return places


def _yielding_order(view: View, rows: IntArray) -> IntArray:
    """Positions in `rows` of who yields first: the lower class; in it streams without a reader;
    then those well ahead, last in the order of excess first; then the others, with most slack
    first (lowest P)."""
    s, policy = view.snapshot.sessions, view.policy
    ahead = view.unread[rows] >= policy.high_share * view.num_expected[rows]
    order = _excess_places(view, rows)[::-1]
    if np.count_nonzero(ahead) < len(rows):
        behind = (~ahead).nonzero()[0]
        others = rows[behind]
        waited_s = np.zeros(len(others))
        p = rank(policy, s.slack_s[others], waited_s, s.started[others], s.priority[others])
        order = np.concatenate([order[ahead[order]], behind[p.argsort(kind="stable")]])
    rows = rows[order]
    if view.all_read:
        by_class = s.priority[rows].argsort(kind="stable")
    else:
        by_class = np.lexsort((s.has_reader[rows], s.priority[rows]))
    result: IntArray = order[by_class]
    return result


def due_rows(view: View) -> list[int]:
    """Paused rows that must come back now, most urgent first: S <= κ·t_resume + ε + plan interval,
    or, without a reader, paused for the longest time allowed: as urgent as a reader that runs dry
    now, and after it. At most what one plan can place and pass over."""
    s, policy = view.snapshot.sessions, view.policy
    rows = view.paused
    if not len(rows) or _surely_not_due(view, rows):
        return []
    due = (s.slack_s[rows] <= due_slack_s(view, rows)) | ~s.started[rows]
    machines = ~s.has_reader[rows]
    if machines.any():
        wait_s = view.snapshot.now - s.wait_since_time[rows]
        due |= machines & (wait_s >= policy.max_machine_pause_s)
    rows = rows[due]
    if not len(rows):
        return []
    wait_s = view.snapshot.now - s.wait_since_time[rows]
    urgency = np.where(s.has_reader[rows] & s.started[rows], s.slack_s[rows], 0.0)
    order = np.lexsort((-wait_s, ~s.has_reader[rows], urgency))
    limit_rows = view.snapshot.kv.max_batch_size + policy.max_passes
    result: list[int] = rows[order[:limit_rows]].tolist()
    return result


def _surely_not_due(view: View, rows: IntArray) -> bool:
    """True if none of the paused `rows` is due because the least slack of all is more than what
    the one that takes longest to bring back needs."""
    s, policy, costs, ways = view.snapshot.sessions, view.policy, view.snapshot.costs, view.ways
    if not view.all_read or np.count_nonzero(s.started[rows]) < len(rows):
        return False
    resume_s = costs.resume_s + (highest(ways.num_tokens[rows]) - 1) / costs.prefill_tokens_per_s
    if costs.onboard_block_s:
        resume_s += highest(ways.num_blocks[rows]) * costs.onboard_block_s
    limit_s = policy.conservativeness * resume_s + (policy.slack_margin_s + costs.plan_interval_s)
    return lowest(s.slack_s[rows]) > limit_s


def due_slack_s(view: View, rows: IntArray) -> FloatArray:
    """Slack in seconds at which each of the paused `rows` is due."""
    policy, ways = view.policy, view.ways
    resume_s = view.resume_s(ways.num_tokens[rows] - 1, ways.num_blocks[rows])
    limit: FloatArray = policy.conservativeness * resume_s
    return limit + (policy.slack_margin_s + view.snapshot.costs.plan_interval_s)


def blocks_left_at_full_length(view: View, draft: Draft) -> int:
    """Blocks that stay free when everybody in the engine, with those drafted, grows to the end."""
    final = view.snapshot.sessions.num_blocks_final
    num_blocks = int(final[view.running].sum()) + int(final[view.starting].sum())
    num_blocks += int(final[[*draft.resume, *draft.admit]].sum()) - int(final[draft.pause].sum())
    return view.snapshot.kv.num_total_blocks - num_blocks
