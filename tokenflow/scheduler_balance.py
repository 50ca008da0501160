"""Local search: let streams that are far ahead yield to paused ones that are nearly read out.

Owns the value of an exchange. A token produced while its reader has plenty unread is worth little
(effective throughput, TokenFlow section 7.1.3: 1 below 10 % of the output length unread, falling to
0 at 20 %), so a stream at or above the high share yields to one under the low share, if what is
gained exceeds the round trip it costs.
"""

from __future__ import annotations

import numpy as np

from tokenflow.scheduler_rules import Victims
from tokenflow.scheduler_view import Draft, View


def exchange(view: View, draft: Draft, able: Victims) -> None:
    """Draft the exchanges that pay, neediest paused stream first."""
    takers = _low_paused(view, draft)
    givers = _far_ahead(view, able) if takers else []
    for taker in takers:
        engine_s = view.engine_s(taker)
        willing = (row for row, spare_s in givers if spare_s >= engine_s and not draft.named(row))
        chosen = draft.victims_for(taker, willing)
        if chosen is None or len(chosen) != 1 or _gain(view, taker, chosen[0]) <= 0:
            continue
        draft.place(taker, "balance", chosen)


def _share(view: View, row: int) -> float:
    """Unread tokens of `row` as a share of its output limit."""
    s = view.snapshot.sessions
    return float(s.slack_s[row] * s.read_rate[row] / s.max_tokens[row])


def _low_paused(view: View, draft: Draft) -> list[int]:
    s, policy = view.snapshot.sessions, view.policy
    rows = view.paused[s.has_reader[view.paused]]
    if not len(rows):
        return []
    share = s.slack_s[rows] * s.read_rate[rows] / s.max_tokens[rows]
    low = share < policy.low_share
    order = np.argsort(share[low], kind="stable")[: view.snapshot.kv.max_batch_size]
    return [row for row in rows[low][order].tolist() if not draft.named(row)]


def _far_ahead(view: View, able: Victims) -> list[tuple[int, float]]:
    """(row, spare) of running streams at or above the high share, in the order of yielding."""
    s = view.snapshot.sessions
    return [
        (row, spare_s)
        for row, spare_s in able.for_others()
        if not s.has_reader[row] or _share(view, row) >= view.policy.high_share
    ]


def _gain(view: View, taker: int, giver: int) -> float:
    """Worth of tokens gained by the exchange, less what its round trip must bring.

    The taker runs until its reader reaches the high share; those tokens count in full. In the same
    slot the giver would have produced as many, at the worth of its own reader's growing store. The
    round trip loses the giver's token in flight and the time of what is recomputed, in which nobody
    in the batch gets a token; and that of the copies for which steps wait.
    """
    s, policy, costs = view.snapshot.sessions, view.policy, view.snapshot.costs
    num_tokens = (policy.high_share - _share(view, taker)) * float(s.max_tokens[taker])
    worth = 0.0
    if s.has_reader[giver]:
        middle = _share(view, giver) + 0.5 * num_tokens / float(s.max_tokens[giver])
        span = policy.worthless_share - policy.high_share
        worth = min(1.0, max(0.0, (policy.worthless_share - middle) / span))
    lost_s = view.engine_s(taker) + costs.copy_wait_share * view.overflow.mean_copy_s
    num_sequences = len(view.running) + len(view.starting)
    round_trip_tokens = 1.0 + num_sequences * lost_s / view.step_s
    return num_tokens * (1.0 - worth) - policy.min_exchange_gain * round_trip_tokens
