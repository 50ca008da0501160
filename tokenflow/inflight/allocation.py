"""Blocks for a sequence: found in the store, brought back from the host, or new.

Owns what a start and the growth of a sequence take, and the counts of it.

Two departures from TensorRT-LLM, both in what is kept and never in what is correct:
- A partly matching unreferenced leaf is taken over in place only if what it holds beyond the match
  is what the new sequence computes anyway, or if no other block is left; otherwise it is copied.
  TensorRT-LLM always takes it over, which would ruin the cached tail of a paused stream as soon as
  a newcomer shares its first tokens.
- A partly matching block on the host is copied as a whole, not only its matching tokens: a
  transfer moves blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.executor.api import KvCacheConfig, KvCacheMetrics, KvCacheRetentionConfig
from tokenflow.inflight.block_store import BlockStore, SequenceBlocks
from tokenflow.inflight.block_use import BlockUse
from tokenflow.inflight.retention import mark_decode_block
from tokenflow.inflight.reuse_tree import Block, Match
from tokenflow.inflight.tiers import BlockTiers


@dataclass(slots=True)
class AllocationCounts:
    """Blocks since the start. alloc_total: taken from the pool; alloc_new: those of them that were
    not filled by a copy; reused, missed: prompt blocks found (also in part) or not."""

    alloc_total: int = 0
    alloc_new: int = 0
    reused: int = 0
    missed: int = 0


class Allocation:
    """Gives blocks to sequences."""

    def __init__(
        self,
        store: BlockStore,
        tiers: BlockTiers,
        use: BlockUse,
        config: KvCacheConfig,
        tokens_per_block: int,
    ) -> None:
        self._store = store
        self._tiers = tiers
        self._use = use
        self._config = config
        self._tokens_per_block = tokens_per_block
        self.counts = AllocationCounts()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: unreferenced ones, cached ones included."""
        return self._tiers.num_device_blocks - self._use.num_used_blocks

    def allocate(
        self,
        token_ids: Sequence[int],
        cache_salt_id: int | None,
        retention: KvCacheRetentionConfig | None,
    ) -> SequenceBlocks | None:
        """See `KvCacheManager.allocate`."""
        num_blocks = -(-len(token_ids) // self._tokens_per_block)
        match = self._match_landed(token_ids, cache_salt_id, num_blocks)
        if match is None:
            return None
        for block in match.blocks:
            self._use.acquire(block)
        before = self.counts.alloc_total
        num_onboarded = self._bring_back(match)
        blocks, num_partial_tokens = list(match.blocks), 0
        num_copied = num_onboarded
        if match.partial is not None and self._may_reuse(match.partial):
            num_onboarded += match.partial.slot is None
            before_partial = self.counts.alloc_total
            blocks.append(self._reuse_partly(match.partial, match, token_ids))
            num_copied += self.counts.alloc_total - before_partial
            num_partial_tokens = match.num_partial_tokens
        num_reused = len(blocks)
        blocks += [self._take() for _ in range(num_blocks - num_reused)]
        for i, block in enumerate(blocks):
            self._use.mark(block, i * self._tokens_per_block, retention)
        return SequenceBlocks(
            blocks,
            cache_salt_id,
            retention,
            num_reused_tokens=len(match.blocks) * self._tokens_per_block + num_partial_tokens,
            num_onboarded_blocks=num_onboarded,
            num_stored=len(match.blocks),
            metrics=self._counted(
                self.counts.alloc_total - before, num_copied, num_reused, num_blocks - num_reused
            ),
        )

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """See `KvCacheManager.grow`."""
        num_missing = -(-num_tokens // self._tokens_per_block) - len(sequence.blocks)
        if num_missing > self.num_free_blocks:
            return False
        for _ in range(num_missing):
            block = self._take()
            mark_decode_block(block, sequence.retention)
            sequence.blocks.append(block)
            self.counts.alloc_new += 1
        return True

    def _counted(
        self, num_alloc: int, num_copied: int, num_reused: int, num_missed: int
    ) -> KvCacheMetrics:
        self.counts.reused += num_reused
        self.counts.missed += num_missed
        self.counts.alloc_new += num_alloc - num_copied
        return KvCacheMetrics(
            num_total_allocated_blocks=num_alloc,
            num_new_allocated_blocks=num_alloc - num_copied,
            num_reused_blocks=num_reused,
            num_missed_blocks=num_missed,
        )

    def _match_landed(
        self, token_ids: Sequence[int], cache_salt_id: int | None, num_blocks: int
    ) -> Match | None:
        """A match without a block that is on its way to the device, or whose end may be taken over
        while it is read: such copies are waited for, one after the other. None without room."""
        while True:
            match = self._store.match(token_ids, cache_salt_id)
            num_revived = sum(block.ref_count == 0 for block in match.blocks)
            if num_revived + num_blocks - len(match.blocks) > self.num_free_blocks:
                return None
            waits = any(block.in_transit and block.slot is None for block in match.blocks)
            if not waits and not (match.partial and match.partial.in_transit):
                return match
            self._tiers.ahead.land_first()

    def _bring_back(self, match: Match) -> int:
        """Device slots for those of referenced blocks that are on the host; how many those were."""
        partial = [] if match.partial is None else [match.partial]
        self._use.pin(partial)  # room is not to be made of what is needed next
        away = [block for block in match.blocks if block.slot is None]
        for block in away:
            self._tiers.bring_back(block)
        self._use.unpin(partial)
        self.counts.alloc_total += len(away)
        return len(away)

    def _may_reuse(self, source: Block) -> bool:
        """False for a block that would have to be copied into the room that it takes itself."""
        return self.num_free_blocks > 1 or source.slot is None or source.is_unused_leaf

    def _reuse_partly(self, source: Block, match: Match, token_ids: Sequence[int]) -> Block:
        """A block of the new sequence that starts with the partly matching tokens of `source`."""
        nothing_lost = self._store.covers_partial(match, token_ids)
        must_take_over = self.num_free_blocks < 2 or not self._config.copy_on_partial_reuse
        on_device = source.slot is not None
        if source.is_unused_leaf and (nothing_lost or (must_take_over and on_device)):
            self._take_over(source)
            return source
        self._use.pin([source])  # so that taking the target does not evict it
        target = self._take()
        self._tiers.copy_tokens(source, target, match.num_partial_tokens)
        self._use.unpin([source])
        if not source.ref_count:
            self._use.touch(source, ended=source.ended)
        return target

    def _take_over(self, block: Block) -> None:
        """An unreferenced leaf becomes a sequence's own, to be written on."""
        self._store.remove(block)
        self._use.acquire(block)
        if block.slot is None:
            self._tiers.bring_back(block)
            self.counts.alloc_total += 1
        else:
            self._tiers.release_host(block)

    def _take(self) -> Block:
        self.counts.alloc_total += 1
        return self._use.take()
