"""The decisions' hands: everything that happens to sessions, without threads and without a clock.

Owns the session table, the cost model and the cache estimate; calls the executor; emits
`TokenEvent`s. All methods take `now` and run in one thread (the runtime's, a test's or a
simulator's). Invariants: a request gets each of its tokens once, in order, then exactly one event
with `end` set, whatever is paused, resumed, cancelled or lost; nothing is cancelled in the engine
between its enqueue and its first token (an engine that chunks its context may store blocks it has
not computed).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tokenflow.answers import Answers
from tokenflow.config import ServingConfig
from tokenflow.costs import CostModel
from tokenflow.errors import EngineError, InternalError
from tokenflow.executor.api import Executor, FinishReason, IterationStats, Response, Result
from tokenflow.preemption import CacheEstimate, engine_request
from tokenflow.session import IN_ENGINE, Session, SessionTable
from tokenflow.trace import NullTracer, Tracer
from tokenflow.types import (
    Decision,
    GenerateRequest,
    KvView,
    SessionState,
    Snapshot,
    TokenEvent,
    end_reason,
)

_S = SessionState
_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT)

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
    ) -> None:
        engine = config.executor_config()
        pool_tokens = engine.kv_cache_config.max_tokens or 0
        self._executor = executor
        self._config = config
        self._plan = planner
        self._tracer = tracer or NullTracer()
        self._answers = Answers(emit, self._tracer)
        self._capacity_policy = engine.scheduler_config.capacity_scheduler_policy
        self._num_total_blocks = pool_tokens // engine.tokens_per_block
        self._cache = CacheEstimate(self._num_total_blocks)
        self._handles = itertools.count(1)
        self._last_plan_time = float("-inf")
        self._needs_plan = False
        self.costs = CostModel()
        self.counters = self._answers.counters
        self.num_free_blocks = self._num_total_blocks
        self.table = SessionTable(
            capacity_policy=self._capacity_policy,
            tokens_per_block=engine.tokens_per_block,
            default_read_rate=config.default_read_rate,
            max_seq_len=engine.max_seq_len,
        )

    # -- requests ------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """A handle that no request has had."""
        return next(self._handles)

    def submit(self, handle: int, request: GenerateRequest, now: float) -> None:
        """Take a request in, or answer at once that the server holds too many."""
        self.counters.num_received += 1
        limit = self._config.max_queue_size
        if self._num_unstarted() >= limit and self._needs_plan:
            self.plan(now)  # those who came just before may have a place
        if self._num_unstarted() >= limit:
            message = f"overloaded: {limit} requests are waiting (max_queue_size); try again later"
            self._answers.refused(handle, request, message, now)
            return
        self.table.add(handle, request, now)
        self._needs_plan = True
        self._tracer.record(
            "arrival",
            request.arrival_time,
            request_id=request.request_id,
            num_prompt_tokens=len(request.input_token_ids),
            max_tokens=request.max_tokens,
        )

    def cancel(self, handle: int, now: float) -> None:
        """The client left or asked for the end; it gets a CANCELLED event at once."""
        session = self.table.get(handle)
        if session is None or session.answered:
            return
        self._answers.cancelled(session, now)
        self._abandon(session, now)

    def finish(self, handle: int, now: float) -> None:
        """The client's answer is complete (a stop string was seen); stop work, emit nothing."""
        session = self.table.get(handle)
        if session is None or session.answered:
            return
        self._answers.finished_by_text(session, now)
        self._abandon(session, now)

    def acknowledge(self, handle: int, num_consumed: int, now: float) -> None:
        """The client consumed `num_consumed` tokens in all."""
        session = self.table.get(handle)
        if session is not None:
            self.table.acknowledge(session, num_consumed, now)

    def fail_all(self, message: str, now: float, *, retryable: bool = False) -> None:
        """End every session with an error: the engine is lost, or the server shuts down."""
        executor_ids = [s.executor_request_id for s in self.table]
        for session in self.table:
            if not session.answered:
                self._answers.failed(session, message, now, retryable=retryable)
            self.table.transition(session, _S.FINISHED, now)
        for executor_id in executor_ids:
            if executor_id is not None:
                self._executor.cancel_request(executor_id)

    # -- engine --------------------------------------------------------------------------------

    def on_responses(self, responses: Sequence[Response], now: float) -> None:
        """What the engine said in one or more iterations, in order."""
        for response in responses:
            session = self.table.by_executor_id(response.request_id)
            if session is None:
                continue
            if response.has_error():
                self._on_error(session, response.error_msg, now)
            else:
                self._on_result(session, response.result, now)

    def on_stats(self, stats: Sequence[IterationStats]) -> None:
        """Learn costs and room from finished iterations."""
        for entry in stats:
            self.costs.observe_iteration(entry)
            batch = entry.inflight_batching_stats
            self.counters.num_internal_pauses += batch.num_paused_requests
            self.num_free_blocks = entry.kv_cache_stats.free_num_blocks
            self._tracer.record(
                "iteration",
                entry.end_time,
                iter=entry.iter,
                latency_ms=entry.iter_latency_ms,
                num_scheduled=batch.num_scheduled_requests,
                num_active=entry.num_active_requests,
                num_queued=entry.num_queued_requests,
                num_waiting=self.table.count(_S.WAITING),
                num_preempted=self.table.count(_S.PREEMPTED),
                num_ctx_tokens=batch.num_ctx_tokens,
                free_num_blocks=entry.kv_cache_stats.free_num_blocks,
            )

    def flush(self) -> None:
        """Make the trace visible up to here."""
        self._tracer.flush()

    # -- planning ------------------------------------------------------------------------------

    def next_plan_time(self) -> float:
        """When the next plan is due; +inf while nothing could change by time alone."""
        if self._needs_plan:
            return self._last_plan_time
        if self.table.count(_S.WAITING, _S.PREEMPTED):
            return self._last_plan_time + self._config.plan_interval_s
        return float("inf")

    def plan(self, now: float) -> None:
        """Drop waiters that waited too long, then plan and apply."""
        self._needs_plan = False
        self._last_plan_time = now
        self._expire(now)
        if len(self.table):
            decision = self._plan(self.snapshot(now))
            if decision:
                self._apply(decision, now)

    def snapshot(self, now: float) -> Snapshot:
        """What the planner may look at."""
        self._refresh_cache_estimate()
        sessions = self.table.columns(now)
        num_held = int(sessions.num_blocks_held.sum())
        return Snapshot(
            now=now,
            sessions=sessions,
            kv=KvView(
                capacity_policy=self._capacity_policy,
                tokens_per_block=self._config.tokens_per_block,
                num_total_blocks=self._num_total_blocks,
                num_free_blocks=max(0, self._num_total_blocks - num_held),
                max_batch_size=self._config.max_batch_size,
            ),
            costs=self.costs.estimate(self._config.plan_interval_s),
        )

    # -- internals -----------------------------------------------------------------------------

    def _num_unstarted(self) -> int:
        """Requests that wait for a place: ours, and those in the engine beyond its batch."""
        beyond = self.table.count(_S.PREFILLING, _S.RUNNING, _S.RESUMING)
        beyond -= self._config.max_batch_size
        return self.table.count(_S.WAITING) + max(0, beyond)

    def _expire(self, now: float) -> None:
        if not self.table.count(_S.WAITING):
            return
        limit = self._config.max_queue_delay_s
        for session in self.table:
            if session.state is _S.WAITING and now - session.request.arrival_time > limit:
                self.counters.num_overloaded += 1
                message = f"overloaded: not started within {limit} s (max_queue_delay_s)"
                self._answers.failed(session, message, now, retryable=True)
                self.table.transition(session, _S.FINISHED, now)

    def _refresh_cache_estimate(self) -> None:
        for handle in self._cache.shrink(self.table.num_used_blocks()):
            session = self.table.get(handle)
            if session is not None and session.state is _S.PREEMPTED:
                cached = self._cache.num_blocks(handle) * self._config.tokens_per_block
                self.table.set_resume_tokens(session, max(1, session.num_tokens - cached))

    def _apply(self, decision: Decision, now: float) -> None:
        self._tracer.record(
            "plan",
            now,
            pause=len(decision.pause),
            resume=len(decision.resume),
            admit=len(decision.admit),
            forced=len(decision.forced),
        )
        for slot in decision.pause:
            self._pause(self.table.at_slot(slot), decision, now)
        starting = [self.table.at_slot(slot) for slot in (*decision.resume, *decision.admit)]
        if not starting:
            return
        requests = [engine_request(s.request, s.output_token_ids, s.handle) for s in starting]
        try:
            ids = self._executor.enqueue_requests(requests)
        except (RuntimeError, EngineError) as error:
            for session in starting:
                self._answers.failed(session, f"the engine refused: {error}", now)
                self.table.transition(session, _S.FINISHED, now)
            return
        for session, executor_request_id in zip(starting, ids, strict=True):
            resumed = session.state is _S.PREEMPTED
            self._cache.forget(session.handle)
            self.table.enter_engine(session, executor_request_id, now)
            if resumed:
                self.counters.num_resumes += 1
            self._answers.trace(
                "resume" if resumed else "admit", session, now, why=decision.why.get(session.slot)
            )

    def _pause(self, session: Session, decision: Decision, now: float) -> None:
        if session.state is not _S.RUNNING or session.executor_request_id is None:
            raise InternalError(f"plan pauses a session that is {session.state.name}")
        self._executor.cancel_request(session.executor_request_id)
        self.table.transition(session, _S.PAUSING, now)
        self.counters.num_pauses += 1
        self.counters.num_forced_pauses += session.slot in decision.forced
        self._answers.trace(
            "pause",
            session,
            now,
            why=decision.why.get(session.slot),
            slack_s=session.reader.slack_s(now),
            num_tokens=len(session.output_token_ids),
        )

    def _on_error(self, session: Session, message: str, now: float) -> None:
        if not session.answered:
            self._answers.failed(session, message, now)
        self.table.transition(session, _S.FINISHED, now)
        self._needs_plan = True

    def _on_result(self, session: Session, result: Result, now: float) -> None:
        token_ids = result.output_token_ids[0] if result.output_token_ids else []
        if token_ids:
            self._on_tokens(session, token_ids, result, now)
        cut_short = result.is_final and result.finish_reasons[0] in _CUT_SHORT
        if token_ids and not session.answered and (cut_short or not result.is_final):
            self._answers.tokens(session, token_ids, result, now)
        if result.is_final:
            self._on_final(session, result, now)

    def _on_tokens(
        self, session: Session, token_ids: list[int], result: Result, now: float
    ) -> None:
        if session.answered:
            # A client's cancel waits for the first token after an enqueue, see `_abandon`.
            self._cancel_in_engine(session)
            return
        first_ever = session.first_token_time is None
        if session.state in (_S.PREFILLING, _S.RESUMING):
            self._started(session, now)
        if result.log_probs:
            session.cum_log_prob += sum(result.log_probs[0])
        self.table.deliver(session, token_ids, now)
        self.counters.num_output_tokens += len(token_ids)
        if len(session.output_token_ids) == session.request.max_tokens - 1:
            self._needs_plan = True  # it ends in the next step: its place can be given away now
        if first_ever:
            self.counters.ttft_s.append(now - session.request.arrival_time)

    def _started(self, session: Session, now: float) -> None:
        """First token after an enqueue: the session runs."""
        resumed = session.state is _S.RESUMING
        self.table.transition(session, _S.RUNNING, now)
        if resumed:
            self.costs.observe_resume(now - session.enqueue_time, session.num_resume_tokens)
        self._answers.trace("resumed" if resumed else "first_token", session, now)
        self._needs_plan = True

    def _on_final(self, session: Session, result: Result, now: float) -> None:
        self._needs_plan = True
        self._count_recomputed(session, result)
        reason = result.finish_reasons[0]
        self._release_cache(session)
        if session.answered:
            self.table.transition(session, _S.FINISHED, now)
        elif reason is FinishReason.CANCELLED and session.state is _S.PAUSING:
            self._paused(session, now)
        elif reason in _CUT_SHORT:
            message = f"the engine ended the request ({reason.name.lower()})"
            self._answers.failed(session, message, now)
            self.table.transition(session, _S.FINISHED, now)
        else:
            token_ids = result.output_token_ids[0] if result.output_token_ids else []
            self._answers.tokens(session, token_ids, result, now, end_reason(reason))
            self.table.transition(session, _S.FINISHED, now)

    def _paused(self, session: Session, now: float) -> None:
        self.costs.observe_pause(now - session.last_transition_time)
        self.table.transition(session, _S.PREEMPTED, now)
        self.table.set_resume_tokens(session, 1)
        self._answers.trace("paused", session, now, slack_s=session.reader.slack_s(now))

    def _count_recomputed(self, session: Session, result: Result) -> None:
        metrics = result.request_perf_metrics
        if metrics is None or session.num_pauses == 0:
            return
        num_enqueued = session.num_enqueued_tokens
        if num_enqueued > len(session.request.input_token_ids):
            self.counters.num_recomputed_tokens += max(
                0, num_enqueued - 1 - metrics.num_reused_tokens
            )

    def _release_cache(self, session: Session) -> None:
        size = self._config.tokens_per_block
        self._cache.released(session.handle, -(-(session.num_tokens - 1) // size))

    def _abandon(self, session: Session, now: float) -> None:
        """Stop the engine's work on a session that was answered."""
        state = session.state
        if state in (_S.WAITING, _S.PREEMPTED):
            self.table.transition(session, _S.FINISHED, now)
            self._needs_plan = True
        elif state in IN_ENGINE and state is not _S.CANCELLING:
            self.table.transition(session, _S.CANCELLING, now)
            if state is _S.RUNNING:
                self._cancel_in_engine(session)

    def _cancel_in_engine(self, session: Session) -> None:
        if session.executor_request_id is not None:
            self._executor.cancel_request(session.executor_request_id)
