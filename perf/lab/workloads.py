"""Whole workloads: single requests, and conversations of several turns.

Owns how arrivals, lengths and people become requests. Invariants: the same workload and seed give
the same requests, in order of arrival; each of instants, prompts, answers and people has a random
stream of its own, so that changing one of them leaves the others as they are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perf.lab.arrivals import Arrivals
from perf.lab.lengths import Lengths
from perf.lab.mixes import Mix, Person, asked
from perf.virtual.values import SimRequest
from tokenflow.types import FloatArray, IntArray

_MACHINE_RATE = 20.0
"""Tokens/s at which a machine is expected to get an answer, for when it asks again."""


class Workload(Protocol):
    """What can be turned into requests."""

    @property
    def mix(self) -> Mix:
        """Who asks."""
        ...

    def with_mix(self, mix: Mix) -> Workload:
        """The same requests from other people."""
        ...

    def requests(self, seed: int) -> list[SimRequest]:
        """All requests, in order of arrival."""
        ...


@dataclass(frozen=True, kw_only=True)
class Singles:
    """`num_requests` that have nothing to do with each other.

    limit_tokens: what all of them name as their limit, and no answer is longer; None: each names
    the length of its answer.
    """

    num_requests: int
    arrivals: Arrivals
    prompts: Lengths
    answers: Lengths
    mix: Mix
    limit_tokens: int | None = None

    def with_mix(self, mix: Mix) -> Singles:
        """See Workload."""
        return dataclasses.replace(self, mix=mix)

    def requests(self, seed: int) -> list[SimRequest]:
        """See Workload."""
        limit = self.limit_tokens
        if limit is None:
            return self._answered(seed)
        return [
            dataclasses.replace(r, max_tokens=min(r.max_tokens, limit), limit_tokens=limit)
            for r in self._answered(seed)
        ]

    def _answered(self, seed: int) -> list[SimRequest]:
        num = self.num_requests
        instants, prompts, answers, people = streams(seed, 4)
        return asked(
            self.arrivals.instants(instants, num),
            self.prompts.draw(prompts, num),
            self.answers.draw(answers, num),
            self.mix.people(people, num),
        )


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations: a turn's prompt is everything said so far, and a new question.

    arrivals: of first turns. mean_turns: of a geometric distribution, cut off at max_turns.
        BurstGPT's third trace has a mean of 4.18 and a median of 2 turns.
    first_prompts, questions: new tokens of the first and of later turns. answers: tokens.
    think_s: median of the log-normal time from having read an answer to the next question;
        think_spread: its deviation in the logarithm. BurstGPT's median from turn to turn, reading
        included, is 131 s; the default is our choice, so that what was said is still wanted while
        others want the room.
    mix: people, one for each conversation; nobody leaves early, because what the next turn repeats
        is the whole answer. Raises ValueError for a cancel_share, for mean_turns < 1, max_turns < 1
        or a negative time.

    The next turn arrives when its answer would have been read at the reader's rate, had it come at
    once: arrivals do not depend on the engine, as in a trace, so every policy gets the same work.
    Where answers are late, a turn can come before the one that it repeats has ended.
    """

    num_conversations: int
    arrivals: Arrivals
    first_prompts: Lengths
    questions: Lengths
    answers: Lengths
    mix: Mix
    mean_turns: float = 4.0
    max_turns: int = 8
    think_s: float = 10.0
    think_spread: float = 0.75

    def __post_init__(self) -> None:
        if self.mix.cancel_share:
            raise ValueError("cancel_share must be 0 in conversations")
        if self.mean_turns < 1 or self.max_turns < 1:
            raise ValueError(f"mean_turns and max_turns must be >= 1, got {self}")
        if self.think_s < 0 or self.think_spread < 0:
            raise ValueError(f"think_s and think_spread must be >= 0, got {self}")

    def with_mix(self, mix: Mix) -> Conversations:
        """See Workload."""
        return dataclasses.replace(self, mix=mix)

    def requests(self, seed: int) -> list[SimRequest]:
        """See Workload."""
        instants, firsts, questions, answers, people, turns, thinking = streams(seed, 7)
        num = self.num_conversations
        starts = self.arrivals.instants(instants, num)
        first_prompts = self.first_prompts.draw(firsts, num)
        num_turns = np.minimum(turns.geometric(1.0 / self.mean_turns, num), self.max_turns)
        result: list[SimRequest] = []
        for index, person in enumerate(self.mix.people(people, num)):
            count = int(num_turns[index])
            new = self.questions.draw(questions, count)
            new[0] = first_prompts[index]
            spoken = self.answers.draw(answers, count)
            pauses = self.think_s * thinking.lognormal(0.0, self.think_spread, count)
            result += _turns(index, float(starts[index]), person, new, spoken, pauses)
        return sorted(result, key=lambda request: request.arrival_time)


def _turns(
    conversation: int,
    start_time: float,
    person: Person,
    new: IntArray,
    spoken: IntArray,
    pauses: FloatArray,
) -> list[SimRequest]:
    """The requests of one conversation: new tokens and answers (tokens), pauses (s) after each."""
    rate = person.read_rate or _MACHINE_RATE
    instants = start_time + np.cumsum(spoken / rate + pauses)
    instants = np.concatenate([[start_time], instants[:-1]])
    result, num_history = [], 0
    prompts = np.cumsum(new) + np.cumsum(spoken) - spoken
    for request in asked(instants, prompts, spoken, [person] * len(new)):
        result.append(
            dataclasses.replace(request, conversation=conversation, num_history_tokens=num_history)
        )
        num_history = request.num_prompt_tokens + request.max_tokens
    return result


def streams(seed: int, num: int) -> list[np.random.Generator]:
    """`num` independent random streams; PCG64, so the same on every machine."""
    children = np.random.SeedSequence(seed).spawn(num)
    return [np.random.Generator(np.random.PCG64(child)) for child in children]
