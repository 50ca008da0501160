"""Local search: exchanges between running and paused streams that gain more than they cost.

Owns the value of an exchange. A token produced while its reader has plenty unread is worth little
(effective throughput, TokenFlow section 7.1.3: 1 below 10 % of the output length unread, falling to
0 at 20 %). So a stream at or above the high share yields
- to one under the low share, which is nearly read out;
- where the engine makes far more than is read, to one that is so far ahead that its tokens are
  worth little anyway. What is made in excess is lost on whoever gets it: as long as it goes to few,
  all others stay where their tokens count, and those few are soon at their ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_rules import Victims, is_low
from tokenflow.scheduler_view import View
from tokenflow.types import FloatArray, IntArray

_EXCESS_WORTH = 0.5
"""Of the tokens that an exchange for one far ahead costs: they are for the most part made in
excess, as those that it is about."""

_MAX_GIVERS = 2
"""Streams that yield to one that is farther ahead, and so has more KV than each of them."""

_MAX_PASSED = 64
"""Streams for which nobody is found to yield before a plan stops looking."""


class _Giver(NamedTuple):
    """spare_s: seconds that it can spare. num_left: tokens until more are worth nothing."""

    spare_s: float
    num_left: float
    num_generated: int
    priority: float


def exchange(view: View, draft: Draft, able: Victims) -> None:
    """Draft the exchanges that pay."""
    _yield_to_low(view, draft, able)
    if len(view.paused) and _has_excess(view, draft):
        _yield_to_farthest(view, draft, able)


def _has_excess(view: View, draft: Draft) -> bool:
    """True if the engine makes far more than is read, nobody waits for it, and KV is not lost."""
    if len(draft.admit) < len(view.waiting) or view.overflow.lost_share:
        return False
    return view.load <= view.policy.max_excess_load


def _yield_to_low(view: View, draft: Draft, able: Victims) -> None:
    """Exchanges for those under the low share, neediest paused stream first.

    The worth of one: the taker runs until its reader reaches the high share; those tokens count in
    full. In the same slot the giver would have produced as many, at the worth of its own reader's
    growing store. The round trip loses the giver's token in flight and the time of what is
    recomputed, in which nobody in the batch gets a token; and that of the copies for which steps
    wait.
    """
    rows = _low_paused(view, draft)
    if not len(rows):
        return
    # Whoever gains too little from a giver whose tokens are worth nothing need not look for one.
    num_tokens, engine_s = _num_taken(view, rows), view.engine_s_of(rows)
    costs = view.policy.min_exchange_gain * _round_trip_tokens(view, engine_s)
    may_pay = num_tokens - costs > 0
    takers = rows[may_pay].tolist()
    givers = _far_ahead(view, able) if takers else {}
    if not givers:
        return
    numbers = (num_tokens[may_pay].tolist(), engine_s[may_pay].tolist(), costs[may_pay].tolist())
    needs = view.need[takers].tolist()
    known: dict[tuple[int, float], list[int] | None] = {}
    for taker, need, num, taker_s, cost in zip(takers, needs, *numbers, strict=True):
        if draft.fits(taker):
            continue
        alike = (need, taker_s)
        if alike not in known:
            willing = (row for row, giver in givers.items() if giver[0] >= taker_s)
            known[alike] = draft.victims_for(taker, willing)
        chosen = known[alike]
        if chosen is None or len(chosen) != 1:
            continue
        _, share, num_expected = givers[chosen[0]]
        if num * (1.0 - _worth(view, share, num / num_expected)) - cost > 0:
            draft.place(taker, "balance", chosen)
            del givers[chosen[0]]
            known.clear()


def _yield_to_farthest(view: View, draft: Draft, able: Victims) -> None:
    """Exchanges for those more than halfway from the high to the worthless share, most generated
    first.

    Givers are between both shares, of no higher class than the taker, and behind it by half of that
    way at least, or they would soon change places again. What one would have made until its tokens
    are worth nothing must be more than the round trip costs.
    """
    s, policy = view.snapshot.sessions, view.policy
    givers = _beginning_to_lead(view, draft, able)
    if not givers:
        return
    half = 0.5 * (policy.worthless_share - policy.high_share)
    rows = view.paused[s.has_reader[view.paused]]
    away_s = view.snapshot.now - s.wait_since_time[rows]
    rows = rows[(_share(view, rows) >= policy.high_share + half) & (away_s >= view.quantum_s)]
    most = sum(sorted(view.frees[list(givers)].tolist())[-_MAX_GIVERS:])
    rows = rows[view.need[rows] <= draft.blocks + most]
    rows = rows[(-s.num_generated[rows]).argsort(kind="stable")]
    engine_s = view.engine_s_of(rows)
    costs = _EXCESS_WORTH * _round_trip_tokens(view, engine_s)
    numbers = zip(engine_s.tolist(), costs.tolist(), strict=True)
    num_passed = 0
    for taker, (taker_s, cost) in zip(rows.tolist(), numbers, strict=True):
        if not givers or num_passed > _MAX_PASSED:
            return
        if draft.named(taker) or draft.fits(taker):
            continue
        limit = float(s.num_generated[taker]) - half * float(view.num_expected[taker])
        priority = float(s.priority[taker])
        willing = (
            row
            for row, giver in givers.items()
            if giver.spare_s >= taker_s
            and giver.num_left > cost
            and giver.num_generated < limit
            and giver.priority <= priority
        )
        chosen = draft.victims_for(taker, willing)
        if chosen is None or len(chosen) > _MAX_GIVERS:
            num_passed += 1
            continue
        draft.place(taker, "balance", chosen)
        for row in chosen:
            del givers[row]


def _beginning_to_lead(view: View, draft: Draft, able: Victims) -> dict[int, _Giver]:
    """Running streams that may yield between the high and the worthless share, by row, nearest to
    the high one first."""
    s, policy = view.snapshot.sessions, view.policy
    rows, spare_s, share = _running(view, able)
    between = ((share >= policy.high_share) & (share < policy.worthless_share)).nonzero()[0]
    between = between[share[between].argsort(kind="stable")]
    rows, spare_s, share = rows[between], spare_s[between], share[between]
    num_left = (policy.worthless_share - share) * view.num_expected[rows]
    columns = (spare_s, num_left, s.num_generated[rows], s.priority[rows])
    givers = map(_Giver, *(column.tolist() for column in columns))
    named = draft.named
    return {row: giver for row, giver in zip(rows.tolist(), givers, strict=True) if not named(row)}


def _running(view: View, able: Victims) -> tuple[IntArray, FloatArray, FloatArray]:
    """Running streams that may yield, in the order of yielding: rows, seconds to spare, unread
    shares; infinite without a reader."""
    rows, spare_s = able.others
    has_reader = view.snapshot.sessions.has_reader[rows]
    return rows, spare_s, np.where(has_reader, _share(view, rows), np.inf)


def _share(view: View, rows: IntArray) -> FloatArray:
    """Unread tokens of `rows` as shares of their outputs, as expected."""
    share: FloatArray = view.unread[rows] / view.num_expected[rows]
    return share


def _low_paused(view: View, draft: Draft) -> IntArray:
    """Paused rows under the low share that are not drafted, neediest first."""
    rows = view.paused[is_low(view, view.paused)]
    if len(rows):
        order = _share(view, rows).argsort(kind="stable")
        rows = rows[order[: view.snapshot.kv.max_batch_size]]
    if draft.resume:
        rows = rows[[not draft.named(row) for row in rows.tolist()]]
    return rows


def _num_taken(view: View, rows: IntArray) -> FloatArray:
    """Tokens until the readers of `rows` reach the high share."""
    share = view.policy.high_share - _share(view, rows)
    num: FloatArray = share * view.num_expected[rows]
    return num


def _round_trip_tokens(view: View, engine_s: FloatArray) -> FloatArray:
    """Tokens that bringing each of some streams back costs."""
    num_sequences = len(view.running) + len(view.starting)
    lost_s = engine_s + view.snapshot.costs.copy_wait_share * view.mean_copy_s
    num: FloatArray = 1.0 + num_sequences * lost_s / view.step_s
    return num


def _far_ahead(view: View, able: Victims) -> dict[int, tuple[float, float, float]]:
    """Running streams that may yield at or above the high share, in the order of yielding: row ->
    (seconds to spare, share, expected output). Infinitely far without a reader."""
    rows, spare_s, share = _running(view, able)
    ahead = share >= view.policy.high_share
    rows = rows[ahead]
    num_expected = view.num_expected[rows].astype(np.float64)
    columns = (spare_s[ahead], share[ahead], num_expected)
    values = zip(*(column.tolist() for column in columns), strict=True)
    return dict(zip(rows.tolist(), values, strict=True))


def _worth(view: View, share: float, num_more: float) -> float:
    """Mean worth of tokens, per token, for a reader whose store grows from `share` by `num_more`,
    both of its expected output."""
    policy = view.policy
    span = policy.worthless_share - policy.high_share
    return min(1.0, max(0.0, (policy.worthless_share - (share + 0.5 * num_more)) / span))
