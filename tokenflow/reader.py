"""What one client still has unread, and how long that lasts.

Owns the fluid model of a reader: tokens are read at `rate` tokens/s from the first token on; when
nothing is unread the reader stalls and its timeline shifts by the stall, so a late token counts
once (TokenFlow, section 3.2). The discrete reader takes token k + 1 at the instant at which the
fluid one has read exactly k, so both agree at every token border, and both run dry at once.

Invariants: consumed tokens never fall and never pass the delivered ones, whatever a client
acknowledges (late, twice, out of order, too much); a declared rate is never changed; a learned
rate comes only from intervals in which the reader certainly had something to read, because a
starved reader reads at the rate of delivery.

Pure: `now` is an argument. An instant earlier than the latest one seen counts as that latest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenflow.types import FloatArray

LEARNED_RATE_BOUNDS = (1.0, 40.0)
"""Bounds of a learned rate, tokens/s: slow listening to fast skimming. What an acknowledging
client reports beyond them is a machine or a paused screen, and neither should set deadlines."""

_MIN_LEARN_S = 0.5
"""Shortest interval a rate is learned from; shorter ones are joined to the next."""

_SURELY = 1.0 + 1e-6
"""Beyond this ratio, one number is greater than the other however both were rounded."""

_LEARN_WEIGHT = 0.3
"""Weight of a new interval against what was learned before."""


class ReaderState(NamedTuple):
    """A reader in three numbers, for columns: `unread` tokens as of `unread_time`, read at `rate`.

    unread is NaN before the first token.
    """

    unread: float
    unread_time: float
    rate: float


class Reader:
    """The reader of one stream.

    declared_rate: tokens/s the request declared; None = learn it, starting at `default_rate`.
    Both must be finite and > 0 (ValueError).
    """

    __slots__ = (
        "_anchor_consumed",
        "_anchor_time",
        "_declared",
        "_delivered",
        "_learned",
        "_min_pace",
        "_rate",
        "_stall_s",
        "_time",
        "_unread",
    )

    def __init__(self, declared_rate: float | None, default_rate: float) -> None:
        self._declared = declared_rate is not None
        self._rate = float(default_rate if declared_rate is None else declared_rate)
        if not (self._rate > 0 and math.isfinite(self._rate)):
            raise ValueError(f"read rate must be finite and > 0, got {self._rate}")
        self._delivered = 0
        self._unread = 0.0
        self._time = 0.0
        self._stall_s = 0.0
        self._learned = False
        self._anchor_time = math.nan
        self._anchor_consumed = 0
        self._min_pace = math.inf

    @property
    def rate(self) -> float:
        """Tokens/s: declared, else learned, else the default."""
        return self._rate

    @property
    def started(self) -> bool:
        """True once the first token was delivered."""
        return self._delivered > 0

    @property
    def num_delivered(self) -> int:
        """Tokens delivered so far."""
        return self._delivered

    @property
    def state(self) -> ReaderState:
        """The state that `slack_s` (the column form) continues from."""
        unread = self._unread if self._delivered else math.nan
        return ReaderState(unread, self._time, self._rate)

    def unread(self, now: float) -> float:
        """Tokens delivered and not yet read at `now`; 0 before the first token."""
        return max(0.0, self._unread - self._rate * max(0.0, now - self._time))

    def slack_s(self, now: float) -> float:
        """Seconds until the reader runs dry; NaN before the first token (undefined there)."""
        return self.unread(now) / self._rate if self.started else math.nan

    def stall_s(self, now: float) -> float:
        """Seconds during which the reader wanted a token and had none, since its first token."""
        if not self.started:
            return 0.0
        return self._stall_s + max(0.0, (now - self._time) - self._unread / self._rate)

    def deliver(self, num_tokens: int, now: float) -> None:
        """`num_tokens` (>= 0, ValueError) more tokens reached the client at `now`."""
        if num_tokens <= 0:
            if num_tokens < 0:
                raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")
            return
        if self._delivered:
            self._settle(now)
            if not self._declared:
                self._note_pace(now)
        else:
            self._time = now
            self._anchor_time = now
        self._unread += num_tokens
        self._delivered += num_tokens

    def deliver_each(self, times: Sequence[float]) -> None:
        """One more token at each of these instants, in order; as `deliver`, which has been called
        before."""
        if not self._declared:
            for now in times:
                self.deliver(1, now)
            return
        rate, time, unread = self._rate, self._time, self._unread
        for now in times:
            elapsed = now - time
            if elapsed > 0:
                num_read = rate * elapsed
                if unread <= _SURELY * num_read:  # else there is no stall, however this is rounded
                    stall_s = elapsed - unread / rate
                    if stall_s > 0:
                        self._stall_s += stall_s
                left = unread - num_read
                unread = left if left > 0 else 0.0
                time = now
            unread += 1
        self._time, self._unread = time, unread
        self._delivered += len(times)

    def acknowledge(self, num_consumed: int, now: float) -> None:
        """The client says at `now` that it has read `num_consumed` tokens since the start.

        It can only move the reader forward, and at most to what was delivered.
        """
        if not self.started:
            return
        self._settle(now)
        claimed = min(num_consumed, self._delivered)
        self._unread = min(self._unread, float(self._delivered - claimed))
        if not self._declared:
            self._learn(claimed)

    def _settle(self, now: float) -> None:
        """Read up to `now` at the current rate. As `stall_s` and `unread` say, in one place: this
        happens with every token."""
        elapsed = now - self._time
        if elapsed > 0:
            unread, rate = self._unread, self._rate
            stall_s = elapsed - unread / rate
            if stall_s > 0:
                self._stall_s += stall_s
            left = unread - rate * elapsed
            self._unread = left if left > 0 else 0.0
            self._time = now

    def _note_pace(self, now: float) -> None:
        """Remember the slowest pace at which a delivery still came before the reader ran dry."""
        elapsed = now - self._anchor_time
        if elapsed > 0:
            pace = (self._delivered - self._anchor_consumed) / elapsed
            self._min_pace = min(self._min_pace, pace)

    def _learn(self, claimed: int) -> None:
        """Take the rate between the last anchor and this claim, if nothing ran dry in between.

        A reader of constant rate that starved before some delivery had, up to that delivery, read
        everything: its mean pace over the interval is then no lower than the pace noted there.
        """
        elapsed = self._time - self._anchor_time
        if claimed <= self._anchor_consumed or elapsed < _MIN_LEARN_S:
            return
        pace = (claimed - self._anchor_consumed) / elapsed
        if pace < self._min_pace and claimed < self._delivered:
            low, high = LEARNED_RATE_BOUNDS
            sample = min(max(pace, low), high)
            weight = _LEARN_WEIGHT if self._learned else 1.0
            self._rate += weight * (sample - self._rate)
            self._learned = True
        self._anchor_time = self._time
        self._anchor_consumed = claimed
        self._min_pace = math.inf


def slack_s(
    unread: FloatArray, unread_time: FloatArray, read_rate: FloatArray, now: float
) -> FloatArray:
    """Slack in seconds of many readers at `now`, from the three numbers of `ReaderState`.

    Shapes: all [n]. NaN where unread is NaN (not started), +inf where unread is +inf (no reader).
    """
    result: FloatArray = np.maximum(unread / read_rate - np.maximum(now - unread_time, 0.0), 0.0)
    return result
