"""The product in virtual time: coordinator, batcher, KV cache and reuse are the real ones.

Owns what stands in for a machine: the order of events and the instants at which they happen; how
long a step takes is the engine's (values.py). As under the runtime and the engine's thread,
an event (arrival, cancel, response, plan timer) that falls into a step is handled at its own
instant, all events of an instant come before the plan they call for, and commands act at the step's
next boundary. Responses arrive a little after the step that made them, so the next step has begun
when they do. Nothing is random: same requests, engine and planner, same run.

Steps in which nothing can change are made together: what they do to each sequence and each session
is written down when somebody looks (decode_run.py, decoded.py). With `together` off that is after
each step, and all else is the same.

Invariants: time never goes back; each request's tokens are counted as its client receives them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import msgspec

from perf.virtual.decoded import DecodedTokens
from perf.virtual.prompts import PromptTokens
from perf.virtual.values import SimEngine, SimRequest, SimResult, SimSeq, SimStep
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.costs import CostModel
from tokenflow.executor.api import ExecutorConfig, Request, SamplingConfig
from tokenflow.inflight.decode_run import DecodedStep, DecodeRuns
from tokenflow.inflight.stepped import SteppedExecutor
from tokenflow.inflight.virtual_runner import END_ID, VirtualRunner
from tokenflow.output_lengths import OutputLengths
from tokenflow.trace import Tracer
from tokenflow.types import GenerateRequest, SessionState, TokenEvent


class Simulation:
    """Runs `requests` on `engine` with `planner`; see `run`.

    observe: called with each step of the engine as it begins.
    together: make steps together in which nothing can change; the result is the same.
    costs, lengths: what the planner knows at the beginning of the engine's costs, and of how long
    answers are; None: nothing.
    prompts: the token ids of a request's prompt, by its handle; None: those of PromptTokens.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        planner: Planner,
        engine: SimEngine | None = None,
        *,
        tracer: Tracer | None = None,
        observe: Callable[[SimStep], None] | None = None,
        together: bool = True,
        costs: CostModel | None = None,
        lengths: OutputLengths | None = None,
        prompts: Callable[[int, SimRequest], tuple[int, ...]] | None = None,
    ) -> None:
        self._engine = engine or SimEngine()
        config = self._engine.config()
        self._runner = _AnyTokenRunner(
            self._engine.step_s,
            self._engine.copy_costs,
            self._engine.decode_cost,
            self._num_before_end,
        )
        executor_config = msgspec.structs.replace(
            config.executor_config(), overlap_copies=self._engine.overlap_copies
        )
        self._executor = _AnyKindExecutor(self._runner, executor_config, together)
        self._coordinator = Coordinator(
            self._executor, config, planner, self._take, tracer, costs, lengths
        )
        self._decoded = DecodedTokens(self._coordinator, self._take_each)
        self._observe = observe
        self._in_step = False
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._seqs: dict[int, SimSeq] = {}
        self._prompts = prompts or PromptTokens().token_ids
        self._num_told = 0
        self._last_arrival_time = 0.0
        self.result = SimResult(seqs=[])
        for request in sorted(requests, key=lambda r: r.arrival_time):
            self._expect(request)

    def run(self, until: float = 600.0) -> SimResult:
        """Run to the end of all requests; RuntimeError if they have not ended by `until`."""
        if not self.advance(until):
            num_left = sum(q.end is None for q in self.result.seqs)
            raise RuntimeError(f"{num_left} requests not done at {until} s")
        self._executor.batcher.check_integrity()
        counters = self._coordinator.counters
        self.result.num_pauses = counters.num_pauses
        self.result.num_forced = counters.num_forced_pauses
        self.result.num_internal_pauses = counters.num_internal_pauses
        self.result.num_lease_ends = counters.num_lease_ends
        self.result.num_recomputed_tokens = counters.num_recomputed_tokens
        self.result.counters, self.result.tiers = counters, self._coordinator.tiers
        num_received = sum(len(q.token_times) for q in self.result.seqs)
        self.result.num_thrown_away = self._runner.num_sampled - num_received
        return self.result

    def advance(self, until: float) -> bool:
        """Go on to `until`, that instant included; True if all requests have ended. What the last
        steps did may not be written down yet."""
        coordinator = self._coordinator
        while self._events or len(coordinator.table):
            event_time = self._events[0][0] if self._events else float("inf")
            now = min(event_time, max(self._now, coordinator.next_plan_time()))
            if now > until:
                # What is left may be clients that leave when all is over.
                return all(q.end is not None for q in self.result.seqs)
            self._now = now
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2](now)
            if now >= coordinator.next_plan_time():
                self._decoded.settle()
                coordinator.plan(now)
                self._decoded.planned()
            if not self._in_step and self._executor.batcher.has_work:
                self._begin_step(now)
        return True

    @property
    def costs(self) -> CostModel:
        """What the planner has learned of the engine's costs."""
        return self._coordinator.costs

    @property
    def num_steps(self) -> int:
        """Steps that the engine computed so far."""
        return self._runner.num_steps

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _expect(self, request: SimRequest) -> None:
        coordinator = self._coordinator
        handle = coordinator.new_handle()
        max_tokens, end_id = request.max_tokens, None
        if request.ends_by_itself:
            assert request.limit_tokens is not None
            max_tokens, end_id = request.limit_tokens, END_ID
        self._seqs[handle] = SimSeq(request)
        self.result.seqs.append(self._seqs[handle])
        generate = GenerateRequest(
            request_id=str(handle),
            input_token_ids=self._prompts(handle, request),
            max_tokens=max_tokens,
            end_id=end_id,
            arrival_time=request.arrival_time,
            read_rate=request.read_rate,
            has_reader=request.read_rate is not None,
            priority=request.priority,
            sampling_config=SamplingConfig(beam_width=1 if request.pausable else 2),
        )
        self._at_client(request.arrival_time, lambda t: coordinator.submit(handle, generate, t))
        if request.cancel_after_s is not None:
            leave_time = request.arrival_time + request.cancel_after_s
            self._at_client(leave_time, lambda t: coordinator.cancel(handle, t))

    def _num_before_end(self, request: Request) -> int | None:
        """See VirtualRunner; what came before a pause is in the prompt of the resume."""
        assert request.client_id is not None
        asked = self._seqs[request.client_id].request
        if not asked.ends_by_itself:
            return None
        return asked.num_prompt_tokens + asked.max_tokens - len(request.input_token_ids)

    def _at_client(self, time: float, event: Callable[[float], None]) -> None:
        def happen(now: float) -> None:
            self._decoded.look_again()
            event(now)

        self._at(time, happen)

    def _take(self, event: TokenEvent) -> None:
        seq = self._seqs[event.handle]
        seq.token_times += [event.time] * len(event.token_ids)
        if event.end is not None:
            seq.end, seq.end_time = event.end, event.time
            seq.error, seq.retryable, seq.usage = event.error, event.retryable, event.usage

    def _take_each(self, handle: int, times: Sequence[float]) -> None:
        self._seqs[handle].token_times += times

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
            self._decoded.settle()
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
        responses, decoded = self._executor.await_responses(), self._executor.take_decoded()
        if not responses and decoded is None:
            return
        stats = self._executor.get_latest_iteration_stats()
        for entry in stats:
            tiers = entry.kv_tier_stats
            if tiers is not None:
                num_host = tiers.num_host_cached_blocks + tiers.num_host_in_transit_blocks
                self.result.num_host_blocks_peak = max(self.result.num_host_blocks_peak, num_host)

        def arrive(then: float) -> None:
            self._coordinator.on_stats(stats, then)
            if decoded is not None:
                self._decoded.arrive(decoded, then)
            else:
                self._decoded.look_again()
                self._coordinator.on_responses(responses, then)

        delays = self._engine.response_delays_s
        delay_s = delays[self._num_told % len(delays)]
        self._num_told += 1
        self._last_arrival_time = max(self._last_arrival_time, now + delay_s)
        self._at(self._last_arrival_time, arrive)


