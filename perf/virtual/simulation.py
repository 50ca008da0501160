"""The product in virtual time: coordinator, batcher, KV cache and reuse are the real ones.

Owns what stands in for a machine: the order of events and the instants at which they happen; how
long a step takes is the engine's (values.py). As under the runtime and the engine's thread,
an event (arrival, cancel, response, plan timer) that falls into a step is handled at its own
instant, all events of an instant come before the plan they call for, and commands act at the step's
next boundary. Responses arrive a little after the step that made them, so the next step has begun
when they do. Nothing is random: same requests, engine and planner, same run.

Invariants: time never goes back; each request's tokens are counted as its client receives them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import msgspec

from perf.virtual.values import SimEngine, SimRequest, SimResult, SimSeq, SimStep
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.executor.api import ExecutorConfig, Request, SamplingConfig
from tokenflow.inflight.stepped import SteppedExecutor
from tokenflow.inflight.virtual_runner import VirtualRunner
from tokenflow.trace import Tracer
from tokenflow.types import GenerateRequest, SessionState, TokenEvent


class Simulation:
    """Runs `requests` on `engine` with `planner`; see `run`.

    observe: called with each step of the engine as it begins.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        planner: Planner,
        engine: SimEngine | None = None,
        *,
        tracer: Tracer | None = None,
        observe: Callable[[SimStep], None] | None = None,
    ) -> None:
        self._engine = engine or SimEngine()
        config = self._engine.config()
        self._runner = VirtualRunner(self._engine.step_s, self._engine.copy_costs)
        self._executor = _AnyKindExecutor(self._runner, config.executor_config())
        self._coordinator = Coordinator(self._executor, config, planner, self._take, tracer)
        self._observe = observe
        self._in_step = False
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._seqs: dict[int, SimSeq] = {}
        self._num_told = 0
        self._last_arrival_time = 0.0
        self.result = SimResult(seqs=[])
        for request in sorted(requests, key=lambda r: r.arrival_time):
            self._expect(request)

    def run(self, until: float = 600.0) -> SimResult:
        """Run to the end of all requests; RuntimeError if they have not ended by `until`."""
        coordinator, now = self._coordinator, 0.0
        while self._events or len(coordinator.table):
            event_time = self._events[0][0] if self._events else float("inf")
            now = min(event_time, max(now, coordinator.next_plan_time()))
            if now > until:
                raise RuntimeError(f"{len(coordinator.table)} requests not done at {until} s")
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
        self.result.num_lease_ends = counters.num_lease_ends
        self.result.num_recomputed_tokens = counters.num_recomputed_tokens
        self.result.counters, self.result.tiers = counters, coordinator.tiers
        num_received = sum(len(q.token_times) for q in self.result.seqs)
        self.result.num_thrown_away = self._runner.num_sampled - num_received
        return self.result

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _expect(self, request: SimRequest) -> None:
        coordinator = self._coordinator
        handle = coordinator.new_handle()
        self._seqs[handle] = SimSeq(request)
        self.result.seqs.append(self._seqs[handle])
        generate = GenerateRequest(
            request_id=str(handle),
            # Otherwise no two prompts share a block.
            input_token_ids=(0,) * request.num_shared_tokens
            + (handle,) * (request.num_prompt_tokens - request.num_shared_tokens),
            max_tokens=request.max_tokens,
            arrival_time=request.arrival_time,
            read_rate=request.read_rate,
            has_reader=request.read_rate is not None,
            priority=request.priority,
            sampling_config=SamplingConfig(beam_width=1 if request.pausable else 2),
        )
        self._at(request.arrival_time, lambda now: coordinator.submit(handle, generate, now))
        if request.cancel_after_s is not None:
            leave_time = request.arrival_time + request.cancel_after_s
            self._at(leave_time, lambda now: coordinator.cancel(handle, now))

    def _take(self, event: TokenEvent) -> None:
        seq = self._seqs[event.handle]
        seq.token_times += [event.time] * len(event.token_ids)
        if event.end is not None:
            seq.end, seq.end_time = event.end, event.time
            seq.error, seq.retryable, seq.usage = event.error, event.retryable, event.usage

    def _begin_step(self, now: float) -> None:
        runner, executor = self._runner, self._executor
        runner.reset(now)
        executor.begin(now)
        self._in_step = True
        self._at(now + runner.step_s, self._end_step)
        self._tell(now)
        table = self._coordinator.table
        num_scheduled = len(runner.scheduled_ids)
        num_waiting = table.count(SessionState.WAITING, SessionState.PREEMPTED)
        num_waiting += executor.batcher.num_active + executor.batcher.num_queued - num_scheduled
        idle = min(num_waiting, self._engine.max_batch_size - num_scheduled)
        self.result.idle_slot_s += idle * runner.step_s
        self.result.busy_slot_s += num_scheduled * runner.step_s
        if self._observe is not None:
            self._observe(
                SimStep(
                    start_time=now,
                    step_s=runner.step_s,
                    handles=tuple(executor.handles[i] for i in runner.scheduled_ids),
                    num_waiting=num_waiting,
                    num_held_blocks=int(table.columns(now).num_blocks_held.sum()),
                    num_used_blocks=executor.batcher.kv.num_used_blocks,
                )
            )

    def _end_step(self, now: float) -> None:
        self._executor.end(now)
        self._in_step = False
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Send what the engine has to say on its way to the coordinator, in order."""
        responses = self._executor.await_responses()
        if not responses:
            return
        stats = self._executor.get_latest_iteration_stats()

        def arrive(then: float) -> None:
            self._coordinator.on_stats(stats, then)
            self._coordinator.on_responses(responses, then)

        delays = self._engine.response_delays_s
        delay_s = delays[self._num_told % len(delays)]
        self._num_told += 1
        self._last_arrival_time = max(self._last_arrival_time, now + delay_s)
        self._at(self._last_arrival_time, arrive)


class _AnyKindExecutor(SteppedExecutor):
    """Also runs what the embedded engine refuses, like any other request: only the coordinator's
    side of such a kind is of interest here.

    handles: the coordinator's handle of each engine id.
    """

    def __init__(self, runner: VirtualRunner, config: ExecutorConfig) -> None:
        super().__init__(runner, config)
        self.handles: dict[int, int] = {}

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        plain = [msgspec.structs.replace(r, sampling_config=SamplingConfig()) for r in requests]
        ids = super().enqueue_requests(plain)
        for executor_id, request in zip(ids, requests, strict=True):
            assert request.client_id is not None
            self.handles[executor_id] = request.client_id
        return ids
