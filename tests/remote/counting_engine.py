"""An engine that counts: what the other engines for the far end of the channel are made from."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tokenflow.executor.api import (
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    Request,
    Response,
    Result,
)

BeforeStep = Callable[[], None]

CRASH_TOKEN = 666  # a prompt that starts with it ends the process in the next step
MAX_QUEUE = 1000


class CountingEngine:
    """Streams 0, 1, 2 … to every request, one token a step, in a thread of its own.

    The prompt decides about mischief: CRASH_TOKEN kills the process in the middle of a step.
    """

    def __init__(self, step_s: float, before_step: BeforeStep) -> None:
        self._step_s = step_s
        self._before_step = before_step
        self._condition = threading.Condition()
        self._active: dict[int, list[Any]] = {}
        self._cancelled: list[int] = []
        self._ready: deque[Response] = deque()
        self._stats: list[IterationStats] = []
        self._last_id = 7000  # unlike the proxy's ids
        self._iter = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def enqueue_request(self, request: Request) -> int:
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        with self._condition:
            if len(self._active) + len(requests) > MAX_QUEUE:  # all or none, as the surface says
                raise RuntimeError(f"Maximum queue size of {MAX_QUEUE} has been reached")
            ids = []
            for request in requests:
                self._last_id += 3
                self._active[self._last_id] = [request, 0]
                ids.append(self._last_id)
            self._condition.notify_all()
            return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        with self._condition:
            seconds = None if timeout is None else timeout.total_seconds()
            self._condition.wait_for(lambda: bool(self._ready) or self._closed, seconds)
            if self._closed:
                raise RuntimeError("shut down")
            responses = list(self._ready)
            self._ready.clear()
            return responses

    def get_num_responses_ready(self) -> int:
        return len(self._ready)

    def cancel_request(self, id: int) -> None:
        with self._condition:
            self._cancelled.append(id)
            self._condition.notify_all()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        with self._condition:
            stats, self._stats = self._stats, []
            return stats

    def can_enqueue_requests(self) -> bool:
        return not self._closed

    def get_kv_cache_event_manager(self) -> Any | None:
        return None

    def get_kv_tiering(self) -> Any | None:
        return None

    def shutdown(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._active) or self._closed)
                if self._closed:
                    return
            self._before_step()
            if self._step_s:
                time.sleep(self._step_s)
            with self._condition:
                self._step()
                self._condition.notify_all()

    def _step(self) -> None:
        self._iter += 1
        for id in self._cancelled:
            if self._active.pop(id, None) is not None:
                self._ready.append(_response(id, [], FinishReason.CANCELLED))
        self._cancelled.clear()
        for id, entry in list(self._active.items()):
            request, count = entry
            if request.input_token_ids[0] == CRASH_TOKEN:
                sys.stderr.write("about to crash in a step\n")
                os.kill(os.getpid(), signal.SIGKILL)
            entry[1] = count + 1
            done = count + 1 == request.max_tokens
            reason = FinishReason.LENGTH if done else FinishReason.NOT_FINISHED
            self._ready.append(_response(id, [count], reason, client_id=request.client_id))
            if done:
                del self._active[id]
        self._stats.append(stats_of(self._iter, len(self._active)))


def _response(
    id: int, tokens: list[int], reason: FinishReason, client_id: int | None = None
) -> Response:
    final = reason is not FinishReason.NOT_FINISHED
    return Response(
        request_id=id,
        client_id=client_id,
        payload=Result(
            is_final=final,
            is_sequence_final=final,
            output_token_ids=[tokens],
            finish_reasons=[reason],
            log_probs=[[-0.5 * token for token in tokens]],
        ),
    )


def stats_of(iteration: int, num_active: int) -> IterationStats:
    return IterationStats(
        iter=iteration,
        iter_latency_ms=0.0,
        num_active_requests=num_active,
        num_queued_requests=0,
        num_completed_requests=0,
        max_num_active_requests=num_active,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=1, free_num_blocks=1, used_num_blocks=0, tokens_per_block=1
        ),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=num_active,
            num_context_requests=0,
            num_gen_requests=num_active,
            num_paused_requests=0,
            num_ctx_tokens=0,
        ),
    )
