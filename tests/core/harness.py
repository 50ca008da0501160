"""Coordinator + in-flight core + scripted runner in virtual time, with every event recorded."""

from __future__ import annotations

from tests.support.stepped import LOSS, SteppedExecutor
from tests.support.tracer import ListTracer
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.executor.api import OutputConfig
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import Script, expected, pseudo_random
from tokenflow.types import (
    Decision,
    EndReason,
    GenerateRequest,
    SessionState,
    Snapshot,
    TokenEvent,
)

VOCAB_SIZE = 97
CONFIG = ServingConfig(
    engine="scripted",
    batch_scheduler_policy="guaranteed_no_evict",
    max_batch_size=3,
    max_num_tokens=24,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=160,
    max_seq_len=64,
    max_queue_size=8,
    max_queue_delay_s=86_400,
    plan_interval_s=0.05,
)


class ChosenPlanner:
    """Plans what the test says next, and otherwise admits and resumes what fits."""

    def __init__(self, max_batch_size: int) -> None:
        self.pause_next: set[int] = set()
        self.hold = False
        self.hold_paused = False
        self._max_batch_size = max_batch_size

    def __call__(self, snapshot: Snapshot) -> Decision:
        s = snapshot.sessions
        pause = [
            int(slot)
            for slot, state in zip(s.slot, s.state, strict=True)
            if slot in self.pause_next and state == SessionState.RUNNING
        ]
        self.pause_next -= set(pause)
        if self.hold:
            return Decision(pause=tuple(pause))
        in_engine = (SessionState.PREFILLING, SessionState.RUNNING, SessionState.RESUMING)
        room = self._max_batch_size - sum(state in in_engine for state in s.state) + len(pause)
        may_start = {int(slot) for slot, held in zip(s.slot, s.held, strict=True) if not held}
        blocks = snapshot.kv.num_total_blocks - sum(
            int(needed)
            for slot, state, needed in zip(s.slot, s.state, s.num_blocks_needed, strict=True)
            if state in in_engine and slot not in pause
        )
        chosen: dict[SessionState, list[int]] = {
            SessionState.PREEMPTED: [],
            SessionState.WAITING: [],
        }
        for wanted in chosen:
            for slot, state, needed in zip(s.slot, s.state, s.num_blocks_needed, strict=True):
                if self.hold_paused and wanted is SessionState.PREEMPTED:
                    continue
                if slot not in may_start:
                    continue
                if state == wanted and room > 0 and needed <= blocks:
                    chosen[wanted].append(int(slot))
                    room, blocks = room - 1, blocks - int(needed)
        return Decision(
            pause=tuple(pause),
            resume=tuple(chosen[SessionState.PREEMPTED]),
            admit=tuple(chosen[SessionState.WAITING]),
        )


class Harness:
    """A whole server without threads. One `step` is one iteration of the engine."""

    def __init__(
        self,
        config: ServingConfig = CONFIG,
        planner: Planner | None = None,
        script: Script | None = None,
        executor_type: type[SteppedExecutor] = SteppedExecutor,
        runner_type: type[ScriptedRunner] = ScriptedRunner,
    ) -> None:
        self.config = config
        self.script = script or pseudo_random(VOCAB_SIZE)
        self._executor_type = executor_type
        self._runner_type = runner_type
        self._make_engine()
        self.planner = planner or ChosenPlanner(config.max_batch_size)
        self.tracer = ListTracer()
        self.events: list[TokenEvent] = []
        self.coordinator = Coordinator(
            self.executor, config, self.planner, self.events.append, self.tracer
        )
        self.now = 0.0

    def _make_engine(self) -> None:
        self.runner = self._runner_type(self.script, VOCAB_SIZE)
        self.executor = self._executor_type(self.runner, self.config.executor_config())

    def lose_engine(self, *, noticed: bool = True) -> None:
        """The engine's process is killed, between steps or within one."""
        self.executor.lose()
        if noticed:
            self.notice_loss()

    def notice_loss(self) -> None:
        """What the awaiter would post."""
        self.coordinator.on_responses(self.executor.await_responses(), self.now)
        self.coordinator.on_engine_lost(LOSS, self.now)

    def start_engine(self) -> None:
        """Another engine, in the place of the lost one."""
        self._make_engine()
        self.coordinator.on_engine_started(self.executor, self.now)

    def submit(
        self,
        prompt: tuple[int, ...] = (1, 2, 3),
        max_tokens: int = 10,
        request_id: str | None = None,
        **fields: object,
    ) -> int:
        handle = self.coordinator.new_handle()
        request = GenerateRequest(
            request_id=request_id or f"r{handle}",
            input_token_ids=prompt,
            max_tokens=max_tokens,
            arrival_time=self.now,
            output_config=OutputConfig(return_log_probs=True),
            **fields,  # type: ignore[arg-type]
        )
        self.coordinator.submit(handle, request, self.now)
        return handle

    def plan(self) -> None:
        self.coordinator.plan(self.now)

    def begin(self) -> None:
        self.executor.begin(self.now)

    def end(self, step_s: float = 0.05, *, heard: bool = True) -> None:
        """The step's end, unless the engine is lost."""
        self.now += step_s
        if self.executor.is_lost:
            return
        self.executor.end(self.now)
        if heard:
            self.hear()

    def hear(self) -> None:
        """Take in what the engine said since the last time."""
        self.coordinator.on_stats(self.executor.get_latest_iteration_stats(), self.now)
        self.coordinator.on_responses(self.executor.await_responses(), self.now)

    def step(self) -> None:
        self.plan()
        self.begin()
        self.end()

    def run_to_empty(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not len(self.coordinator.table) and not self.executor.batcher.has_work:
                return
            self.step()
        raise AssertionError(f"{len(self.coordinator.table)} sessions never ended")

    def pause(self, handle: int) -> None:
        session = self.coordinator.table.get(handle)
        assert session is not None
        assert isinstance(self.planner, ChosenPlanner)
        self.planner.pause_next.add(session.slot)

    def state(self, handle: int) -> SessionState | None:
        session = self.coordinator.table.get(handle)
        return None if session is None else session.state

    def events_of(self, handle: int) -> list[TokenEvent]:
        return [event for event in self.events if event.handle == handle]

    def tokens_of(self, handle: int) -> list[int]:
        return [token for event in self.events_of(handle) for token in event.token_ids]

    def end_of(self, handle: int) -> EndReason | None:
        """The one end of a request; asserts that nothing came after it."""
        events = self.events_of(handle)
        ends = [event for event in events if event.end is not None]
        assert len(ends) <= 1
        assert not ends or ends[0] is events[-1]
        return ends[0].end if ends else None

    def expect_whole(self, handle: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Exactly the script's tokens and log-probs, once, then LENGTH and the right usage."""
        token_ids, log_probs = expected(self.script, prompt, max_tokens)
        assert self.tokens_of(handle) == token_ids
        events = self.events_of(handle)
        assert [p for event in events for p in event.log_probs] == log_probs
        assert self.end_of(handle) is EndReason.LENGTH
        usage = events[-1].usage
        assert usage is not None
        assert (usage.num_input_tokens, usage.num_output_tokens) == (len(prompt), max_tokens)
        assert usage.cum_log_prob == sum(log_probs)

    def expect_nothing_left(self) -> None:
        assert len(self.coordinator.table) == 0
        assert self.coordinator.num_held == 0
        assert self.executor.batcher.kv.num_used_blocks == 0
        assert self.runner.num_requests == 0
