"""An executor that moves only when told: the in-flight batcher behind the executor surface, without
threads and in virtual time. Calls between `begin` and `end` fall into the step in flight."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tokenflow.executor.api import ExecutorConfig, IterationStats, Request, Response
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.runner import Runner


class SteppedExecutor:
    def __init__(self, runner: Runner, config: ExecutorConfig) -> None:
        self.batcher = InflightBatcher(runner, config)
        self.requests: dict[int, Request] = {}
        self._responses: list[Response] = []
        self._stats: list[IterationStats] = []
        self._next_id = 1

    def enqueue_request(self, request: Request) -> int:
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        ids = list(range(self._next_id, self._next_id + len(requests)))
        self._next_id += len(requests)
        for request_id, request in zip(ids, requests, strict=True):
            self.requests[request_id] = request
            self.batcher.enqueue(request_id, request)
        return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        responses, self._responses = self._responses, []
        return responses

    def get_num_responses_ready(self) -> int:
        return len(self._responses)

    def cancel_request(self, id: int) -> None:
        self.batcher.cancel(id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        stats, self._stats = self._stats, []
        return stats

    def can_enqueue_requests(self) -> bool:
        return True

    def get_kv_cache_event_manager(self) -> Any | None:
        return None

    def shutdown(self) -> None:
        self.batcher.drop_queued()

    def begin(self, now: float) -> None:
        """First boundary and the computation of a step."""
        self._responses += self.batcher.begin_step(now)
        self.batcher.forward()

    def end(self, now: float) -> None:
        """Second boundary: the step's responses become ready."""
        result = self.batcher.finish_step(now)
        self._responses += result.responses
        if result.stats is not None:
            self._stats.append(result.stats)
        self.batcher.check_integrity()
