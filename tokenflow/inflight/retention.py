"""What a request says about keeping its blocks: TensorRT-LLM's rules, restated.

A block of the prompt gets the priority of the range that holds its first token, a block taken while
decoding the decode priority; where nothing is said, a new block has the default and a reused one
keeps its own. With a duration, the priority falls back to the default so long after the release.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import timedelta

from tokenflow.executor.api import KvCacheRetentionConfig
from tokenflow.inflight.reuse_tree import DEFAULT_PRIORITY, Block


def mark_prompt_block(
    block: Block, first_token: int, config: KvCacheRetentionConfig | None
) -> None:
    """Give a block whose first token is at position `first_token` of a prompt its priority."""
    if config is None:
        return
    for part in config.token_range_retention_configs:
        if part.token_start <= first_token and (
            part.token_end is None or first_token < part.token_end
        ):
            block.priority = part.priority
            block.duration_s = _seconds(part.duration_ms)
            return


def mark_decode_block(block: Block, config: KvCacheRetentionConfig | None) -> None:
    """Give a block taken while decoding its priority."""
    if config is not None:
        block.priority = config.decode_retention_priority
        block.duration_s = _seconds(config.decode_duration_ms)


_Entry = tuple[float, int, Block, int]
"""Instant of the end, a number that breaks ties, the block, its `last_use` at that release."""

_MIN_LIMIT = 64


class Expiry:
    """Blocks whose priority ends at some instant.

    An entry is checked when its time comes; those of blocks that were used again or forgotten
    meanwhile are thrown out once they are half of all.
    expired: called with each block whose priority has just become the default, and its old one.
    """

    def __init__(self, expired: Callable[[Block, int], None]) -> None:
        self._expired = expired
        self._heap: list[_Entry] = []
        self._num_pushed = 0
        self._limit = _MIN_LIMIT

    def released(self, block: Block, now: float) -> None:
        """`block` became unreferenced; its duration begins."""
        if block.duration_s is None or block.priority == DEFAULT_PRIORITY:
            return
        self._num_pushed += 1
        entry = (now + block.duration_s, self._num_pushed, block, block.last_use)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if _is_live(entry)]
            heapq.heapify(self._heap)
            self._limit = max(_MIN_LIMIT, 2 * len(self._heap))

    def refresh(self, now: float) -> None:
        """End what is over. A block that was used again meanwhile begins anew at its release."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if not _is_live(entry):
                continue
            block = entry[2]
            old, block.priority, block.duration_s = block.priority, DEFAULT_PRIORITY, None
            self._expired(block, old)

    def __len__(self) -> int:
        return len(self._heap)


def _is_live(entry: _Entry) -> bool:
    _, _, block, last_use = entry
    return block.parent is not None and not block.ref_count and block.last_use == last_use


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()
