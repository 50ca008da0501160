"""A Coordinator in the middle of its work, without an engine: what plans are measured on.

Owns the situations (quiet, busy, burst) and how they come about: by the coordinator's own calls
only, in virtual time up to NOW. Invariant: same size and kind, same situation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    Request,
    Response,
    Result,
    num_blocks_needed,
)
from tokenflow.policies import policy_from_config
from tokenflow.scheduler import plan
from tokenflow.session import Session
from tokenflow.types import Decision, GenerateRequest, Snapshot

# Kind -> seconds of the engine's step, whatever is in it.
STEP_BASE_S = {"quiet": 0.06, "busy": 0.08, "burst": 0.002}
NOW = 100.0
_TOKENS_PER_BLOCK = 32
_MAX_TOKENS = 256
_NUM_ITERATIONS = 64


class NotingExecutor:
    """The executor surface without an engine: ids for what is enqueued, and nothing ever comes."""

    def __init__(self) -> None:
        self.num_enqueued = 0
        self.num_cancelled = 0

    def enqueue_request(self, request: Request) -> int:
        """See Executor."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """See Executor."""
        first = self.num_enqueued
        self.num_enqueued += len(requests)
        return list(range(first, self.num_enqueued))

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """See Executor."""
        return []

    def get_num_responses_ready(self) -> int:
        """See Executor."""
        return 0

    def cancel_request(self, id: int) -> None:
        """See Executor."""
        self.num_cancelled += 1

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """See Executor."""
        return []

    def can_enqueue_requests(self) -> bool:
        """See Executor."""
        return True

    def get_kv_cache_event_manager(self) -> None:
        """See Executor."""

    def get_kv_tiering(self) -> None:
        """See Executor."""

    def shutdown(self) -> None:
        """See Executor."""


class Planner:
    """The product's planner. What it decided is kept, and returned only if `apply` is set;
    a `told` decision is returned instead, once."""

    def __init__(self, config: ServingConfig) -> None:
        self._policy = policy_from_config(config)
        self.apply = False
        self.told: Decision | None = None
        self.decision = Decision()

    def __call__(self, snapshot: Snapshot) -> Decision:
        told, self.told = self.told, None
        if told is not None:
            return told
        self.decision = self.plan(snapshot)
        return self.decision if self.apply else Decision()

    def plan(self, snapshot: Snapshot) -> Decision:
        """The decision on a snapshot."""
        return plan(snapshot, self._policy)


def batch_size(num_sessions: int, kind: str) -> int:
    """Slots of the engine: as many as can be set when all run, else an eighth, 8 to 256."""
    return min(4096, num_sessions) if kind == "quiet" else max(8, min(256, num_sessions // 8))


def build(num_sessions: int, kind: str) -> tuple[Coordinator, Planner]:
    """A coordinator in the middle of its work at NOW, brought there by its own calls."""
    max_batch_size = batch_size(num_sessions, kind)
    num_running = num_sessions if kind == "quiet" else max_batch_size
    num_started = num_running + (0 if kind == "quiet" else num_sessions // 3)
    requests = [_request(i, num_sessions) for i in range(num_sessions)]
    # The pool holds the KV of all that started, and of twice as many as can run.
    num_blocks = 2 * sum(_num_blocks(request) for request in requests[:num_running])
    num_blocks = max(num_blocks, sum(_num_blocks(request) for request in requests[:num_started]))
    config = ServingConfig(
        max_batch_size=max_batch_size,
        tokens_per_block=_TOKENS_PER_BLOCK,
        max_tokens_in_paged_kv_cache=num_blocks * _TOKENS_PER_BLOCK,
        max_queue_size=num_sessions,
        max_queue_delay_s=3_600.0,
    )
    planner = Planner(config)
    coordinator = Coordinator(NotingExecutor(), config, planner, lambda event: None)
    _teach(coordinator, STEP_BASE_S[kind])
    sessions = [_submit(coordinator, request) for request in requests]
    _start(coordinator, planner, sessions[:num_started])
    if num_started > num_running:
        _pause(coordinator, planner, sessions[num_running:num_started], 2 * STEP_BASE_S[kind])
    return coordinator, planner


def _request(index: int, num_sessions: int) -> GenerateRequest:
    """Arrivals over 50 s, the last one 10 s before NOW."""
    return GenerateRequest(
        request_id=str(index),
        input_token_ids=tuple(range(40 + index % 60)),
        max_tokens=_MAX_TOKENS,
        arrival_time=NOW - 10.0 - 50.0 * (num_sessions - index) / num_sessions,
        read_rate=3.0 + index % 5,
    )


def _num_blocks(request: GenerateRequest) -> int:
    return num_blocks_needed(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        _TOKENS_PER_BLOCK,
        len(request.input_token_ids),
        request.max_tokens,
    )


def _submit(coordinator: Coordinator, request: GenerateRequest) -> Session:
    handle = coordinator.new_handle()
    coordinator.submit(handle, request, request.arrival_time)
    session = coordinator.table.get(handle)
    assert session is not None, "refused"
    return session


def _start(coordinator: Coordinator, planner: Planner, sessions: Sequence[Session]) -> None:
    """All of them in the engine, their first token 8 s and the latest 0 to 3 s before NOW."""
    planner.told = Decision(admit=tuple(session.slot for session in sessions))
    coordinator.plan(NOW - 9.0)
    for session in sessions:
        coordinator.on_responses([_response(session, [0])], NOW - 8.0)
    for i, session in enumerate(sessions):
        tokens = list(range(29 + i % 100))
        coordinator.on_responses([_response(session, tokens)], NOW - 0.05 * (i % 60))


def _pause(
    coordinator: Coordinator, planner: Planner, sessions: Sequence[Session], seconds: float
) -> None:
    """All of them paused 1 s before NOW; the pause took the engine `seconds`."""
    planner.told = Decision(pause=tuple(session.slot for session in sessions))
    coordinator.plan(NOW - 1.0 - seconds)
    finals = [_response(session, [], FinishReason.CANCELLED) for session in sessions]
    coordinator.on_responses(finals, NOW - 1.0)


def _response(
    session: Session, token_ids: list[int], reason: FinishReason = FinishReason.NOT_FINISHED
) -> Response:
    assert session.executor_request_id is not None, "not in the engine"
    result = Result(
        is_final=reason is not FinishReason.NOT_FINISHED,
        output_token_ids=[token_ids],
        finish_reasons=[reason],
    )
    return Response(request_id=session.executor_request_id, payload=result)


def _teach(coordinator: Coordinator, step_base_s: float) -> None:
    """Iterations of an engine: a fixed cost, a little per sequence, KV token and prefill token."""
    stats = []
    for i in range(_NUM_ITERATIONS):
        num_gen, num_ctx_tokens = 1 + 37 * i % 256, 32 * (i % 4)
        num_kv_tokens = num_gen * (60 + 7 * i % 200)
        seconds = step_base_s + 1e-6 * num_gen + 1e-9 * num_kv_tokens + 1e-5 * num_ctx_tokens
        batch = InflightBatchingStats(
            num_scheduled_requests=num_gen,
            num_context_requests=0,
            num_gen_requests=num_gen,
            num_paused_requests=0,
            num_ctx_tokens=num_ctx_tokens,
        )
        kv = KvCacheStats(
            max_num_blocks=1,
            free_num_blocks=1,
            used_num_blocks=0,
            tokens_per_block=_TOKENS_PER_BLOCK,
        )
        stats.append(
            IterationStats(
                iter=i,
                iter_latency_ms=1e3 * seconds,
                num_active_requests=num_gen,
                num_queued_requests=0,
                num_completed_requests=0,
                max_num_active_requests=256,
                kv_cache_stats=kv,
                inflight_batching_stats=batch,
                num_gen_context_tokens=num_kv_tokens,
            )
        )
    coordinator.on_stats(stats, 0.0)
