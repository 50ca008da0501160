"""What a reader of KV events knows of the cache, and what the cache really holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenflow.executor.kv_api import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.reuse_tree import Block


@dataclass
class Known:
    """One block, as events told it."""

    parent: int | None
    tokens: tuple[int, ...]
    level: int
    priority: int
    has_host_copy: bool = False


@dataclass
class Mirror:
    """Replays events; every one must make sense where it comes.

    removed: histories of the blocks that the last `replay` took away.
    """

    blocks: dict[int, Known] = field(default_factory=dict)
    levels: list[int] | None = None
    next_id: int = 0
    removed: list[tuple[int, ...]] = field(default_factory=list)

    def replay(self, events: Iterable[KVCacheEvent]) -> None:
        self.removed = []
        for event in events:
            assert event.event_id == self.next_id, "a gap although the buffer is large"
            self.next_id += 1
            data = event.data
            if isinstance(data, KVCacheCreatedData):
                assert self.levels is None
                self.levels = data.num_blocks_per_cache_level
            elif isinstance(data, KVCacheStoredData):
                self._store(data)
            elif isinstance(data, KVCacheRemovedData):
                assert data.block_hashes
                for block_hash in data.block_hashes:
                    self._remove(block_hash)
            else:
                self._update(data)

    def _store(self, data: KVCacheStoredData) -> None:
        parent = data.parent_hash
        for block in data.blocks:
            assert parent is None or self.blocks[parent].tokens, "under an unknown block"
            assert block.block_hash not in self.blocks, "stored twice"
            self.blocks[block.block_hash] = Known(
                parent, tuple(block.tokens), block.cache_level, block.priority
            )
            parent = block.block_hash

    def _remove(self, block_hash: int) -> None:
        children = [b for b in self.blocks.values() if b.parent == block_hash]
        assert not children, "removed under its children"
        self.removed.append(self.history(block_hash))
        del self.blocks[block_hash]

    def _update(self, data: KVCacheUpdatedData) -> None:
        block = self.blocks[data.block_hash]
        assert any(v is not None for v in (data.cache_level, data.priority, data.has_host_copy))
        if data.cache_level is not None:
            assert data.cache_level.old_value == block.level
            assert data.cache_level.new_value != block.level
            block.level = data.cache_level.new_value
            block.has_host_copy = False
        if data.priority is not None:
            assert data.priority.old_value == block.priority
            block.priority = data.priority.new_value
        if data.has_host_copy is not None:
            assert block.level == DEVICE_LEVEL, "a copy beside what is on the host only"
            assert block.has_host_copy is not data.has_host_copy, "no change"
            block.has_host_copy = data.has_host_copy

    def history(self, block_hash: int) -> tuple[int, ...]:
        block = self.blocks[block_hash]
        before = () if block.parent is None else self.history(block.parent)
        return before + block.tokens

    def check(self, kv: KvCacheManager) -> None:
        """Assert that it knows exactly what `kv` holds."""
        stored = stored_blocks(kv)
        assert len({b.block_hash for b in stored}) == len(stored)
        assert set(self.blocks) == {block.block_hash for block in stored}
        for block in stored:
            known = self.blocks[block.block_hash]
            parent = block.parent
            assert known.parent == (parent.block_hash if isinstance(parent, Block) else None)
            assert known.tokens == block.token_ids
            assert known.level == (HOST_LEVEL if block.slot is None else DEVICE_LEVEL)
            assert known.priority == block.priority
            has_copy = block.slot is not None and block.host_slot is not None
            assert known.has_host_copy == has_copy


def stored_blocks(kv: KvCacheManager) -> list[Block]:
    """Every block that `kv` can find."""
    return list(kv._store)


def history_of(block: Block) -> tuple[int, ...]:
    """All tokens from the root to the end of a stored block."""
    parent = block.parent
    return (history_of(parent) if isinstance(parent, Block) else ()) + block.token_ids
