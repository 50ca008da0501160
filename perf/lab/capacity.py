"""How many readers a machine keeps supplied: the largest load that passes, policy by policy.

Owns the question, what can be said of it without a simulation, and the way from the question to an
answer of each policy. A load is a number of requests at once, or arrivals per second that go on
(planned_loads.py); when it passes, load_probe.py says. Arrivals that go on meet a machine that is
full already. Invariant: same question, same answer.

The estimate, from which the search starts: a request costs what its prefill adds to a step, and its
share of the decode steps, of as many streams as batch slots and pool take, at the context of
mid-life; where the engine reserves, the pool takes as many as their whole lengths leave room for.
Of a burst it is what can be prefilled within the target of the first token, if that many can be
supplied. Arrivals that go on are not tried far above it: what a queue grows by then is too little
to be seen in a run of a minute, and is there all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from build_engines.model_shapes import MODELS
from perf.lab.gpus import GPUS
from perf.lab.load_probe import Limits, Probe, probe
from perf.lab.planned_loads import LoadKind, PlannedWork, Readers, behind_full_machine
from perf.lab.policies import PolicyRow
from perf.lab.roofline import (
    RooflineCosts,
    StepTotals,
    decode_totals,
    kv_bytes_per_token_and_gpu,
    kv_pool_tokens,
    num_causal_pairs,
    sim_engine,
)
from perf.lab.search import Bracket, largest_load
from perf.lab.setups import decode_capacity
from perf.virtual.values import SimEngine

_NO_EVICT = "guaranteed_no_evict"
_FIRST_SHARE = 0.9
"""Of the estimate: the first load that is tried."""
MOST_SHARE = 1.05
"""Of the estimate: the largest that is tried of arrivals that go on."""
_WARM_UP_TURNS = 0.5
"""Requests before those that are measured: so many times what runs at once."""
_FILL_SHARE = 0.8
"""Of its time the machine prefills while it is filled."""
_LONGEST = 2.0
"""Times the mean length: longer sequences hardly come (four deviations of lengths.Normal)."""
_MIN_SEQ_LEN = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """gpu, model: names in GPUS and MODELS; tp: GPUs; memory_fraction: of each GPU's memory, for
    weights and KV. host_bytes: host tier. max_batch_size, max_num_tokens: limits of a step."""

    gpu: str
    model: str
    tp: int = 1
    memory_fraction: float = 0.9
    host_bytes: float = 0
    max_batch_size: int = 256
    max_num_tokens: int = 2048

    @property
    def costs(self) -> RooflineCosts:
        """What its steps cost. Raises ValueError for a tp by which the model cannot be divided."""
        return RooflineCosts(GPUS[self.gpu], MODELS[self.model], self.tp)

    @property
    def pool_tokens(self) -> int:
        """Size of the KV pool. Raises ValueError as roofline.kv_pool_tokens."""
        return kv_pool_tokens(GPUS[self.gpu], MODELS[self.model], self.tp, self.memory_fraction)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of one token on all GPUs together."""
        return kv_bytes_per_token_and_gpu(MODELS[self.model], self.tp) * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """num_measured: requests of each seed that are measured where arrivals go on, at least.
    tolerance: by which share a load that fails may lie above the answer."""

    machine: Machine
    readers: Readers
    kind: LoadKind
    limits: Limits
    seeds: tuple[int, ...] = (1, 2, 3)
    num_measured: int = 200
    tolerance: float = 0.06

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is reckoned with."""
        return math.ceil(_LONGEST * (self.readers.prompt_tokens + self.readers.answer_tokens))

    @property
    def mid_life(self) -> float:
        """Tokens of context of a stream that has half its answer."""
        return self.readers.prompt_tokens + 0.5 * self.readers.answer_tokens

    def held_tokens(self, row: PolicyRow) -> float:
        """Tokens of the pool that a stream holds in the mean: its whole length if the policy's
        engine reserves it, else its context of mid-life."""
        if row.capacity_policy == _NO_EVICT:
            return self.readers.prompt_tokens + self.readers.answer_tokens
        return self.mid_life

    def num_warm_up(self, row: PolicyRow) -> int:
        """Requests of each seed before those that are measured."""
        return math.ceil(_WARM_UP_TURNS * self.num_filling(row))

    def num_filling(self, row: PolicyRow) -> int:
        """Streams that are there when arrivals that go on begin: as many as run at once."""
        return self.num_running(self.held_tokens(row)) if self.kind.goes_on else 0

    def num_running(self, held_tokens: float) -> int:
        """Streams that run at once if each holds so many tokens of the pool."""
        in_pool = int(self.machine.pool_tokens / held_tokens)
        return max(1, min(self.machine.max_batch_size, in_pool))

    def engine(self) -> SimEngine:
        """The machine in virtual time; it has run before, so that its costs are known."""
        machine = sim_engine(
            GPUS[self.machine.gpu],
            MODELS[self.machine.model],
            tp=self.machine.tp,
            memory_fraction=self.machine.memory_fraction,
            host_bytes=self.machine.host_bytes,
            max_batch_size=self.machine.max_batch_size,
            max_num_tokens=self.machine.max_num_tokens,
            max_seq_len=max(_MIN_SEQ_LEN, 2 * self.longest),
        )
        return replace(machine, is_warm=True)

    def work(self, load: float, seed: int, row: PolicyRow) -> PlannedWork:
        """What `load` is with this seed, on a machine that this policy has filled."""
        num_filling = self.num_filling(row)
        work = self.kind.work(
            load,
            self.readers,
            seed,
            num_warm_up=self.num_warm_up(row),
            num_measured=max(self.num_measured, num_filling),
        )
        if not self.kind.goes_on:
            return work
        span_s = num_filling * prefill_s(self, num_filling, self.mid_life) / _FILL_SHARE
        return behind_full_machine(work, self.readers, seed, num=num_filling, span_s=span_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one policy. estimate: the load without a simulation. probes: what was tried, in order."""

    row: PolicyRow
    estimate: float
    bracket: Bracket
    probes: tuple[Probe, ...] = field(repr=False)

    @property
    def best(self) -> Probe | None:
        """The largest load that passed."""
        return self._probe_at(self.bracket.passed)

    @property
    def too_much(self) -> Probe | None:
        """The smallest load that failed; None where that is more than is tried."""
        return self._probe_at(self.bracket.failed)

    def _probe_at(self, load: float | None) -> Probe | None:
        return next((one for one in self.probes if one.load == load), None)


