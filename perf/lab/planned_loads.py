"""Loads of a growing size: what is asked of a machine when one asks how much it can take.

Owns the kinds of load. A load is one number (arrivals per second, or requests at once); everything
else of it stays as it is. Invariant: two loads of one kind with the same seed have the same
requests, only closer together (or more of them), so that a larger load is harder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from perf.lab.arrivals import Arrivals, Burst, Gamma, OnOff, Poisson
from perf.lab.lengths import Normal
from perf.lab.mixes import Mix, OneRate
from perf.lab.workloads import Singles, streams
from perf.virtual.values import SimRequest
from tokenflow.types import FloatArray

BURST_GAP_S = 1e-3
"""Between two requests of a burst, in the mean: a client that sends without pauses."""
_FILL_SEEDS = 1 << 32
"""Added to a seed: random numbers of their own for those who are there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Who asks for what: all read `rate` tokens/s; prompts and answers, means in tokens, are
    normally distributed (lengths.Normal). Raises ValueError as OneRate and Normal."""

    rate: float
    prompt_tokens: float
    answer_tokens: float

    def requests(self, num: int, arrivals: Arrivals, seed: int) -> list[SimRequest]:
        """`num` of them, in order of arrival."""
        singles = Singles(
            num_requests=num,
            arrivals=arrivals,
            prompts=Normal(mean=self.prompt_tokens),
            answers=Normal(mean=self.answer_tokens),
            mix=Mix(readers=OneRate(self.rate)),
        )
        return singles.requests(seed)


class PlannedWork(NamedTuple):
    """Requests in order of arrival.

    num_warm_up: the first so many are not measured. look_time: when arrivals are over, s from 0;
    None where they do not go on.
    """

    requests: list[SimRequest]
    num_warm_up: int
    look_time: float | None


def behind_full_machine(
    work: PlannedWork, readers: Readers, seed: int, *, num: int, span_s: float
) -> PlannedWork:
    """`work` after `num` streams that come within `span_s`, each somewhere in its life: of its
    answer a random part is in the prompt, the rest is left.

    A machine that starts empty takes many lives of streams to fill up if it is asked for only a
    little more than it can do, and until then everything looks well.
    """
    assert work.look_time is not None, "a burst meets an empty machine"
    seed += _FILL_SEEDS
    born = streams(seed, 5)[4].random(num)
    fill = [
        _later_in_life(request, share)
        for request, share in zip(readers.requests(num, Burst(span_s), seed), born, strict=True)
    ]
    rest = [replace(r, arrival_time=r.arrival_time + span_s) for r in work.requests]
    return PlannedWork(fill + rest, num + work.num_warm_up, work.look_time + span_s)


def _later_in_life(request: SimRequest, share: float) -> SimRequest:
    num_done = int(share * request.max_tokens)
    return replace(
        request,
        num_prompt_tokens=request.num_prompt_tokens + num_done,
        max_tokens=request.max_tokens - num_done,
    )


class LoadKind(Protocol):
    """A kind of load."""

    @property
    def name(self) -> str:
        """What the command calls it."""
        ...

    @property
    def unit(self) -> str:
        """What its number counts."""
        ...

    @property
    def goes_on(self) -> bool:
        """True for arrivals per second without an end, False for a number of requests."""
        ...

    @property
    def shape(self) -> dict[str, Any]:
        """Its other numbers, by the names of the command's flags."""
        ...

    def work(
        self, load: float, readers: Readers, seed: int, *, num_warm_up: int, num_measured: int
    ) -> PlannedWork:
        """A load's requests; where arrivals go on, at least `num_measured` after a warm-up."""
        ...


@dataclass(frozen=True)
class OneBurst:
    """So many requests at once, `BURST_GAP_S` apart. All are measured."""

    name: ClassVar[str] = "burst"
    unit: ClassVar[str] = "requests at once"
    goes_on: ClassVar[bool] = False

    @property
    def shape(self) -> dict[str, Any]:
        """See LoadKind."""
        return {}

    def work(
        self, load: float, readers: Readers, seed: int, *, num_warm_up: int, num_measured: int
    ) -> PlannedWork:
        """See LoadKind; `load` is a whole number."""
        num = round(load)
        return PlannedWork(readers.requests(num, Burst(BURST_GAP_S * num), seed), 0, None)


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Random arrivals that go on; cv: of their gaps, see arrivals.Gamma; 1 is Poisson.

    Instants are stretched so that in each run exactly as many come per second as the load says:
    else few requests would be a load of their own.
    """

    cv: float = 1.0
    unit: ClassVar[str] = "arrivals/s"
    goes_on: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """See LoadKind."""
        return "poisson" if self.cv == 1.0 else "gamma"

    @property
    def shape(self) -> dict[str, Any]:
        """See LoadKind."""
        return {} if self.cv == 1.0 else {"cv": self.cv}

    def work(
        self, load: float, readers: Readers, seed: int, *, num_warm_up: int, num_measured: int
    ) -> PlannedWork:
        """See LoadKind."""
        num = num_warm_up + num_measured
        arrivals = Poisson(load) if self.cv == 1.0 else Gamma(load, self.cv)
        requests = readers.requests(num, _Stretched(arrivals, load), seed)
        return PlannedWork(requests, num_warm_up, num / load)


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """Quiet and busy times in turn; a quiet time that is the warm-up, and whole turns from there.

    off_s, on_s: how long each lasts. peak: arrivals of a busy time as a multiple of the mean.
    Raises ValueError for times <= 0, a peak < 1, or one that leaves less than nothing for the quiet
    times.
    """

    off_s: float
    on_s: float
    peak: float
    name: ClassVar[str] = "onoff"
    unit: ClassVar[str] = "arrivals/s"
    goes_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.off_s > 0 or not self.on_s > 0:
            raise ValueError(f"off_s and on_s must be > 0, got {self.off_s} and {self.on_s}")
        if not 1 <= self.peak <= self.max_peak:
            raise ValueError(f"peak must be in 1..{self.max_peak:g}, got {self.peak:g}")

    @property
    def shape(self) -> dict[str, Any]:
        """See LoadKind."""
        return {"off_s": self.off_s, "on_s": self.on_s, "peak": self.peak}

    @property
    def max_peak(self) -> float:
        """The peak that leaves the quiet times empty."""
        return (self.off_s + self.on_s) / self.on_s

    def work(
        self, load: float, readers: Readers, seed: int, *, num_warm_up: int, num_measured: int
    ) -> PlannedWork:
        """See LoadKind."""
        turn_s = self.off_s + self.on_s
        on_rate = self.peak * load
        off_rate = max(0.0, (load * turn_s - on_rate * self.on_s) / self.off_s)
        num_turns = math.ceil(num_measured / (load * turn_s))
        num = round(num_turns * load * turn_s + off_rate * self.off_s)
        arrivals = OnOff(off_rate=off_rate, on_rate=on_rate, off_s=self.off_s, on_s=self.on_s)
        requests = readers.requests(num, arrivals, seed)
        num_before = int(np.searchsorted([r.arrival_time for r in requests], self.off_s))
        return PlannedWork(requests, num_before, num_turns * turn_s + self.off_s)


@dataclass(frozen=True)
class _Stretched:
    """`arrivals` with their instants stretched to `rate` per second in all."""

    arrivals: Arrivals
    rate: float

    def instants(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Arrivals."""
        instants = self.arrivals.instants(rng, num)
        return np.asarray(instants * (num / self.rate / instants[-1]))
