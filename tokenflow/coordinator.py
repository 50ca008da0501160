"""The decisions' hands: everything that happens to sessions, without threads and without a clock.

Owns the session table and what it is planned from (engine_side.py); calls the executor; emits
`TokenEvent`s. All methods take `now` and run in one thread (the runtime's, a test's or a
simulator's). Invariants: a request gets each of its tokens once, in order, then exactly one event
with `end` set, whatever is paused, held, resumed, cancelled, timed out or lost; none after
`finish`, by which the sender says that it has ended the answer itself. While requests are served
nothing is cancelled in the engine between its enqueue and its first token (an engine that chunks
its context may store blocks it has not computed). Only `fail_all` does, after which nothing is
served. Between the loss of an engine and the start of the next one nothing is planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tokenflow.answers import Answers
from tokenflow.config import ServingConfig
from tokenflow.costs import CostModel
from tokenflow.engine_side import EngineSide
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    Executor,
    IterationStats,
    Response,
)
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.holds import HoldRefusal, Holds
from tokenflow.intake import Intake
from tokenflow.output_lengths import OutputLengths
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.trace import NullTracer, Tracer
from tokenflow.types import (
    Decision,
    GenerateRequest,
    SessionState,
    Snapshot,
    TokenEvent,
)

_S = SessionState

_TIER_PARTS = ("recompute", "prefetch", "offload")

Planner = Callable[[Snapshot], Decision]


class Coordinator:
    """Applies a planner's decisions to an executor on behalf of all sessions."""

    def __init__(
        self,
        executor: Executor,
        config: ServingConfig,
        planner: Planner,
        emit: Callable[[TokenEvent], None],
        tracer: Tracer | None = None,
        costs: CostModel | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        """costs, lengths: what is known already of the engine's costs, and of how long answers are;
        None: nothing."""
        engine = config.executor_config()
        self._config = config
        self._plan = planner
        self._tracer = tracer or NullTracer()
        lengths = lengths or OutputLengths()
        self._answers = Answers(emit, self._tracer, lengths)
        self._capacity_policy = engine.scheduler_config.capacity_scheduler_policy
        self._handles = itertools.count(1)
        self._last_plan_time = float("-inf")
        self._needs_plan = False
        self.costs = costs or CostModel()
        self.counters = self._answers.counters
        self.table = SessionTable(
            capacity_policy=self._capacity_policy,
            tokens_per_block=engine.tokens_per_block,
            default_read_rate=config.default_read_rate,
            max_seq_len=engine.max_seq_len,
            max_input_len=engine.max_input_len,
            lease_tokens=config.lease_tokens,
        )
        self._engine = EngineSide(executor, config, self.table, self._answers, self.costs, lengths)
        self._commands, self._feedback = self._engine.commands, self._engine.feedback
        self._holds = Holds(
            self.table,
            self._answers,
            self._commands,
            max_hold_s=config.max_hold_s,
            max_holds=config.max_queue_size,
        )
        self._intake = Intake(
            self.table, self._answers, self._feedback, config, self.num_total_blocks
        )

    # -- requests ------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """A handle that no request has had."""
        return next(self._handles)

    def submit(self, handle: int, request: GenerateRequest, now: float) -> None:
        """Take a request in, or answer at once that the server holds too many."""
        self.counters.num_received += 1
        if self._intake.is_full() and self._needs_plan:
            self.plan(now)  # those who came just before may have a place
        if not self._intake.lets_in(handle, request, now):
            return
        session = self.table.add(handle, request, now)
        self._engine.arrived(session, now)
        self._needs_plan = True
        self._tracer.record(
            "arrival",
            request.arrival_time,
            request_id=request.request_id,
            num_prompt_tokens=len(request.input_token_ids),
            max_tokens=request.max_tokens,
        )

    def refuse(self, handle: int, request: GenerateRequest, message: str, now: float) -> None:
        """Answer a request that cannot be served now; retryable."""
        self.counters.num_received += 1
        self._answers.refused(handle, request, message, now, retryable=True)

    def count_invalid(self) -> None:
        """A request was refused before it came here."""
        self.counters.num_received += 1
        self.counters.num_failed += 1

    def drain_ttft_s(self) -> list[float]:
        """Times to first token since the last call; any one thread may call it."""
        return self._answers.drain_ttft_s()

    def cancel(self, handle: int, now: float) -> None:
        """The client left or asked for the end; it gets a CANCELLED event at once."""
        session = self.table.get(handle)
        if session is None or session.answered:
            return
        self._answers.cancelled(session, now)
        self._abandon(session, now)

    def finish(self, handle: int, now: float) -> None:
        """The answer is complete by its text (stop string, end token); stop work, emit nothing."""
        session = self.table.get(handle)
        if session is None or session.answered:
            return
        self._answers.finished_by_text(session, now)
        self._abandon(session, now)

    def hold(self, handle: int, now: float) -> None:
        """The client holds its stream paused until `release`; see holds.py."""
        self.hold_all((handle,), now)

    def hold_all(self, handles: Sequence[int], now: float) -> HoldRefusal | None:
        """The same for some streams, those that have not ended: all or none. Why none, or None."""
        sessions = [s for s in map(self.table.get, handles) if s is not None and not s.answered]
        return self._holds.hold_all(sessions, now)

    def release(self, handle: int, now: float) -> None:
        """The client holds its stream no longer."""
        session = self.table.get(handle)
        if session is not None and self._holds.release(session, now):
            self._needs_plan = True

    def acknowledge(self, handle: int, num_consumed: int, now: float) -> None:
        """The client consumed `num_consumed` tokens in all."""
        session = self.table.get(handle)
        if session is not None:
            self.table.acknowledge(session, num_consumed, now)

    def fail_all(self, message: str, now: float, *, retryable: bool = False) -> None:
        """End every session with an error: no engine comes any more, or the server shuts down."""
        executor_ids = [s.executor_request_id for s in self.table]
        for session in self.table:
            if not session.answered:
                self._answers.failed(session, message, now, retryable=retryable)
            self.table.transition(session, _S.FINISHED, now)
        self._engine.emptied()
        self._commands.cancel_all(executor_ids)

    # -- engine --------------------------------------------------------------------------------

    def on_responses(self, responses: Sequence[Response], now: float) -> None:
        """What the engine said in one or more iterations, in order."""
        self._commands.progressed(now)
        if self._feedback.on_responses(responses, now):
            self._needs_plan = True
        self._holds.pause_running(now)

    def num_tokens_to_change(self, session: Session | None) -> int:
        """How many more tokens of a session may come by `on_decoded`."""
        return self._feedback.num_tokens_to_change(session)

    def on_decoded(
        self, sessions: Sequence[Session], token_ids: Sequence[int], times: Sequence[float]
    ) -> None:
        """What several iterations in which nothing changed say, at once: each of `sessions` got
        `token_ids`, one at each of `times`. Emits nothing: the caller tells the clients. Statistics
        come by `on_stats` all the same."""
        self._commands.progressed(times[-1])
        self._feedback.on_decoded(sessions, token_ids, times)

    def on_stats(self, stats: Sequence[IterationStats], now: float) -> None:
        """Learn costs and room from finished iterations."""
        if stats:
            self._commands.progressed(now)
            self._feedback.on_stats(stats, now)

    def on_engine_lost(self, message: str, now: float) -> None:
        """The engine ended; `message` says how. What it held waits for the next one, if it may."""
        if not self._commands.is_up:
            return
        self.counters.num_engine_losses += 1
        self._tracer.record("engine_lost", now, reason=message)
        self._engine.lost(message, now)

    def on_engine_started(self, executor: Executor, now: float) -> None:
        """An engine that knows nothing took the place of the lost one."""
        self._engine.started(executor)
        self._needs_plan = True
        self._tracer.record("engine_started", now)

    @property
    def engine_is_up(self) -> bool:
        """False between a loss and the next start."""
        return self._commands.is_up

    def stalled_s(self, now: float) -> float:
        """How long the engine has held requests without an iteration or a response, seconds."""
        return self._commands.stalled_s(now)

    @property
    def num_held(self) -> int:
        """Streams that their clients hold."""
        return len(self._holds)

    @property
    def tiers(self) -> KvTierStats | None:
        """Both KV tiers, as of the last iteration or the engine's start; None = unknown."""
        return self._engine.tiers

    @property
    def kv_is_mirrored(self) -> bool:
        """True while the engine's events tell where KV is; else it is estimated."""
        return self._engine.kv_is_mirrored

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced device blocks, as of the last iteration."""
        return self._feedback.num_free_blocks

    @property
    def num_queued_in_engine(self) -> int:
        """Enqueued requests that the engine holds in its own queue, as of its last iteration."""
        return self._intake.num_queued_in_engine

    @property
    def num_total_blocks(self) -> int:
        """Device blocks of the pool."""
        return self._engine.num_total_blocks

    def flush(self) -> None:
        """Make the trace visible up to here."""
        self._tracer.flush()

    # -- planning ------------------------------------------------------------------------------

    def next_plan_time(self) -> float:
        """When the next plan is due; +inf while nothing could change by time alone."""
        if self._needs_plan:
            return self._last_plan_time
        runs_change = self._capacity_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        runs_change |= self._commands.has_tiering  # blocks fill, and may be copied
        due = self.table.groups.deadlines.next_time()
        waits = self.table.count(_S.WAITING, _S.PREEMPTED)
        if waits or (runs_change and self.table.count(_S.RUNNING)):
            due = min(due, self._last_plan_time + self._config.plan_interval_s)
        return due

    def plan(self, now: float) -> None:
        """End what is out of time, then plan and apply."""
        self._needs_plan = False
        self._last_plan_time = now
        self._expire(now)
        if self._commands.is_up and len(self.table):
            decision = self._plan(self.snapshot(now))
            if decision:
                self._apply(decision, now)
        for session in self._feedback.take_lease_ended():
            if session.state is _S.PREEMPTED:  # this plan gave its place to others
                self._commands.left_paused(session, now)

    def snapshot(self, now: float) -> Snapshot:
        """What the planner may look at."""
        return self._engine.snapshot(now)

    # -- internals -----------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """End requests past their own limit, those that waited too long for their start, and holds
        that lasted too long."""
        for handle in self.table.groups.deadlines.pop_due(now):
            session = self.table.get(handle)
            if session is not None and not session.answered:
                self._answers.timed_out(session, now)
                self._abandon(session, now)
        self._intake.expire(now)
        self._holds.expire(now)

    def _apply(self, decision: Decision, now: float) -> None:
        tiers = {name: len(getattr(decision, name)) for name in _TIER_PARTS}
        self._tracer.record(
            "plan",
            now,
            pause=len(decision.pause),
            resume=len(decision.resume),
            admit=len(decision.admit),
            forced=len(decision.forced),
            **{name: num for name, num in tiers.items() if num},
        )
        self._commands.apply(decision, now)

    def _abandon(self, session: Session, now: float) -> None:
        """Stop the engine's work on a session that was answered."""
        self.table.answered(session)
        state = session.state
        if state in (_S.WAITING, _S.PREEMPTED):
            self.table.transition(session, _S.FINISHED, now)
            self._needs_plan = True
        elif state in (_S.RUNNING, _S.PAUSING):
            if state is _S.RUNNING:
                self._commands.cancel(session)
            self.table.transition(session, _S.CANCELLING, now)
        # PREFILLING and RESUMING stay what they are, and hold their room, until their first token.
