"""Who asks: how fast they read, which of them are machines, who is urgent, who leaves early.

Owns the kinds of readers and the mix of a workload. Invariants: the same value, stream and number
give the same people; shares are met to the last request, only who is who is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perf.lab.arrivals import split
from perf.virtual.values import SimRequest
from tokenflow.types import BoolArray, FloatArray, IntArray

READER = "reader"
MACHINE = "machine"
READ_RATE_BOUNDS = (0.01, 10_000.0)
"""Tokens/s that the server takes for a reader's rate."""


class Readers(Protocol):
    """A kind of readers."""

    def rates(self, rng: np.random.Generator, num: int) -> FloatArray:
        """Tokens/s that each reads [num]."""
        ...


@dataclass(frozen=True)
class OneRate:
    """Everybody reads `rate` tokens/s. Raises ValueError outside READ_RATE_BOUNDS."""

    rate: float

    def __post_init__(self) -> None:
        low, high = READ_RATE_BOUNDS
        if not low <= self.rate <= high:
            raise ValueError(f"rate must be in [{low:g}, {high:g}] tokens/s, got {self.rate:g}")

    def rates(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Readers."""
        return np.full(num, self.rate, dtype=np.float64)


@dataclass(frozen=True)
class MixedRates:
    """Groups of one rate each: (tokens/s, share of the readers), shares in any unit.

    Raises ValueError for no group, and for rates or shares <= 0.
    """

    groups: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(rate > 0 and share > 0 for rate, share in self.groups):
            raise ValueError(f"groups need rates and shares > 0, got {self.groups}")

    def rates(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Readers."""
        numbers = split(num, [share for _, share in self.groups])
        return rng.permutation(np.repeat([rate for rate, _ in self.groups], numbers))


PAPER_MIXED_RATES = MixedRates(((15.0, 0.4), (20.0, 0.6)))
"""TokenFlow, section 7.4."""


@dataclass(frozen=True, kw_only=True)
class HumanReaders:
    """People who read at their own speed, normally distributed.

    words_per_minute, std: Brysbaert (2019) finds 238 in the mean of 190 studies of adults who read
    English non-fiction silently, and "most" between 175 and 300; 49 puts 80 % of them there.
    tokens_per_word: 1.33 for English, 1.5 for Chinese, 1.75 for Japanese, as TokenFlow's Fig. 1
    has them. slowest, fastest: words/minute, beyond which nobody is. Raises ValueError unless
    0 < slowest <= words_per_minute <= fastest, std >= 0 and tokens_per_word > 0.
    """

    words_per_minute: float = 238.0
    std: float = 49.0
    tokens_per_word: float = 1.33
    slowest: float = 100.0
    fastest: float = 400.0

    def __post_init__(self) -> None:
        ordered = 0 < self.slowest <= self.words_per_minute <= self.fastest
        if not ordered or self.std < 0 or not self.tokens_per_word > 0:
            raise ValueError(f"no such readers: {self}")

    def rates(self, rng: np.random.Generator, num: int) -> FloatArray:
        """See Readers."""
        words = np.clip(
            rng.normal(self.words_per_minute, self.std, num), self.slowest, self.fastest
        )
        return np.asarray(words * self.tokens_per_word / 60.0)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Who asks.

    readers: how fast people read. machine_share: requests that nobody reads along.
    priorities: (priority, share of the requests), shares in any unit.
    cancel_share: readers who leave at a random moment of the first 90 % of the time that reading
        the whole answer would take them; they are counted among the readers.
    Raises ValueError for shares outside 0..1, or priorities outside [0, 1].
    """

    readers: Readers
    machine_share: float = 0.0
    priorities: tuple[tuple[float, float], ...] = ((0.5, 1.0),)
    cancel_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.machine_share <= 1 or not 0 <= self.cancel_share <= 1:
            raise ValueError(f"shares must be in 0..1, got {self}")
        if not self.priorities or not all(0 <= p <= 1 and s > 0 for p, s in self.priorities):
            raise ValueError(f"priorities must be in 0..1, their shares > 0: {self.priorities}")

    def people(self, rng: np.random.Generator, num: int) -> list[Person]:
        """`num` of them, in order of arrival."""
        is_machine = _chosen(rng, num, self.machine_share)
        readers = np.flatnonzero(~is_machine)
        rates = np.full(num, np.nan)
        rates[readers] = self.readers.rates(rng, len(readers))
        numbers = split(num, [share for _, share in self.priorities])
        priorities = rng.permutation(np.repeat([p for p, _ in self.priorities], numbers))
        leaves_at = np.full(num, np.nan)
        leaving = readers[_chosen(rng, len(readers), self.cancel_share)]
        leaves_at[leaving] = rng.uniform(0.0, 0.9, len(leaving))
        return [
            Person(
                read_rate=None if is_machine[i] else float(rates[i]),
                priority=float(priorities[i]),
                leaves_at_share=None if np.isnan(leaves_at[i]) else float(leaves_at[i]),
            )
            for i in range(num)
        ]


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who sends one request, or one conversation.

    read_rate: tokens/s; None: a machine. leaves_at_share: the share of the reading time of the
    whole answer after which the reader leaves; None: stays to the end.
    """

    read_rate: float | None
    priority: float
    leaves_at_share: float | None = None

    @property
    def kind(self) -> str:
        """What its requests are counted as."""
        return MACHINE if self.read_rate is None else READER


def asked(
    instants: FloatArray, prompts: IntArray, answers: IntArray, people: Sequence[Person]
) -> list[SimRequest]:
    """One request of each: arrival (s), prompt and answer (tokens), who, all of the same length."""
    return [
        SimRequest(
            arrival_time=float(instant),
            num_prompt_tokens=int(num_prompt),
            max_tokens=int(num_answer),
            read_rate=person.read_rate,
            priority=person.priority,
            kind=person.kind,
            cancel_after_s=_leaves_after_s(person, int(num_answer)),
        )
        for instant, num_prompt, num_answer, person in zip(
            instants, prompts, answers, people, strict=True
        )
    ]


def _leaves_after_s(person: Person, num_answer: int) -> float | None:
    if person.read_rate is None or person.leaves_at_share is None:
        return None
    return person.leaves_at_share * num_answer / person.read_rate


def _chosen(rng: np.random.Generator, num: int, share: float) -> BoolArray:
    """`share` of `num`, at random."""
    chosen = np.zeros(num, dtype=np.bool_)
    chosen[: round(share * num)] = True
    return rng.permutation(chosen)