class _AnyTokenRunner(VirtualRunner):
    """Takes every handle for a token, however many requests there are."""

    vocab_size = 1 << 31


class _AnyKindExecutor(SteppedExecutor):
    """Also runs what the embedded engine refuses, like any other request: only the coordinator's
    side of such a kind is of interest here.

    handles: the coordinator's handle of each engine id. together: see Simulation.
    """

    def __init__(self, runner: VirtualRunner, config: ExecutorConfig, together: bool) -> None:
        super().__init__(runner, config)
        self.handles: dict[int, int] = {}
        self._runs = DecodeRuns(self.batcher, runner) if together else None
        self._decoded: DecodedStep | None = None

    def begin(self, now: float) -> None:
        """See SteppedExecutor."""
        if self._runs is None or not self._runs.begin(now):
            super().begin(now)

    def end(self, now: float) -> None:
        """See SteppedExecutor; what a step said that was made together with others is in
        `take_decoded`."""
        self._decoded = None if self._runs is None else self._runs.end(now)
        if self._decoded is None:
            super().end(now)
        else:
            self._stats.append(self._decoded.stats)

    def take_decoded(self) -> DecodedStep | None:
        """What the step that has just ended made, if it made nothing but one token of each."""
        decoded, self._decoded = self._decoded, None
        return decoded

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        plain = [msgspec.structs.replace(r, sampling_config=SamplingConfig()) for r in requests]
        ids = super().enqueue_requests(plain)
        for executor_id, request in zip(ids, requests, strict=True):
            assert request.client_id is not None
            self.handles[executor_id] = request.client_id
        return ids
