"""Paged KV bookkeeping, as the batcher sees it.

Owns the sequences, and puts the parts together: block_store.py (what can be found), block_use.py
(who uses which block), allocation.py (what a sequence is given), tiers.py (where blocks lie) and
kv_ahead.py (what is done ahead of need). Moves no data: copies are recorded, and made by
`run_moves` before anything else is computed; because every copy reads what the block held when it
was recorded, a source may be given away afterwards.

A device block is *used* (referenced by a sequence), *cached* (unreferenced, findable), *in transit*
(the target of a copy beside the steps) or *free*; together they are the pool, and all but the used
ones can be allocated: `num_free_blocks`.

What is stored for reuse (TensorRT-LLM, restated): a block as soon as it is full and computed, and
at the end of a sequence (finish, cancel, internal pause) everything computed, partial last block
included. Never more than was computed: a cancel in mid-prefill stores only the finished chunks (the
1.2 line of TensorRT-LLM stores the rest as well, and later reads garbage). The KV of the last
sampled token does not exist, so it is never stored. After a failed step nothing more is stored.

One departure more than those of allocation.py, again in what is kept only: a running sequence whose
next full block duplicates a stored one stores that and the following blocks only at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenflow.executor.api import KvCacheConfig, KvCacheRetentionConfig, KvCacheStats
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.allocation import Allocation
from tokenflow.inflight.block_store import BlockStore, SequenceBlocks
from tokenflow.inflight.block_use import BlockUse
from tokenflow.inflight.kv_ahead import KvAhead
from tokenflow.inflight.kv_events import KvEvents
from tokenflow.inflight.kv_integrity import check_blocks
from tokenflow.inflight.pools import num_pool_blocks
from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.runner import BlockCopy
from tokenflow.inflight.tiers import BlockTiers, HostTier


class KvCacheManager:
    """Allocates, shares and stores blocks. Used from one thread."""

    def __init__(
        self,
        config: KvCacheConfig,
        tokens_per_block: int,
        host: HostTier | None = None,
        *,
        block_bytes: int = 0,
    ) -> None:
        """host: the host pool; None = device only. block_bytes: KV of one block, for the
        statistics. Raises ConfigError for a device pool that this engine cannot have."""
        self.tokens_per_block = tokens_per_block
        self.num_total_blocks = num_pool_blocks(config, tokens_per_block)
        self.events: KvEvents | None = None
        if config.event_buffer_max_size and config.enable_block_reuse:
            num_host_blocks = host.num_blocks if host else 0
            self.events = KvEvents(
                config.event_buffer_max_size, self.num_total_blocks, num_host_blocks
            )
        self._store = BlockStore(config, tokens_per_block, self.events)
        self._tiers = BlockTiers(self.num_total_blocks, host, self._store, block_bytes)
        self._use = BlockUse(self._store, self._tiers)
        self._allocation = Allocation(self._store, self._tiers, self._use, config, tokens_per_block)
        self.ahead = KvAhead(self._store, self._tiers, self._use, tokens_per_block)
        self._sequences: set[SequenceBlocks] = set()
        self._lost: list[Block] = []
        self._damaged: set[SequenceBlocks] = set()

    @property
    def num_used_blocks(self) -> int:
        """Device blocks that sequences reference."""
        return self._use.num_used_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: unreferenced ones, cached ones included."""
        return self._allocation.num_free_blocks

    @property
    def has_flights(self) -> bool:
        """True while copies run beside the steps."""
        return bool(self._tiers.ahead)

    def begin(self, now: float) -> None:
        """A boundary at instant `now`: copies that are complete count, retention may be over."""
        self._tiers.now = now
        self._use.begin(now)
        self._tiers.ahead.settle()

    def flush_events(self) -> None:
        """Make the events so far visible."""
        if self.events is not None:
            self.events.flush(self._store)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def allocate(
        self,
        token_ids: Sequence[int],
        cache_salt_id: int | None = None,
        retention: KvCacheRetentionConfig | None = None,
    ) -> SequenceBlocks | None:
        """Blocks for all of `token_ids` (at least one), the beginning reused where it is cached.

        The last token is never looked up: it has to be computed for the next one to be sampled.
        Returns None when there is no room; then nothing has changed.
        """
        sequence = self._allocation.allocate(token_ids, cache_salt_id, retention)
        if sequence is not None:
            self._sequences.add(sequence)
        return sequence

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Add blocks until `num_tokens` tokens fit; False (and nothing changed) without room."""
        return self._allocation.grow(sequence, num_tokens)

    def store_full_blocks(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Make the full blocks among the first `num_computed` tokens findable by others."""
        self._store.store_full_blocks(sequence, token_ids, num_computed)

    def release(
        self,
        sequence: SequenceBlocks,
        token_ids: Sequence[int],
        num_computed: int,
        *,
        ended: bool = False,
    ) -> None:
        """End of a sequence: keep the KV of its first `num_computed` tokens for reuse.

        ended: the request is complete, and was not cut short (cancel, internal pause).
        """
        path: list[Block] = []
        for stored, is_twin in self._store.store_all(sequence, token_ids, num_computed):
            if stored.slot is None and not stored.in_transit and is_twin:
                # What hangs below it will be on the device.
                self._tiers.adopt(stored, sequence.blocks[len(path)])
            path.append(stored)
        self._drop(sequence, path, ended)

    def discard(self, sequence: SequenceBlocks, *, ended: bool = True) -> None:
        """End of a sequence whose last step failed, or (not `ended`) whose KV did not arrive: store
        nothing more."""
        self._drop(sequence, [], ended)

    # -- copies --------------------------------------------------------------------------------

    def run_moves(self, copy_blocks: Callable[[Sequence[BlockCopy]], None]) -> Exception | None:
        """Make the copies that the step needs; `copy_blocks` makes those inside the device. Returns
        what it raised. Sequences whose content did not arrive are in `take_damaged` afterwards."""
        bad_slots, lost, failure = self._tiers.run_moves(copy_blocks)
        self._lost += lost
        if bad_slots:
            self._damaged = {
                sequence
                for sequence in self._sequences
                if any(block.slot in bad_slots for block in sequence.blocks)
            }
        return failure

    def take_damaged(self) -> set[SequenceBlocks]:
        """Sequences with a block that should have been filled by a copy that failed. They are to be
        discarded; then `forget_bad` is due."""
        damaged, self._damaged = self._damaged, set()
        return damaged

    def forget_lost(self) -> None:
        """Take out of the tree what copies that failed should have filled or read. No damaged
        sequence may be left."""
        lost, self._lost = self._lost, []
        for block in lost:
            # Else it went with a block above it, or another copy of the step brought it back.
            if block.parent is not None and not block.ref_count:
                self._tiers.forget(block)

    # -- figures -------------------------------------------------------------------------------

    def stats(self) -> KvCacheStats:
        """Figures as TensorRT-LLM counts them (see KvCacheStats and AllocationCounts)."""
        counts = self._allocation.counts
        looked_up = counts.reused + counts.missed
        return KvCacheStats(
            max_num_blocks=self.num_total_blocks + self._tiers.num_host_blocks,
            free_num_blocks=self.num_free_blocks,
            used_num_blocks=self.num_used_blocks + self._tiers.num_host_blocks,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=counts.alloc_total,
            alloc_new_blocks=counts.alloc_new,
            reused_blocks=counts.reused,
            missed_blocks=counts.missed,
            cache_hit_rate=counts.reused / looked_up if looked_up else 0.0,
        )

    def tier_stats(self) -> KvTierStats:
        """Both tiers now."""
        return self._tiers.stats(self.num_used_blocks)

    def _drop(self, sequence: SequenceBlocks, path: list[Block], ended: bool) -> None:
        # Last block first: it gets the oldest tick, so tails are evicted before the beginnings.
        for i in range(len(sequence.blocks) - 1, -1, -1):
            block = sequence.blocks[i]
            stored = path[i] if i < len(path) else block
            self._use.unreference(block, ended=ended)
            if stored is not block and stored.ref_count == 0:
                self._use.touch(stored, ended=ended)
        self._sequences.remove(sequence)
        sequence.blocks = []

    def stored_blocks(self) -> list[Block]:
        """Every block that can be found, parents before children; for tests and tools."""
        return list(self._store)

    def check_integrity(self) -> None:
        """Assert every invariant of the pools and the tree; for tests and idle moments."""
        check_blocks(
            self.stored_blocks(),
            [(sequence.blocks, sequence.num_stored) for sequence in self._sequences],
            self._tiers,
            num_used_blocks=self.num_used_blocks,
            tokens_per_block=self.tokens_per_block,
        )
