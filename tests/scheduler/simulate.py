"""The product in virtual time: coordinator, batcher, KV cache and reuse are the real ones.

Owns what stands in for a machine: the seconds of a step, by a cost model, and the instants at which
things happen. As under the runtime and the engine's thread, an event (arrival, response, plan
timer) that falls into a step is handled at its own instant, all events of an instant come before
the plan they call for, and commands act at the step's next boundary. Responses arrive a little
after the step that made them, so the next step has begun when they do. Nothing is random.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.costed import CostedExecutor, CostedRunner
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.executor.api import SamplingConfig
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.metrics import Stream
from tokenflow.types import EndReason, GenerateRequest, SessionState, TokenEvent


@dataclass(frozen=True, kw_only=True)
class SimRequest:
    """One request. read_rate None: no reader (it counts with the default rate)."""

    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    read_rate: float | None = 4.0
    priority: float = 0.5
    pausable: bool = True
    kind: str = "reader"


@dataclass(frozen=True, kw_only=True)
class SimEngine:
    """Limits and true costs; the defaults are the fitted CPU engine of the demo.

    step_factors: multiples of the cost model's seconds, step by step, over and over.
    """

    max_batch_size: int = 8
    num_total_blocks: int = 128
    tokens_per_block: int = 32
    max_num_tokens: int = 512
    capacity_policy: str = "guaranteed_no_evict"
    step_base_s: float = 0.045
    step_per_sequence_s: float = 0.0013
    step_per_context_token_s: float = 2.6e-6
    prefill_tokens_per_s: float = 2600.0
    response_delay_s: float = 0.002
    step_factors: tuple[float, ...] = (1.0,)

    def config(self) -> ServingConfig:
        """The product's configuration; waiting has no bound."""
        return ServingConfig(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=1 << 14,
            tokens_per_block=self.tokens_per_block,
            max_tokens_in_paged_kv_cache=self.num_total_blocks * self.tokens_per_block,
            batch_scheduler_policy=self.capacity_policy,
            max_queue_delay_s=86_400,
        )

    def step_s(self, chunks: Sequence[SequenceChunk], step: int) -> float:
        """Seconds of a step; one token behind kept KV costs what a decoded one costs."""
        seconds = self.step_base_s
        for chunk in chunks:
            num_tokens = len(chunk.token_ids)
            if num_tokens == 1:
                num_read = chunk.start + 1
                seconds += self.step_per_sequence_s + self.step_per_context_token_s * num_read
            else:
                seconds += num_tokens / self.prefill_tokens_per_s
        return seconds * self.step_factors[step % len(self.step_factors)]


@dataclass(eq=False)
class SimSeq:
    """What a client saw of its request."""

    request: SimRequest
    token_times: list[float] = field(default_factory=list)
    num_pauses: int = 0


@dataclass(kw_only=True)
class SimResult:
    """What happened. idle_slot_s: slot seconds that stood empty while somebody waited."""

    seqs: list[SimSeq]
    num_pauses: int = 0
    num_forced: int = 0
    num_internal_pauses: int = 0
    num_recomputed_tokens: int = 0
    idle_slot_s: float = 0.0
    busy_slot_s: float = 0.0

    def streams(self, kind: str | None = None) -> list[Stream]:
        """The measured streams, in order of arrival."""
        return [
            Stream(
                arrival_time=q.request.arrival_time,
                token_times=np.array(q.token_times),
                read_rate=q.request.read_rate,
            )
            for q in self.seqs
            if kind is None or q.request.kind == kind
        ]


class Simulation:
    """Runs `requests` on `engine` with `planner`; see `run`."""

    def __init__(
        self, requests: Sequence[SimRequest], planner: Planner, engine: SimEngine | None = None
    ) -> None:
        self._engine = engine or SimEngine()
        config = self._engine.config()
        self._runner = CostedRunner(self._engine.step_s)
        self._executor = CostedExecutor(self._runner, config.executor_config())
        self._coordinator = Coordinator(self._executor, config, planner, self._take)
        self._in_step = False
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._seqs: dict[int, SimSeq] = {}
        self.result = SimResult(seqs=[])
        for request in sorted(requests, key=lambda r: r.arrival_time):
            handle = self._coordinator.new_handle()
            self._seqs[handle] = SimSeq(request)
            self.result.seqs.append(self._seqs[handle])
            self._at(request.arrival_time, self._submission(handle, request))

    def run(self, until: float = 600.0) -> SimResult:
        """Run to the end of all requests; AssertionError if they have not ended by `until`."""
        coordinator, now = self._coordinator, 0.0
        while self._events or len(coordinator.table):
            event_time = self._events[0][0] if self._events else float("inf")
            now = min(event_time, max(now, coordinator.next_plan_time()))
            assert now <= until, f"{len(coordinator.table)} requests not done at {until} s"
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2](now)
            if now >= coordinator.next_plan_time():
                coordinator.plan(now)
            if not self._in_step and self._executor.batcher.has_work:
                self._begin_step(now)
        self._executor.batcher.check_integrity()
        counters = coordinator.counters
        self.result.num_pauses = counters.num_pauses
        self.result.num_forced = counters.num_forced_pauses
        self.result.num_internal_pauses = counters.num_internal_pauses
        self.result.num_recomputed_tokens = counters.num_recomputed_tokens
        return self.result

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _submission(self, handle: int, request: SimRequest) -> Callable[[float], None]:
        generate = GenerateRequest(
            request_id=str(handle),
            # No two prompts share a block.
            input_token_ids=(handle,) * request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            arrival_time=request.arrival_time,
            read_rate=request.read_rate,
            has_reader=request.read_rate is not None,
            priority=request.priority,
            sampling_config=SamplingConfig(beam_width=1 if request.pausable else 2),
        )
        return lambda now: self._coordinator.submit(handle, generate, now)

    def _take(self, event: TokenEvent) -> None:
        seq = self._seqs[event.handle]
        seq.token_times += [event.time] * len(event.token_ids)
        if event.end is not None:
            assert event.end is EndReason.LENGTH, event.error
            assert event.usage is not None
            seq.num_pauses = event.usage.num_pauses

    def _begin_step(self, now: float) -> None:
        runner, batcher = self._runner, self._executor.batcher
        runner.reset()
        self._executor.begin(now)
        self._in_step = True
        self._at(now + runner.step_s, self._end_step)
        self._tell(now)
        waiting = self._coordinator.table.count(SessionState.WAITING, SessionState.PREEMPTED)
        waiting += batcher.num_active + batcher.num_queued - runner.num_scheduled
        idle = min(waiting, self._engine.max_batch_size - runner.num_scheduled)
        self.result.idle_slot_s += idle * runner.step_s
        self.result.busy_slot_s += runner.num_scheduled * runner.step_s

    def _end_step(self, now: float) -> None:
        self._executor.end(now)
        self._in_step = False
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Send what the engine has to say on its way to the coordinator."""
        responses = self._executor.await_responses()

        def arrive(then: float) -> None:
            self._coordinator.on_stats(self._executor.get_latest_iteration_stats())
            self._coordinator.on_responses(responses, then)

        if responses:
            self._at(now + self._engine.response_delay_s, arrive)
