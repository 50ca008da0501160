"""Time as a value that is passed in.

Decision code takes `now` as an argument and never reads a clock; the loops that do need one take
a `Clock`. `MonotonicClock` is the machine's, `ManualClock` moves only when told (tests,
simulation). Instants are float seconds on CLOCK_MONOTONIC, which on Linux is the same in every
process of a machine, so traces of server, engine and clients can be laid side by side.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Current instant in seconds; never decreases."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC of this machine."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until `advance` or `set` moves it forward."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` (>= 0) and return the new instant."""
        if seconds < 0:
            raise ValueError(f"time cannot go back (by {-seconds} s)")
        self._now += seconds
        return self._now

    def set(self, instant: float) -> None:
        """Jump to `instant`, which must not lie in the past."""
        self.advance(instant - self._now)
