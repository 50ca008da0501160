"""What clients and traces are told about a session, and the totals of it.

Owns the construction of `TokenEvent`s, the counters and the trace records of sessions. Invariant:
an event with `end` set is emitted once per session, or never if its sender has ended the answer by
its text; `Session.answered` says that the one or the other happened.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenflow.executor.api import IterationStats, Result
from tokenflow.output_lengths import OutputLengths
from tokenflow.session import Session
from tokenflow.trace import Tracer
from tokenflow.types import EndReason, GenerateRequest, TokenEvent

_MAX_TTFT_SAMPLES = 4096
_TRACE_NAMES = {
    EndReason.ERROR: "error",
    EndReason.CANCELLED: "cancel",
    EndReason.TIMEOUT: "timeout",
}


@dataclass(slots=True)
class Counters:
    """Totals since start. num_ok, num_failed, num_cancelled and num_timed_out count ended requests,
    each once.

    num_engine_losses, num_recovered: engines that were lost, and sessions that went on afterwards.
    num_lease_ends: enqueues that ended at their lease while the request went on.
    num_resumes_from_cache, num_resumes_from_host, num_resumes_recomputed: resumes that found all
        their KV on the device, those for which a part of it was brought back from the host, and
        those whose KV had to be computed again, in part or whole; counted at the end of the run
        that they began.
    num_offloads_*, num_onboards_*: blocks copied to the host and back. offload_s, onboard_s: time
        of the copies themselves; copy_wait_s: time for which steps waited for them.
    num_host_evicted_blocks, num_host_full: blocks that the host tier gave up for others, and those
        that found no room there.
    num_kv_event_gaps: how often KV events were missed.
    """

    num_received: int = 0
    num_ok: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_timed_out: int = 0
    num_overloaded: int = 0
    num_pauses: int = 0
    num_forced_pauses: int = 0
    num_internal_pauses: int = 0
    num_lease_ends: int = 0
    num_resumes: int = 0
    num_resumes_from_cache: int = 0
    num_resumes_from_host: int = 0
    num_resumes_recomputed: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0
    num_engine_losses: int = 0
    num_recovered: int = 0
    num_offloads_started: int = 0
    num_offloads_completed: int = 0
    num_offloads_failed: int = 0
    num_onboards_started: int = 0
    num_onboards_completed: int = 0
    num_onboards_failed: int = 0
    offload_s: float = 0.0
    onboard_s: float = 0.0
    copy_wait_s: float = 0.0
    num_host_evicted_blocks: int = 0
    num_host_full: int = 0
    num_kv_event_gaps: int = 0

    @property
    def hidden_copy_share(self) -> float:
        """Share of the copies' time for which no step waited; 0 when nothing was copied."""
        copy_s = self.offload_s + self.onboard_s
        return max(0.0, 1.0 - self.copy_wait_s / copy_s) if copy_s > 0 else 0.0


class Answers:
    """Tells the sender and the trace what happened to sessions. lengths: hears how they ended."""

    def __init__(
        self, emit: Callable[[TokenEvent], None], tracer: Tracer, lengths: OutputLengths
    ) -> None:
        self._emit = emit
        self._tracer = tracer
        self._ttft_s: deque[float] = deque(maxlen=_MAX_TTFT_SAMPLES)
        self.counters = Counters()
        self._lengths = lengths

    def first_token(self, session: Session, now: float) -> None:
        """The request's first token ever is on its way."""
        self._ttft_s.append(now - session.request.arrival_time)

    def drain_ttft_s(self) -> list[float]:
        """Times to first token since the last call, for a histogram; any one thread may call it.
        The oldest are lost beyond some thousands."""
        values: list[float] = []
        with contextlib.suppress(IndexError):
            while True:
                values.append(self._ttft_s.popleft())
        return values

    def trace(self, event: str, session: Session, now: float, **fields: object) -> None:
        """One trace line about a session."""
        self._tracer.record(event, now, request_id=session.request.request_id, **fields)

    def trace_iteration(
        self, stats: IterationStats, *, num_waiting: int, num_preempted: int
    ) -> None:
        """One trace line about a finished iteration of the engine."""
        batch = stats.inflight_batching_stats
        self._tracer.record(
            "iteration",
            stats.end_time,
            iter=stats.iter,
            latency_ms=stats.iter_latency_ms,
            num_scheduled=batch.num_scheduled_requests,
            num_active=stats.num_active_requests,
            num_queued=stats.num_queued_requests,
            num_waiting=num_waiting,
            num_preempted=num_preempted,
            num_ctx_tokens=batch.num_ctx_tokens,
            free_num_blocks=stats.kv_cache_stats.free_num_blocks,
        )

    def tokens(
        self,
        session: Session,
        token_ids: list[int],
        result: Result,
        now: float,
        end: EndReason | None = None,
    ) -> None:
        """New tokens of a session; `end` when they are its last and it ended by itself."""
        if end is not None:
            self._finished(session, end, now)
        self._emit(
            TokenEvent(
                handle=session.handle,
                request_id=session.request.request_id,
                token_ids=tuple(token_ids),
                log_probs=tuple(result.log_probs[0]) if result.log_probs else (),
                time=now,
                end=end,
                usage=session.usage(now) if end else None,
            )
        )

    def cancelled(self, session: Session, now: float) -> None:
        """The session's one end: its client left or asked for it."""
        self.counters.num_cancelled += 1
        self._end(session, EndReason.CANCELLED, now)

    def timed_out(self, session: Session, now: float) -> None:
        """The session's one end: its own time limit passed."""
        self.counters.num_timed_out += 1
        self._end(session, EndReason.TIMEOUT, now)

    def failed(
        self, session: Session, message: str, now: float, *, retryable: bool = False
    ) -> None:
        """The session's one end: an error."""
        self.counters.num_failed += 1
        self._end(session, EndReason.ERROR, now, message, retryable)

    def finished_by_text(self, session: Session, now: float) -> None:
        """The sender saw a stop string and has answered; no event."""
        self._finished(session, EndReason.STOP, now)

    def refused(
        self,
        handle: int,
        request: GenerateRequest,
        message: str,
        now: float,
        *,
        retryable: bool = False,
        overloaded: bool = False,
    ) -> None:
        """A request that never became a session."""
        self.counters.num_failed += 1
        self.counters.num_overloaded += overloaded
        self._tracer.record("error", now, request_id=request.request_id, reason=message)
        self._emit(
            TokenEvent(
                handle=handle,
                request_id=request.request_id,
                time=now,
                end=EndReason.ERROR,
                error=message,
                retryable=retryable,
            )
        )

    def _finished(self, session: Session, end: EndReason, now: float) -> None:
        session.answered = True
        self.counters.num_ok += 1
        num_tokens = len(session.output_token_ids)
        self._lengths.observe(num_tokens, stopped=end is EndReason.STOP)
        self.trace("finish", session, now, reason=end.value, num_tokens=num_tokens)

    def _end(
        self,
        session: Session,
        end: EndReason,
        now: float,
        error: str | None = None,
        retryable: bool = False,
    ) -> None:
        session.answered = True
        self._lengths.observe(len(session.output_token_ids), stopped=False)
        self.trace(_TRACE_NAMES[end], session, now, reason=error)
        self._emit(
            TokenEvent(
                handle=session.handle,
                request_id=session.request.request_id,
                time=now,
                end=end,
                error=error,
                retryable=retryable,
                usage=session.usage(now),
            )
        )
