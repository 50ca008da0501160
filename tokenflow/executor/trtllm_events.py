"""KV events of TensorRT-LLM for two readers: whoever drains them, and the figures of both tiers.

Owns a buffer of events that were taken from the binding and the count of blocks that they tell.
Invariants: every event reaches the caller once, in order; the oldest are dropped where nobody
drains more than the buffer (a gap in the ids, as in TensorRT-LLM itself); the count holds what the
engine holds, from the event of its creation until events are missing: then it is unknown for good,
because TensorRT-LLM tells nothing anew.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from tokenflow.executor.kv_api import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvTierStats,
)
from tokenflow.executor.trtllm_values import EventReader


class BlockCount:
    """How many blocks can be found on each tier, from the events of the first attention window.

    num_blocks_per_level: sizes of [device, host]; [] until they were told.
    """

    def __init__(self) -> None:
        self._levels: dict[int, int] = {}
        self._num = [0, 0]
        self._moved = [0, 0]  # blocks that arrived on each level from the other one
        self._num_host_removed = 0
        self._next_id: int | None = None
        self._window: int | None = None
        self.is_complete = True
        self.num_blocks_per_level: list[int] = []

    def apply(self, event: KVCacheEvent) -> None:
        """Take an event in."""
        data = event.data
        is_first = self._next_id is None and isinstance(data, KVCacheCreatedData)
        if event.event_id != self._next_id and not is_first:
            self.is_complete = False
            self._levels.clear()
        self._next_id = event.event_id + 1
        if self._window is None:
            self._window = event.window_size
        if event.window_size != self._window:
            return
        if isinstance(data, KVCacheCreatedData):
            self.num_blocks_per_level = data.num_blocks_per_cache_level
        elif not self.is_complete:
            return
        elif isinstance(data, KVCacheStoredData):
            for block in data.blocks:
                self._put(block.block_hash, block.cache_level)
        elif isinstance(data, KVCacheRemovedData):
            for block_hash in data.block_hashes:
                self._num_host_removed += self._levels.get(block_hash) == HOST_LEVEL
                self._drop(block_hash)
        else:
            self._update(data)

    def _update(self, data: KVCacheUpdatedData) -> None:
        if data.cache_level is not None and data.block_hash in self._levels:
            self._moved[data.cache_level.new_value] += 1
            self._put(data.block_hash, data.cache_level.new_value)

    def _put(self, block_hash: int, level: int) -> None:
        self._drop(block_hash)
        self._levels[block_hash] = level
        self._num[level] += 1

    def _drop(self, block_hash: int) -> None:
        level = self._levels.pop(block_hash, None)
        if level is not None:
            self._num[level] -= 1

    def tier_stats(self, block_bytes: int, num_device_free: int) -> KvTierStats | None:
        """Both tiers, or None while they are unknown. num_device_free: unreferenced device blocks,
        cached ones included.

        What running requests use can be found as well, and is counted as used: the rest of what
        can be found is cached. Copies are counted when they are told; how long they took is not
        told, nor for how long steps waited.
        """
        if not self.is_complete or len(self.num_blocks_per_level) <= HOST_LEVEL:
            return None
        num_device, num_host = self.num_blocks_per_level[: HOST_LEVEL + 1]
        num_used = num_device - num_device_free
        num_cached = min(max(0, self._num[DEVICE_LEVEL] - num_used), num_device_free)
        offloads, onboards = self._moved[HOST_LEVEL], self._moved[DEVICE_LEVEL]
        return KvTierStats(
            block_bytes=block_bytes,
            num_device_blocks=num_device,
            num_device_used_blocks=num_used,
            num_device_cached_blocks=num_cached,
            num_device_in_transit_blocks=0,
            num_host_blocks=num_host,
            num_host_cached_blocks=self._num[HOST_LEVEL],
            num_host_in_transit_blocks=0,
            num_offloads_started=offloads,
            num_offloads_completed=offloads,
            num_onboards_started=onboards,
            num_onboards_completed=onboards,
            num_host_evicted_blocks=self._num_host_removed,
        )


class TrtllmKvEvents:
    """Implements `kv_api.KVCacheEventManager`; not KVCacheSnapshots. Any thread may call it.

    manager: the binding's. max_size: events kept for a reader.
    """

    def __init__(self, manager: Any, reader: EventReader, max_size: int) -> None:
        self._manager = manager
        self._reader = reader
        self._lock = threading.Lock()
        self._kept: deque[KVCacheEvent] = deque(maxlen=max_size)
        self._count = BlockCount()

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """See KVCacheEventManager; never waits: the binding would, with the GIL held."""
        with self._lock:
            self._pull()
            events = list(self._kept)
            self._kept.clear()
        return events

    def num_blocks_per_level(self) -> list[int]:
        """Sizes of [device, host]; [] until the engine has told them."""
        with self._lock:
            self._pull()
            return list(self._count.num_blocks_per_level)

    def tier_stats(self, block_bytes: int, num_device_free: int) -> KvTierStats | None:
        """See BlockCount.tier_stats."""
        with self._lock:
            self._pull()
            return self._count.tier_stats(block_bytes, num_device_free)

    def _pull(self) -> None:
        for event in self._manager.get_latest_events(0.0):
            value = self._reader.read(event)
            self._count.apply(value)
            self._kept.append(value)
