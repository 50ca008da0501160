"""The KV events of an executor, waited for."""

from __future__ import annotations

from tests.remote.helpers import wait_until
from tokenflow.executor.api import Executor
from tokenflow.executor.kv_api import KVCacheEvent


def hear(executor: Executor, num: int) -> list[KVCacheEvent]:
    """At least `num` events."""
    manager = executor.get_kv_cache_event_manager()
    assert manager is not None
    events: list[KVCacheEvent] = []

    def enough() -> bool:
        events.extend(manager.get_latest_events(0))
        return len(events) >= num

    wait_until(enough)
    return events
