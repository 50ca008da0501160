"""What streams need of the engine at a few instants, from now until the last has been read.

Owns the instants, and what each stream needs and holds then, alone and summed up; only reads the
view.

Invariant: shapes are [K] for the instants and [..., n] for rows, which come last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenflow.lazy import lazy
from tokenflow.scheduler_view import View
from tokenflow.types import FloatArray, IntArray

_NUM_SPANS = 6
"""Spans of time, growing, until half of the streams have been read; the rest of the time is split
at as many points again, from the third on."""

_SPLITS = (np.arange(_NUM_SPANS + 1) / _NUM_SPANS) ** 2

_OUTSIDE = np.array([0.125, 0.875])
"""Shares of what is read per second that may end within the first span, and behind those that are
kept short."""


class Need(NamedTuple):
    """Of streams, one, or many together, at each instant, [K, ...]: how many have tokens to come,
    tokens/s that must be generated for their readers, their KV tokens."""

    num: FloatArray
    rate: FloatArray
    context: FloatArray


class Needs:
    """Of the rows of a view. A stream of rate R needs nothing while its reader has something
    unread, then R tokens/s, and nothing after its end. Its context grows meanwhile by what its
    reader reads. Whoever has not started, or has no reader, needs its rate from now on.

    served: rows that are served; these and all that wait say which instants are looked at. end_s:
    of the spans of time around the instants, seconds from now [K].
    """

    def __init__(self, view: View, served: IntArray) -> None:
        self._view = view
        self._sessions = view.snapshot.sessions
        # Nobody can be given more than a token a step; a reader that is faster waits for each.
        self._rate = np.minimum(self._sessions.read_rate, 1.0 / view.step_s)
        self._left_s = view.num_in_load_to_come / self._rate
        self._begin_s = self._seconds_to_begin()
        self._end_s = self._begin_s + self._left_s
        times = self._borders(served)
        self._instants = (0.5 * (times[1:] + times[:-1]))[:, None]  # the middles of the spans
        self._spans = (times[1:] - times[:-1])[:, None]
        self.end_s: FloatArray = times[1:]

    def _borders(self, served: IntArray) -> FloatArray:
        """Of the spans, [K + 1]: seconds from 0 until the last has been read.

        Neither many that are read for long nor one that is read for ever hide the others: the first
        span is over before an eighth of what is read per second, and those behind the half are no
        longer than all but the last eighth asks for.
        """
        # Whoever comes counts as one that has been read when it would be, had it started now.
        waiting = self._view.waiting
        end_s = np.concatenate([self._end_s[served], self._left_s[waiting]])
        order = end_s.argsort(kind="stable")
        end_s, rate = end_s[order], self._rate[np.concatenate([served, waiting])[order]]
        read = np.add.accumulate(rate)
        soon_s, late_s = end_s[read.searchsorted(_OUTSIDE * read[-1])].tolist()
        half_s, last_s = float(end_s[len(end_s) // 2]), float(end_s[-1])
        rest_s = min(last_s - half_s, max(late_s - half_s, 0.0) / _SPLITS[3])
        borders: FloatArray = np.concatenate([half_s * _SPLITS, half_s + rest_s * _SPLITS[3:]])
        borders[1], borders[-1] = min(float(borders[1]), soon_s), last_s
        return borders

    def until_end(self, values: FloatArray) -> FloatArray:
        """Sums over time of `values` a second [K, m], from now to the end of each span. Each of the
        m by itself: what is found out does not depend on who else is asked about."""
        result: FloatArray = np.add.accumulate(self._spans * values, axis=0)
        return result

    def until_middle(self, values: FloatArray) -> FloatArray:
        """As `until_end`, to the middle of each span."""
        in_span = self._spans * values
        result: FloatArray = np.add.accumulate(in_span, axis=0) - 0.5 * in_span
        return result

    def each(self, rows: IntArray) -> FloatArray:
        """The fields of `Need`, [3, K, n], of each of `rows`."""
        rate, instants = self._rate[rows], self._instants
        each = np.empty((len(Need._fields), len(instants), len(rows)))
        lasts, reads, context = each
        np.less(instants, self._end_s[rows], out=lasts)
        read_s = np.maximum(instants - self._begin_s[rows], 0.0)
        read_s *= lasts  # for which it has needed tokens, 0 if it does not
        np.multiply(rate, read_s > 0, out=reads)
        np.multiply(self._view.num_tokens[rows], lasts, out=context)
        context += rate * read_s
        return each

    def turned(self, context: FloatArray, rows: IntArray) -> FloatArray:
        """KV tokens/s of turns, [K, n], of each of `rows`, whose KV tokens are `context`."""
        return context * self._turn_rate[rows]

    def unread(self, lasts: FloatArray, reads: FloatArray, rows: IntArray) -> FloatArray:
        """KV tokens, [K, n], that each of `rows` fills beyond what has been read: a turn at most,
        while it takes turns; and half a block, its last one, in the mean. lasts, reads: see `each`.
        """
        half_block = 0.5 * (self._view.snapshot.kv.tokens_per_block - 1)
        unread: FloatArray = half_block * lasts + self._turn[rows] * (reads > 0)
        return unread

    def num_blocks_final(self, lasts: FloatArray, rows: IntArray) -> FloatArray:
        """Blocks at the end, [K, n], of each of `rows`; lasts: 1 while it is not over, else 0."""
        return lasts * self._sessions.num_blocks_final[rows]

    def _seconds_to_begin(self) -> FloatArray:
        """Until each row [n] needs tokens. Some pauses with their margins are left out of what is
        unread."""
        s, view = self._sessions, self._view
        margin_s = view.policy.slack_margin_s + view.policy.conservativeness * view.round_trip_s
        unread_s = np.maximum(s.slack_s - view.policy.bridge_margins * margin_s, 0.0)
        return np.where(s.started & s.has_reader, unread_s, 0.0)

    @lazy
    def _turn(self) -> FloatArray:
        """Tokens of a turn of each row [n]: a stream that takes turns runs each time from the low
        share to beyond the high one."""
        view, num_in_load = self._view, self._view.num_in_load
        min_turn = max(view.policy.min_quantum_s / view.step_s, 1.0)
        turn: FloatArray = np.maximum(view.policy.turn_share * num_in_load, min_turn)
        return np.minimum(turn, num_in_load)

    @lazy
    def _turn_rate(self) -> FloatArray:
        """Turns/s of each row [n]."""
        turn_rate: FloatArray = self._rate / self._turn
        return turn_rate
