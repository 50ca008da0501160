"""The scheduler of the TokenFlow guide, as written there: slack, one threshold, one ranking.

Owns nothing but the order. Rules:
- all that waits or is paused is ranked by P = −ln(max(S, δ)) + λ/(wait + δ) + μ·1[not started]; a
  paused stream whose slack is down to ε goes before everybody;
- the first in that order that does not fit asks for pauses: running streams whose slack is over the
  threshold and covers the prefill of who comes, plus ε, those with most slack first; if even all of
  them are not enough, everybody behind it waits;
- only newcomers, and paused streams that are down to ε, may ask; other paused streams take free
  room;
- in a burst (moving averages of arrivals) the oldest pages of the streams that could be paused are
  copied to the host ahead of need, where the engine can be told to.

Readings: P orders; it is not summed up, although the guide says so, because its own code fills in
order and a sum would leave room idle. The guide gives no λ, μ and δ: 0.2, 2 and 0.1 s are taken.
Nothing tests whether the load can be carried: the guide has no such test. Where the pool is about
to run out, those with most slack yield, whatever the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tokenflow.baselines.room import Room
from tokenflow.baselines.writes import write_through
from tokenflow.policies import TokenflowPolicy, WaitForm, rank
from tokenflow.types import Decision, Snapshot


def _ranking() -> TokenflowPolicy:
    return TokenflowPolicy(
        wait_form=WaitForm.FALLING, wait_weight=0.2, unstarted_bonus=2.0, slack_floor_s=0.1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidePolicy:
    """min_slack_s: the threshold (2.0 in the guide's text and benchmark, 1.5 in its code).
    margin_s: ε. ranking: holds λ, μ and δ, with the falling form of waiting. anticipate: copy ahead
    of need in a burst."""

    min_slack_s: float = 2.0
    margin_s: float = 0.5
    ranking: TokenflowPolicy = field(default_factory=_ranking)
    anticipate: bool = True


def plan(snapshot: Snapshot, policy: GuidePolicy) -> Decision:
    """The decision for this instant; a function of its arguments."""
    room = Room(snapshot)
    buffer_s = room.buffer_s
    able = room.pausable
    by_slack = able[np.argsort(-buffer_s[able], kind="stable")]
    ahead = by_slack[buffer_s[by_slack] >= policy.min_slack_s]
    room.relieve(by_slack.tolist(), spared=ahead.tolist())
    paused = set(room.pause)
    _place(room, policy, [row for row in ahead.tolist() if row not in paused])
    if policy.anticipate and snapshot.arrivals.burst:
        write_through(room, ahead)
    return room.decision()


def _place(room: Room, policy: GuidePolicy, able: list[int]) -> None:
    """Go down the ranking; able: rows that may be paused, most slack first."""
    s, rows = room.snapshot.sessions, room.outside
    if not len(rows):
        return
    buffer_s, prefill_s = room.buffer_s, room.prefill_s(rows)
    due = s.started[rows] & (buffer_s[rows] <= policy.margin_s)
    wait_s = room.snapshot.now - s.wait_since_time[rows]
    p = rank(policy.ranking, s.slack_s[rows], wait_s, s.started[rows], s.priority[rows])
    for i in np.lexsort((-p, ~due)).tolist():
        row = int(rows[i])
        if not room.fits(row):
            if s.started[row] and not due[i]:
                continue
            covers_s = float(prefill_s[i]) + policy.margin_s
            victims = _victims(room, row, [v for v in able if buffer_s[v] >= covers_s])
            if victims is None:
                return
            for victim in victims:
                room.take_out(victim, "most slack")
                able.remove(victim)
        room.place(row, "due" if due[i] else "rank")


def _victims(room: Room, row: int, able: list[int]) -> list[int] | None:
    """As many of `able`, in order, as make room for `row`; None if all of them do not."""
    slots, blocks = room.slots - 1, room.blocks - int(room.need[row])
    for i, victim in enumerate(able):
        slots, blocks = slots + 1, blocks + int(room.frees[victim])
        if slots >= 0 and blocks >= 0:
            return able[: i + 1]
    return None
