"""KV events of the engine: what became findable, moved or left the tree.

Owns the names of blocks in events (a 64-bit hash chained over the parents', the salt in the first)
and the bounded buffer. Facts of TensorRT-LLM that are kept: events become visible once per
iteration; the oldest are discarded when the buffer is full, so that ids have a gap; consecutive
removals are one event, and so are blocks stored one under the other.

Ours: after a loss everything is told anew, so that a mirror gets over it. At the first `flush` for
which the reader has taken what was left, instead of what changed there come Created, Stored for the
whole tree, and Updated for each copy on the host. They may take half of the buffer, so that what
comes before the reader's next look does not push them out; a tree that takes more is tried again
after as many events as the buffer holds. So a loss costs at most about one walk through the tree
for each half buffer of events.

`record_*` and `flush` belong to the engine's thread, `get_latest_events` to any one other thread,
`request_snapshot` to all.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

from tokenflow.executor.kv_api import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.inflight.reuse_tree import Block, TokenKey, TreeNode

logger = logging.getLogger("tokenflow")

_MASK = (1 << 64) - 1


class KvEvents:
    """Implements `kv_api.KVCacheEventManager` and `kv_api.KVCacheSnapshots`. max_size: events kept
    for a reader, at least 1."""

    def __init__(self, max_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self._max_size = max_size
        self._num_blocks_per_level = (num_device_blocks, num_host_blocks)
        self._next_id = 0
        self._pending: list[KVCacheEventData] = []
        self._lock = threading.Lock()
        self._visible: deque[KVCacheEvent] = deque(maxlen=max_size)
        self._is_snapshot_due = False
        self._retry_id = 0
        self._has_warned_of_loss = False
        self._has_warned_of_size = False
        self._pending.append(KVCacheCreatedData([num_device_blocks, num_host_blocks]))
        self.flush(())

    def record_stored(self, block: Block, cache_level: int) -> None:
        """`block` was put into the tree."""
        parent_hash = _parent_hash(block)
        entry = _stored_block(block, cache_level)
        last = self._pending[-1] if self._pending else None
        if isinstance(last, KVCacheStoredData) and last.blocks[-1].block_hash == parent_hash:
            last.blocks.append(entry)
        else:
            self._pending.append(KVCacheStoredData(parent_hash, [entry]))

    def record_removed(self, block: Block) -> None:
        """`block` left the tree."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, KVCacheRemovedData):
            last.block_hashes.append(block.block_hash)
        else:
            self._pending.append(KVCacheRemovedData([block.block_hash]))

    def record_level(self, block: Block, old: int, new: int) -> None:
        """`block` moved to another tier, or to where it has the better one of two copies."""
        level = KVCacheEventDiffInt(old, new)
        self._pending.append(KVCacheUpdatedData(block.block_hash, cache_level=level))

    def record_priority(self, block: Block, old: int) -> None:
        """The priority of `block` changed."""
        priority = KVCacheEventDiffInt(old, block.priority)
        self._pending.append(KVCacheUpdatedData(block.block_hash, priority=priority))

    def record_host_copy(self, block: Block) -> None:
        """`block`, on the device, got or lost its copy on the host."""
        has_copy = block.host_slot is not None
        self._pending.append(KVCacheUpdatedData(block.block_hash, has_host_copy=has_copy))

    def flush(self, stored: Iterable[Block]) -> None:
        """Make what was recorded visible; once per iteration. stored: every block in the tree,
        parents before children; looked at only after a loss."""
        if self._is_snapshot_due and self._takes_snapshot():
            self._pending = self._snapshot(stored) or self._pending
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        with self._lock:
            num_lost = len(self._visible) + len(pending) - self._max_size
            for data in pending:
                self._visible.append(KVCacheEvent(self._next_id, data))
                self._next_id += 1
            self._is_snapshot_due |= num_lost > 0
        if num_lost > 0 and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            logger.warning("KV events were lost: event_buffer_max_size is %d", self._max_size)

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """See KVCacheEventManager; never waits."""
        if not self._visible:
            return []
        with self._lock:
            events = list(self._visible)
            self._visible.clear()
        return events

    def request_snapshot(self) -> None:
        """See KVCacheSnapshots."""
        with self._lock:
            self._is_snapshot_due = True

    def _takes_snapshot(self) -> bool:
        with self._lock:
            takes = self._is_snapshot_due and not self._visible and self._next_id >= self._retry_id
            if takes:
                self._is_snapshot_due = False
        return takes

    def _snapshot(self, stored: Iterable[Block]) -> list[KVCacheEventData] | None:
        """Everything anew, blocks one under the other in one event; None if it takes too many."""
        events: list[KVCacheEventData] = [KVCacheCreatedData(list(self._num_blocks_per_level))]
        copies: list[KVCacheEventData] = []
        ends: dict[int, KVCacheStoredData] = {}  # by the last block of the event
        for block in stored:
            parent_hash = _parent_hash(block)
            entry = _stored_block(block, HOST_LEVEL if block.slot is None else DEVICE_LEVEL)
            event = None if parent_hash is None else ends.pop(parent_hash, None)
            if event is None:
                event = KVCacheStoredData(parent_hash, [entry])
                events.append(event)
            else:
                event.blocks.append(entry)
            ends[block.block_hash] = event
            if block.slot is not None and block.host_slot is not None:
                copies.append(KVCacheUpdatedData(block.block_hash, has_host_copy=True))
            if 2 * (len(events) + len(copies)) > self._max_size:
                self._put_off()
                return None
        return events + copies

    def _put_off(self) -> None:
        with self._lock:
            self._is_snapshot_due = True
            self._retry_id = self._next_id + self._max_size
        if not self._has_warned_of_size:
            self._has_warned_of_size = True
            logger.warning(
                "KV events were lost and what is stored takes more than half of "
                "event_buffer_max_size (%d): it cannot be told anew",
                self._max_size,
            )


def block_hash(parent: TreeNode, key: TokenKey, cache_salt_id: int | None) -> int:
    """Name of the block with the tokens `key` under `parent`."""
    if isinstance(parent, Block):
        return hash((parent.block_hash, key)) & _MASK
    return hash((_salt_key(cache_salt_id), key)) & _MASK


def _salt_key(cache_salt_id: int | None) -> tuple[int, ...]:
    """In pieces that Python's hash of whole numbers keeps apart (it knows no 2**61 - 1, nor -1)."""
    if cache_salt_id is None:
        return ()
    size = abs(cache_salt_id)
    return (int(cache_salt_id < 0), size >> 60, size & ((1 << 60) - 1))


def _parent_hash(block: Block) -> int | None:
    parent = block.parent
    return parent.block_hash if isinstance(parent, Block) else None


def _stored_block(block: Block, cache_level: int) -> KVCacheStoredBlockData:
    return KVCacheStoredBlockData(
        block.block_hash, list(block.token_ids), cache_level, block.priority
    )