def answer(
    question: Question, row: PolicyRow, *, done: Callable[[PolicyRow, Probe], None] | None = None
) -> Answer:
    """Search the largest load that passes under this policy. done: called with each probe.

    Raises RuntimeError as load_probe.probe.
    """
    machine, estimate = question.engine(), estimated_load(question, row)
    most = MOST_SHARE * estimate if question.kind.goes_on else math.inf
    probes: list[Probe] = []

    def passes(load: float) -> bool:
        if load > most:
            return False
        works = [_maker(question, load, seed, row) for seed in question.seeds]
        probes.append(probe(load, works, row, machine, question.limits))
        if done is not None:
            done(row, probes[-1])
        return probes[-1].passes

    bracket = largest_load(
        passes,
        _FIRST_SHARE * estimate,
        tolerance=question.tolerance,
        is_whole=not question.kind.goes_on,
    )
    return Answer(row=row, estimate=estimate, bracket=bracket, probes=tuple(probes))


def _maker(question: Question, load: float, seed: int, row: PolicyRow) -> Callable[[], PlannedWork]:
    return lambda: question.work(load, seed, row)


def prefill_s(question: Question, num_running: int, length: float | None = None) -> float:
    """By how many seconds a prompt of so many tokens (None: the mean) makes steps longer that
    `num_running` streams at mid-life are in, all its chunks together."""
    costs, steps = question.machine.costs, _prefill_steps(question, num_running, length)
    without = decode_totals(num_running, round(num_running * question.mid_life))
    return sum(costs.step_s(work) - costs.step_s(without) for work in steps)


def first_token_s(question: Question) -> float:
    """Seconds until the first token of a prompt of mean length that is alone on the machine."""
    return sum(question.machine.costs.step_s(work) for work in _prefill_steps(question, 0, None))


def _prefill_steps(
    question: Question, num_running: int, length: float | None
) -> Iterator[StepTotals]:
    """The steps that the chunks of a prompt are in, beside `num_running` streams at mid-life."""
    num_left = round(question.readers.prompt_tokens if length is None else length)
    start, num_read = 0, round(num_running * question.mid_life)
    while num_left:
        num = min(num_left, max(1, question.machine.max_num_tokens - num_running))
        num_left -= num
        pairs, num_sampled = num_causal_pairs(start, num), num_running + (not num_left)
        yield StepTotals(num_running, num_read + start + num, num, pairs, num_sampled)
        start += num


def decode_tokens_per_s(question: Question, num_streams: float) -> float:
    """Γ: what the machine decodes for so many streams at mid-life, tokens/s."""
    return decode_capacity(question.engine(), max(1, round(num_streams)), question.mid_life)


def fastest_stream(question: Question) -> float:
    """Tokens/s of one stream alone on the machine, at mid-life."""
    return decode_tokens_per_s(question, 1)


def estimated_load(question: Question, row: PolicyRow) -> float:
    """The load that the machine can take, by the sums of the module's text."""
    readers = question.readers
    num_running = question.num_running(question.held_tokens(row))
    capacity = decode_tokens_per_s(question, num_running)
    prompt_s = prefill_s(question, num_running)
    if question.kind.goes_on:
        return 1.0 / (prompt_s + readers.answer_tokens / capacity)
    reserves = row.capacity_policy == _NO_EVICT
    supplied = num_running if reserves else capacity / readers.rate
    return max(1.0, min(supplied, question.limits.ttft_target_s / prompt_s))
