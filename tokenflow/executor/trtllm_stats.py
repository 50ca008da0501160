"""Iteration statistics of TensorRT-LLM, with what ours has besides as far as it can be known.

Owns what was drained from the binding and not yet taken. TensorRT-LLM tells neither when an
iteration ended on our clock, nor the contexts that it read, nor its tiers apart; how each is filled
stands at `StatsReader`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tokenflow.executor.api import IterationStats
from tokenflow.executor.trtllm_events import TrtllmKvEvents
from tokenflow.executor.trtllm_values import batching_stats, kv_cache_stats


class StatsReader:
    """Drains the binding; any thread may call it.

    max_kept: entries kept; the oldest are dropped. Of an entry,
    - end_time is when it was drained, less the iterations behind it;
    - num_gen_context_tokens is the mean context of those who generate, times their number;
    - kv_tier_stats is counted from KV events (trtllm_events.py); None without them.
    """

    def __init__(
        self, executor: Any, events: TrtllmKvEvents | None, block_bytes: int, max_kept: int
    ) -> None:
        self._executor = executor
        self._events = events
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._kept: deque[IterationStats] = deque(maxlen=max_kept)
        self._last_end_time = 0.0

    def pull(self, mean_context_tokens: Callable[[], float]) -> bool:
        """Drain; True if the engine paused requests by itself in one of the iterations."""
        with self._lock:
            given = [
                entry
                for entry in self._executor.get_latest_iteration_stats()
                if entry.inflight_batching_stats is not None and entry.kv_cache_stats is not None
            ]  # both may be None, and then the entry tells nothing
            if not given:
                return False
            mean = mean_context_tokens()
            ends = end_times([entry.iter_latency_ms for entry in given], time.monotonic())
            for entry, end_time in zip(given, ends, strict=True):
                self._last_end_time = max(self._last_end_time, end_time)
                self._kept.append(self._entry(entry, mean))
        return any(entry.inflight_batching_stats.num_paused_requests for entry in given)

    def take(self) -> list[IterationStats]:
        """What was drained since the last call."""
        with self._lock:
            stats = list(self._kept)
            self._kept.clear()
        return stats

    def _entry(self, given: Any, mean_context: float) -> IterationStats:
        pool, batch = kv_cache_stats(given.kv_cache_stats), given.inflight_batching_stats
        tiers = None
        if self._events is not None:
            tiers = self._events.tier_stats(self._block_bytes, pool.free_num_blocks)
        return IterationStats(
            iter=given.iter,
            iter_latency_ms=given.iter_latency_ms,
            num_active_requests=given.num_active_requests,
            num_queued_requests=given.num_queued_requests,
            num_completed_requests=given.num_completed_requests,
            max_num_active_requests=given.max_num_active_requests,
            kv_cache_stats=pool,
            inflight_batching_stats=batching_stats(batch),
            end_time=self._last_end_time,
            num_gen_context_tokens=round(mean_context * batch.num_gen_requests),
            kv_tier_stats=tiers,
        )


def end_times(latencies_ms: Sequence[float], now: float) -> list[float]:
    """When iterations ended of which the last one has just done so."""
    ends: list[float] = []
    for latency_ms in reversed(latencies_ms):
        ends.append(now)
        now -= latency_ms / 1000.0
    return ends[::-1]
