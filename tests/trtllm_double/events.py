"""KVCacheEventManager: a bounded buffer that forgets the oldest and tells nothing anew."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from tests.trtllm_double.objects import Body, Bound
from tokenflow.executor.kv_api import KVCacheEvent, KVCacheEventManager

CORE_BUFFER = 1 << 20
"""Events that the core keeps: so many that it never drops any, and so never tells all anew."""


class EventManagerBase(Bound):
    """Made by the executor: `attach`."""

    def attach(
        self, core: KVCacheEventManager, max_size: int, convert: Any, on_hazard: Any
    ) -> None:
        self._core, self._convert, self._on_hazard = core, convert, on_hazard
        self._kept: deque[KVCacheEvent] = deque(maxlen=max_size)
        self._lock = threading.Lock()


def _get_latest_events(self: EventManagerBase, timeout_ms: float | None) -> list[Any]:
    if timeout_ms is None:
        self._on_hazard("get_latest_events() blocks with the GIL held: pass a timeout")
        timeout_ms = 0.0
    with self._lock:
        self._kept.extend(self._core.get_latest_events(0))
        events = list(self._kept)
        self._kept.clear()
    return [self._convert(event) for event in events]


BODIES: dict[str, Body] = {"get_latest_events": _get_latest_events}
