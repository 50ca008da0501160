"""An engine that counts and tells of its KV: every step and every hint is an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tests.remote.counting_engine import BeforeStep, CountingEngine
from tokenflow.errors import EngineError
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheRemovedData,
    KvLocation,
)


class RecordedKv:
    """Event manager and KvTiering in one: each step is one event, each hint the next one, with what
    was asked as its hashes, and so is a request for everything anew. `locate` never comes back for
    the prefix (0,), fails for (1,), and answers with the length of any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[KVCacheEvent] = []
        self._num_events = 0
        self.say(KVCacheCreatedData([10, 20]))

    def say(self, data: KVCacheEventData) -> None:
        with self._lock:
            self._events.append(KVCacheEvent(self._num_events, data))
            self._num_events += 1

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        assert timeout_ms == 0
        with self._lock:
            events, self._events = self._events, []
        return events

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        if list(token_ids) == [0]:
            time.sleep(600)
        if list(token_ids) == [1]:
            raise EngineError("not today")
        return KvLocation(num_tokens=len(token_ids), num_device_blocks=cache_salt_id or 0)

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        self.say(KVCacheRemovedData([1, max_blocks, cache_salt_id or 0, *token_ids]))

    def request_snapshot(self) -> None:
        self.say(KVCacheRemovedData([4]))

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self.say(KVCacheRemovedData([2, cache_salt_id or 0, *token_ids]))

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self.say(KVCacheRemovedData([3, cache_salt_id or 0, *token_ids]))


class KvEngine(CountingEngine):
    """Counts, and tells of its KV."""

    def __init__(self, step_s: float, before_step: BeforeStep) -> None:
        self._kv = RecordedKv()
        super().__init__(step_s, before_step)

    def get_kv_cache_event_manager(self) -> RecordedKv:
        return self._kv

    def get_kv_tiering(self) -> RecordedKv:
        return self._kv

    def _step(self) -> None:
        super()._step()
        self._kv.say(KVCacheRemovedData([0, self._iter]))
