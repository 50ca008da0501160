"""The KV side of an engine in another process: events that came, and hints that go.

Owns what the proxy knows of the engine's KV cache: the events that nobody took yet, and the one
question that may be open. Both objects are `remote.RemoteExecutor`'s and speak through its link.

Invariants: events keep their order; when nobody takes them the oldest are dropped, which shows as a
gap in the ids; after any gap everything is asked for anew as soon as somebody takes what is left; a
hint never waits, and is left out when the engine does not keep up with commands or is gone; a
question is answered, or ends with an error, within a bounded time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.channel import (
    DropHost,
    Locate,
    Located,
    Offload,
    Prefetch,
    RequestSnapshot,
)
from tokenflow.executor.kv_api import KVCacheCreatedData, KVCacheEvent, KvLocation

logger = logging.getLogger("tokenflow")

LOCATE_TIMEOUT_S = 10.0


class RemoteKvEvents:
    """Implements `kv_api.KVCacheEventManager` over what the channel brought.

    max_size: events that wait for their reader. send_hint(message): False when it was left out.
    """

    def __init__(self, max_size: int, send_hint: Callable[[Any], bool]) -> None:
        self._send_hint = send_hint
        self._condition = threading.Condition()
        self._events: deque[KVCacheEvent] = deque(maxlen=max_size)
        self._next_id = 0
        self._is_missing_some = False
        self._is_closed = False

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """See KVCacheEventManager; returns at the engine's end too."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._events or self._is_closed,
                None if timeout_ms is None else timeout_ms / 1000.0,
            )
            events = list(self._events)
            self._events.clear()
            asks, self._is_missing_some = self._is_missing_some, False
        if asks and not self._send_hint(RequestSnapshot()):
            with self._condition:
                self._is_missing_some = True  # the next call asks again
        return events

    def take(self, events: Sequence[KVCacheEvent]) -> None:
        """The engine said this."""
        if events:
            with self._condition:
                for event in events:
                    self._note(event)
                num_before = len(self._events)
                self._events.extend(events)
                self._is_missing_some |= len(self._events) < num_before + len(events)
                self._condition.notify_all()

    def _note(self, event: KVCacheEvent) -> None:
        if isinstance(event.data, KVCacheCreatedData):
            self._is_missing_some = False  # all there is follows
        elif event.event_id != self._next_id:
            self._is_missing_some = True
        self._next_id = event.event_id + 1

    def close(self) -> None:
        """The engine is gone, no more will come."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class RemoteKvTiering:
    """Implements `kv_api.KvTiering` by messages.

    send_hint(message): False when it was left out. send(message): raises EngineError when it
    cannot be sent. timeout_s: of a question.
    """

    def __init__(
        self,
        send_hint: Callable[[Any], bool],
        send: Callable[[Any], None],
        timeout_s: float = LOCATE_TIMEOUT_S,
    ) -> None:
        self._send_hint = send_hint
        self._send = send
        self._timeout_s = timeout_s
        self._asking = threading.Lock()
        self._condition = threading.Condition()
        self._question = 0
        self._answer: Located | None = None
        self._lost: str | None = None
        self._has_warned = False

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """See KvTiering; one question at a time. Raises EngineLostError when the engine is gone,
        EngineError when it cannot answer, or does not in time."""
        with self._asking:
            with self._condition:
                self._question += 1
                self._answer = None
                question = self._question
            self._send(Locate(question, list(token_ids), cache_salt_id))
            with self._condition:
                self._condition.wait_for(self._is_settled, self._timeout_s)
                if self._answer is not None:
                    if self._answer.location is None:
                        raise EngineError(self._answer.error)
                    return self._answer.location
                if self._lost is not None:
                    raise EngineLostError(self._lost)
                raise EngineError(f"the engine did not answer within {self._timeout_s:g} s")

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """See KvTiering."""
        self._hint(Offload(list(token_ids), max_blocks, cache_salt_id))

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        self._hint(Prefetch(list(token_ids), cache_salt_id))

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        self._hint(DropHost(list(token_ids), cache_salt_id))

    def take(self, answer: Located) -> None:
        """The engine answered; an answer that comes too late is nobody's."""
        with self._condition:
            if answer.question == self._question:
                self._answer = answer
                self._condition.notify_all()

    def lose(self, message: str) -> None:
        """The engine is gone; `message` says how."""
        with self._condition:
            self._lost = message
            self._condition.notify_all()

    def _hint(self, message: Any) -> None:
        if not self._send_hint(message) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "hints about KV are left out: the engine does not read its commands fast enough"
            )

    def _is_settled(self) -> bool:
        return self._answer is not None or self._lost is not None
