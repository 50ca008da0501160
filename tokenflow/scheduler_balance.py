"""Local search: let streams that are far ahead yield to paused ones that are nearly read out.

Owns the value of an exchange. A token produced while its reader has plenty unread is worth little
(effective throughput, TokenFlow section 7.1.3: 1 below 10 % of the output length unread, falling to
0 at 20 %), so a stream at or above the high share yields to one under the low share, if what is
gained exceeds the round trip it costs.
"""

from __future__ import annotations

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_rules import Victims, is_low
from tokenflow.scheduler_view import View
from tokenflow.types import FloatArray, IntArray


def exchange(view: View, draft: Draft, able: Victims) -> None:
    """Draft the exchanges that pay, neediest paused stream first.

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
        _, share, max_tokens = givers[chosen[0]]
        if num * (1.0 - _worth(view, share, num / max_tokens)) - cost > 0:
            draft.place(taker, "balance", chosen)
            del givers[chosen[0]]
            known.clear()


def _share(view: View, rows: IntArray) -> FloatArray:
    """Unread tokens of `rows` as shares of their output limits."""
    s = view.snapshot.sessions
    share: FloatArray = view.unread[rows] / s.max_tokens[rows]
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
    max_tokens = view.snapshot.sessions.max_tokens[rows]
    num: FloatArray = (view.policy.high_share - _share(view, rows)) * max_tokens
    return num


def _round_trip_tokens(view: View, engine_s: FloatArray) -> FloatArray:
    """Tokens that bringing each of some streams back costs."""
    num_sequences = len(view.running) + len(view.starting)
    lost_s = engine_s + view.snapshot.costs.copy_wait_share * view.mean_copy_s
    num: FloatArray = 1.0 + num_sequences * lost_s / view.step_s
    return num


def _far_ahead(view: View, able: Victims) -> dict[int, tuple[float, float, float]]:
    """Running streams that may yield at or above the high share, in the order of yielding: row ->
    (seconds to spare, share, output limit). Infinitely far without a reader."""
    s = view.snapshot.sessions
    rows, spare_s = able.others
    share = np.where(s.has_reader[rows], _share(view, rows), np.inf)
    ahead = share >= view.policy.high_share
    rows = rows[ahead]
    columns = (spare_s[ahead], share[ahead], s.max_tokens[rows].astype(np.float64))
    values = zip(*(column.tolist() for column in columns), strict=True)
    return dict(zip(rows.tolist(), values, strict=True))


def _worth(view: View, share: float, num_more: float) -> float:
    """Mean worth of tokens, per token, for a reader whose store grows from `share` by `num_more`,
    both of its output limit."""
    policy = view.policy
    span = policy.worthless_share - policy.high_share
    return min(1.0, max(0.0, (policy.worthless_share - (share + 0.5 * num_more)) / span))
