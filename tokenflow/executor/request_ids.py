"""The two names of a request: the proxy's on the channel, the engine's in its process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from tokenflow.executor.api import Executor, Request, Response


class RequestIds:
    """The two names of each unfinished request. Calls may come from both threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_engine: dict[int, int] = {}
        self._to_proxy: dict[int, int] = {}

    def enqueue(
        self, proxy_ids: Sequence[int], requests: Sequence[Request], executor: Executor
    ) -> None:
        """Enqueue and remember. The lock spans the call, so that no response of a request is
        translated before its id is known; raises what the executor raises."""
        with self._lock:
            engine_ids = executor.enqueue_requests(requests)
            self._to_engine.update(zip(proxy_ids, engine_ids, strict=True))
            self._to_proxy.update(zip(engine_ids, proxy_ids, strict=True))

    def engine_id(self, proxy_id: int) -> int | None:
        """The engine's id; None when the request is unknown or its final response has passed."""
        with self._lock:
            return self._to_engine.get(proxy_id)

    def engine_ids(self) -> list[int]:
        """All unfinished requests, in the order of their start."""
        with self._lock:
            return list(self._to_proxy)

    def empty(self) -> bool:
        """True when no request is unfinished."""
        return not self._to_proxy

    def translate(self, responses: Sequence[Response]) -> list[Response]:
        """The responses under the proxy's ids; final ones end their entry."""
        result: list[Response] = []
        with self._lock:
            for response in responses:
                proxy_id = self._to_proxy[response.request_id]
                if response.payload is None or response.payload.is_final:
                    del self._to_proxy[response.request_id]
                    del self._to_engine[proxy_id]
                result.append(msgspec.structs.replace(response, request_id=proxy_id))
        return result
