"""How often requests arrive, and whether more of them than usual are coming right now.

Owns two exponential moving averages of the arrival rate in continuous time, each arrival weighing
1/τ and fading with e^(−t/τ), so that silence counts too; and the same two averages of the blocks
that arrivals bring. The long one is what is usual. The short one looks back over the time that a
few usual arrivals take, so that a burst stands out after as few arrivals on a quiet server as on a
busy one, and is forgotten within seconds on both.

A burst is *seen* when the short average holds clearly more arrivals than the long one lets expect:
the excess over the expected number m must pass what a steady random stream reaches now and then,
which grows with the square root of m. It is *over* when the short average has come near the long
one, or holds less than one arrival (hysteresis). Before the first arrival the server counts as
idle: the load of a fresh server is a burst until the long average has heard of it.

Invariants: pure, `now` is an argument; an instant earlier than the latest one seen counts as that
one; `estimate` changes nothing; a burst neither begins nor begins again without an arrival.
"""

from __future__ import annotations

import math

from tokenflow.types import ArrivalEstimate

LONG_S = 20.0
"""Time constant of the long averages."""

SHORT_S = (0.1, 1.0)
"""Bounds of the short averages' time constant: below, arrivals of one client call would look like
a burst; above, one would not be forgotten within seconds."""

_NUM_USUAL = 0.5
"""Usual arrivals that the short averages span, between those bounds."""

_EXCESS = 1.6
_EXCESS_PER_ROOT = 1.6
"""Excess of the short average over m expected arrivals at which a burst is seen: `_EXCESS +
_EXCESS_PER_ROOT * sqrt(m)` arrivals. perf/arrivals.py measures what that means."""

_OVER_RATIO = 1.5
_OVER_NUM = 1.0
"""A burst is over once the short average is below so many times the long one, or holds fewer
arrivals than this."""


class ArrivalAverages:
    """Learns from `observe`; `estimate` says what is to be expected."""

    def __init__(self) -> None:
        self._time = -math.inf
        self._short_s = SHORT_S[1]
        self._short = _Average()
        self._long = _Average()
        self._burst = False

    def observe(self, now: float, num_blocks: int) -> None:
        """A request arrived that needs `num_blocks` blocks to start."""
        age_s = self._age_s(now)
        self._short = self._short.faded(age_s, self._short_s)
        self._long = self._long.faded(age_s, LONG_S)
        self._time = max(self._time, now)
        self._burst = self._burst and not self._is_over(self._short, self._long)
        # What is usual is what was before this arrival; it sets the scale by which it is judged.
        num_expected = self._long.rate * self._short_s
        self._short = self._short.plus(num_blocks, self._short_s)
        excess = self._short.rate * self._short_s - num_expected
        if excess >= _EXCESS + _EXCESS_PER_ROOT * math.sqrt(num_expected):
            self._burst = True
        self._long = self._long.plus(num_blocks, LONG_S)
        if not self._burst:
            self._rescale()

    def estimate(self, now: float) -> ArrivalEstimate:
        """What is to be expected at `now`. blocks_per_arrival is 0 before the first arrival."""
        age_s = self._age_s(now)
        short, long = self._short.faded(age_s, self._short_s), self._long.faded(age_s, LONG_S)
        burst = self._burst and not self._is_over(short, long)
        recent = short if burst else long
        return ArrivalEstimate(
            short_rate=short.rate,
            long_rate=long.rate,
            blocks_per_arrival=recent.blocks_per_arrival,
            burst=burst,
        )

    def _age_s(self, now: float) -> float:
        return max(0.0, now - self._time) if math.isfinite(self._time) else 0.0

    def _is_over(self, short: _Average, long: _Average) -> bool:
        return short.rate <= _OVER_RATIO * long.rate or short.rate * self._short_s <= _OVER_NUM

    def _rescale(self) -> None:
        """Let the short average span a few usual arrivals; not in a burst, which has its scale."""
        low, high = SHORT_S
        self._short_s = min(high, max(low, _NUM_USUAL / self._long.rate))


class _Average:
    """Arrivals/s and blocks/s; immutable."""

    __slots__ = ("_block_rate", "blocks_per_arrival", "rate")

    def __init__(
        self, rate: float = 0.0, block_rate: float = 0.0, blocks_per_arrival: float = 0.0
    ) -> None:
        self.rate = rate
        self._block_rate = block_rate
        self.blocks_per_arrival = blocks_per_arrival

    def faded(self, age_s: float, time_constant_s: float) -> _Average:
        """After `age_s` seconds without an arrival; the mean of the blocks stays."""
        factor = math.exp(-age_s / time_constant_s)
        return _Average(self.rate * factor, self._block_rate * factor, self.blocks_per_arrival)

    def plus(self, num_blocks: int, time_constant_s: float) -> _Average:
        """After one more arrival."""
        rate = self.rate + 1.0 / time_constant_s
        block_rate = self._block_rate + num_blocks / time_constant_s
        return _Average(rate, block_rate, block_rate / rate)
