"""When requests arrive: bursts, random arrivals, clumped ones, quiet and busy times in turn.

Owns the kinds of arrivals; each is a value that turns a random stream into instants. Invariants:
`instants` returns exactly as many as asked for, in s from 0, finite and in order; the same value,
stream and number give the same instants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenflow.types import FloatArray, IntArray


class Arrivals(Protocol):
    """A kind of arrivals."""

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """Instants in s from 0, in order [num]."""
        ...


@dataclass(frozen=True)
class Burst:
    """All within `span_s` seconds, evenly at random; 0: all at once. Raises ValueError if < 0."""

    span_s: float

    def __post_init__(self) -> None:
        _require(self.span_s >= 0, "span_s", "must be >= 0", self.span_s)

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        return np.sort(rng.uniform(0.0, self.span_s, num))


@dataclass(frozen=True)
class Poisson:
    """`rate` per second, independent of each other. Raises ValueError for rate <= 0."""

    rate: float

    def __post_init__(self) -> None:
        _require(self.rate > 0, "rate", "must be > 0", self.rate)

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        return np.cumsum(rng.exponential(1.0 / self.rate, num))


@dataclass(frozen=True)
class Gamma:
    """`rate` per second with gamma-distributed gaps; cv, their coefficient of variation: 1 is
    Poisson, above it arrivals come in clumps. Raises ValueError for values <= 0.

    BurstGPT describes the burstiness of its services by gamma gaps, and generates its
    demonstration with shape 0.5, i.e. a cv of 1.41 (arXiv 2401.17644).
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _require(self.rate > 0, "rate", "must be > 0", self.rate)
        _require(self.cv > 0, "cv", "must be > 0", self.cv)

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        shape = 1.0 / self.cv**2
        return np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate), num))


@dataclass(frozen=True, kw_only=True)
class OnOff:
    """Quiet and busy times in turn, quiet first, with random arrivals of another rate in each.

    off_rate, on_rate: arrivals/s; off_s, on_s: how long each time lasts. Raises ValueError for
    on_rate, on_s or off_s <= 0, and for off_rate < 0.
    """

    off_rate: float
    on_rate: float
    off_s: float
    on_s: float

    def __post_init__(self) -> None:
        _require(self.off_rate >= 0, "off_rate", "must be >= 0", self.off_rate)
        for name in ("on_rate", "off_s", "on_s"):
            _require(getattr(self, name) > 0, name, "must be > 0", getattr(self, name))

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        # Arrivals at rate 1 in a time that passes at the rate of the moment.
        passed = np.cumsum(rng.exponential(1.0, num))
        per_off = self.off_rate * self.off_s
        cycles, rest = np.divmod(passed, per_off + self.on_rate * self.on_s)
        quiet_s = rest / self.off_rate if self.off_rate else np.zeros(num)
        busy_s = self.off_s + (rest - per_off) / self.on_rate
        instants = cycles * (self.off_s + self.on_s) + np.where(rest < per_off, quiet_s, busy_s)
        return np.maximum.accumulate(instants)


@dataclass(frozen=True)
class Delayed:
    """`arrivals`, all of them `delay_s` later: a burst into a steady load. Raises ValueError for
    a delay < 0."""

    arrivals: Arrivals
    delay_s: float

    def __post_init__(self) -> None:
        _require(self.delay_s >= 0, "delay_s", "must be >= 0", self.delay_s)

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        return self.delay_s + self.arrivals.instants(rng, num)


@dataclass(frozen=True)
class Superposition:
    """Several kinds at once; parts: (kind, its share of the requests), shares in any unit.

    Raises ValueError for no part, and for shares that are not all > 0.
    """

    parts: tuple[tuple[Arrivals, float], ...]

    def __post_init__(self) -> None:
        _require(bool(self.parts), "parts", "must not be empty", self.parts)
        _require(all(share > 0 for _, share in self.parts), "parts", "need shares > 0", self.parts)

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        numbers = split(num, [share for _, share in self.parts])
        drawn = [
            kind.instants(rng, int(part))
            for (kind, _), part in zip(self.parts, numbers, strict=True)
        ]
        return np.sort(np.concatenate(drawn))


def split(num: int, shares: Sequence[float]) -> IntArray:
    """`num` in whole parts in proportion to `shares`, those with the largest remainders first in
    line for what is left over [len(shares)]."""
    exact = num * np.asarray(shares, dtype=np.float64) / math.fsum(shares)
    parts: IntArray = np.floor(exact).astype(np.int64)
    order = np.argsort(parts - exact, kind="stable")
    parts[order[: num - int(parts.sum())]] += 1
    return parts


def _require(holds: bool, name: str, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} {what}, got {value}")
