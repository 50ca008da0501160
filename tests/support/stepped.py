"""The stepped engine with a memory, a conscience and an end: it remembers requests, checks each
step and can be lost like an engine whose process was killed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from tokenflow.errors import EngineLostError
from tokenflow.executor.api import ExecutorConfig, Request, Response
from tokenflow.inflight import stepped
from tokenflow.inflight.runner import Runner

LOSS = "the engine process ended (signal SIGKILL)"


class SteppedExecutor(stepped.SteppedExecutor):
    """requests: everything ever enqueued, by the engine's id."""

    def __init__(self, runner: Runner, config: ExecutorConfig) -> None:
        super().__init__(runner, config)
        self.requests: dict[int, Request] = {}
        self._unfinished: dict[int, Request] = {}
        self.is_lost = False

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if self.is_lost:
            raise EngineLostError(LOSS)
        ids = super().enqueue_requests(requests)
        self.requests.update(zip(ids, requests, strict=True))
        self._unfinished.update(zip(ids, requests, strict=True))
        return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        responses = super().await_responses(timeout)
        for response in responses:
            if response.payload is None or response.payload.is_final:
                self._unfinished.pop(response.request_id, None)
        return responses

    def can_enqueue_requests(self) -> bool:
        return not self.is_lost

    def lose(self) -> None:
        """Killed now: what it had said is still heard, then each request gets an error."""
        self.is_lost = True
        ended = {r.request_id for r in self._responses if r.payload is None or r.payload.is_final}
        self._responses += [
            Response(request_id=id, client_id=request.client_id, error=LOSS)
            for id, request in self._unfinished.items()
            if id not in ended
        ]

    def begin(self, now: float) -> None:
        if not self.is_lost:
            super().begin(now)

    def end(self, now: float) -> None:
        if not self.is_lost:
            super().end(now)
            self.batcher.check_integrity()
