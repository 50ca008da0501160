"""The set-ups that rules are tried on, those made for one rule among them.

Owns how a set-up is named for `perf.rules`. Invariant: the same name and seed give the same
requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from perf.lab import setups
from perf.lab.arrivals import Burst, Delayed, Poisson
from perf.lab.lengths import Normal
from perf.lab.mixes import Mix, OneRate
from perf.lab.setups import Setup
from perf.lab.workloads import Singles, Workload
from perf.virtual.values import SimRequest


@dataclass(frozen=True)
class Together:
    """Several workloads at once; everybody reads as those of the first one."""

    parts: tuple[Singles, ...]

    @property
    def mix(self) -> Mix:
        """See workloads.Workload."""
        return self.parts[0].mix

    def with_mix(self, mix: Mix) -> Together:
        """See workloads.Workload."""
        return Together(tuple(part.with_mix(mix) for part in self.parts))

    def requests(self, seed: int) -> list[SimRequest]:
        """See workloads.Workload."""
        seeds = [seed * len(self.parts) + i for i in range(len(self.parts))]
        asked = [r for part, s in zip(self.parts, seeds, strict=True) for r in part.requests(s)]
        return sorted(asked, key=lambda request: request.arrival_time)


def _crowd(num: int, prompt: int, answer: int, mix: Mix, delay_s: float = 0.0) -> Singles:
    return Singles(
        num_requests=num,
        arrivals=Delayed(Burst(span_s=1e-3 * num), delay_s),
        prompts=Normal(mean=prompt),
        answers=Normal(mean=answer),
        mix=mix,
    )


def _on_4090(name: str, workload: Workload) -> Setup:
    return dataclasses.replace(setups.find("4090-a"), name=name, workload=workload)


def _steady(num: int, rate: float, prompt: int, answer: int, mix: Mix) -> Singles:
    crowd = _crowd(num, prompt, answer, mix)
    return dataclasses.replace(crowd, arrivals=Poisson(rate))


_CLASSES = Mix(readers=OneRate(6.0), priorities=((0.9, 0.2), (0.5, 0.6), (0.1, 0.2)))
_MACHINES = Mix(readers=OneRate(6.0), machine_share=0.4)
_FAST = Mix(readers=OneRate(20.0))
_READERS = Mix(readers=OneRate(6.0))

OWN: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        _on_4090("classes", _crowd(60, 512, 1024, _CLASSES)),
        _on_4090("machine-crowd", _crowd(80, 1024, 2048, _MACHINES)),
        _on_4090(
            "late-burst",
            Together((_crowd(24, 512, 2048, _FAST), _crowd(120, 256, 192, _FAST, delay_s=30.0))),
        ),
        dataclasses.replace(
            setups.with_rate(setups.find("open-ended"), 20.0), name="short-answers"
        ),
        setups.with_host(_on_4090("steady", _steady(60, 1.0, 512, 2048, _READERS)), 0),
    )
}
"""Set-ups that show what one rule is for: urgent requests in a crowd; requests without a reader in
a crowd; a burst that finds everybody far ahead; fast readers of answers that are shorter than they
may be; requests that keep coming, without a host tier."""

DEFAULT_SETUPS = (
    "4090-a",
    "4090-b",
    "4090-b:20",
    "4090-b:6:0",
    "4090-c:6:32",
    "mixed-readers",
    "machines",
    "conversations",
    "sharegpt",
    "burstgpt",
    "on-off",
    *OWN,
)
"""What is run unless asked otherwise; see `setup_of`."""


def setup_of(text: str) -> Setup:
    """The set-up of NAME, NAME:RATE or NAME:RATE:HOST_GB, of OWN or setups.SETUPS; an empty number
    leaves it as it is.

    Raises ValueError for a name that is neither, a number that is none, and as setups.with_rate
    and with_host.
    """
    name, *numbers = text.split(":")
    setup = OWN.get(name) or setups.find(name)
    changes = (setups.with_rate, setups.with_host)
    if len(numbers) > len(changes):
        raise ValueError(f"{text!r} is not NAME:RATE:HOST_GB")
    for change, number in zip(changes, numbers, strict=False):
        try:
            setup = change(setup, float(number)) if number else setup
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
    return setup
