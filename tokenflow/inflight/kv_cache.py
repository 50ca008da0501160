"""Paged KV bookkeeping over one device tier: who uses which block, and what can be reused.

Owns the free slots, the reference counts and the reuse tree (reuse_tree.py). Moves no data: block
copies are handed to the runner through `take_copies`, in the order in which they must run, before
anything else is computed. Because every copy reads what the block held when it was recorded, a
source may be given away afterwards.

A block is *used* (referenced by a sequence), *cached* (unreferenced, findable) or *free*; the three
always add up to the pool, and every cached block can be had by evicting leaves, so
`num_free_blocks = cached + free` blocks can always be allocated.

What is stored for reuse (TensorRT-LLM, restated): a block as soon as it is full and computed, and
at the end of a sequence (finish, cancel, internal pause) everything computed, partial last block
included. Never more than was computed: a cancel in mid-prefill stores only the finished chunks (the
1.2 line of TensorRT-LLM stores the rest as well, and later reads garbage). The KV of the last
sampled token does not exist, so it is never stored. After a failed step nothing more is stored.

Three departures, all in what is kept and never in what is correct:
- What was cut short is evicted after everything that has ended: if it was a pause, it is needed
  again for certain. A client's cancel looks the same from here and is kept as long, oldest first.
  TensorRT-LLM evicts both by retention priority, then by last use.
- A partly matching unreferenced leaf is taken over in place only if what it holds beyond the match
  is what the new sequence computes anyway, or if no other block is left; otherwise it is copied.
  TensorRT-LLM always takes it over, which would ruin the cached tail of a paused stream as soon as
  a newcomer shares its first tokens.
- A running sequence whose next full block duplicates a stored one stores that and the following
  blocks only at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.errors import InternalError
from tokenflow.executor.api import KvCacheConfig, KvCacheMetrics, KvCacheStats
from tokenflow.inflight.admission import num_pool_blocks
from tokenflow.inflight.reuse_tree import Block, EvictionQueue, Match, ReuseTree, TreeNode
from tokenflow.inflight.runner import BlockCopy

_TO_BE_CONTINUED = 1 << 48
"""Added to the tick of what was cut short: it is evicted after everything that has ended."""


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The blocks of one sequence, in order.

    num_reused_tokens: tokens at the beginning whose KV was found at allocation.
    num_stored: leading blocks that are in the tree, each under the one before it.
    """

    blocks: list[Block]
    cache_salt_id: int | None
    num_reused_tokens: int
    num_stored: int
    metrics: KvCacheMetrics

    def slots(self, num_blocks: int) -> list[int]:
        """Device block ids of the first `num_blocks` blocks."""
        return [block.slot for block in self.blocks[:num_blocks]]


class KvCacheManager:
    """Allocates, shares, stores and evicts blocks. Used from one thread."""

    def __init__(self, config: KvCacheConfig, tokens_per_block: int) -> None:
        """Raises ConfigError for a pool that this engine cannot have."""
        self._config = config
        self.tokens_per_block = tokens_per_block
        self.num_total_blocks = num_pool_blocks(config, tokens_per_block)
        self.num_used_blocks = 0
        self._free_slots = list(range(self.num_total_blocks - 1, -1, -1))
        self._tree = ReuseTree(tokens_per_block)
        self._evictable = EvictionQueue(self.num_total_blocks)
        self._sequences: set[SequenceBlocks] = set()
        self._copies: list[BlockCopy] = []
        self._tick = 0
        self._num_alloc_total = self._num_alloc_new = self._num_reused = self._num_missed = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: unreferenced ones, cached ones included."""
        return self.num_total_blocks - self.num_used_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def allocate(
        self, token_ids: Sequence[int], cache_salt_id: int | None = None
    ) -> SequenceBlocks | None:
        """Blocks for all of `token_ids` (at least one), the beginning reused where it is cached.

        The last token is never looked up: it has to be computed for the next one to be sampled.
        Returns None when there is no room; then nothing has changed.
        """
        match = self._match(token_ids, cache_salt_id)
        num_blocks = self.num_blocks_for(len(token_ids))
        num_revived = sum(block.ref_count == 0 for block in match.blocks)
        if num_revived + num_blocks - len(match.blocks) > self.num_free_blocks:
            return None
        for block in match.blocks:
            self._acquire(block)
        blocks = list(match.blocks)
        num_alloc_before = self._num_alloc_total
        num_copied = 0
        if match.partial is not None:
            block = self._reuse_partly(match.partial, match.num_partial_tokens, token_ids, match)
            num_copied = self._num_alloc_total - num_alloc_before
            blocks.append(block)
        num_reused = len(blocks)
        while len(blocks) < num_blocks:
            blocks.append(self._take())
        num_alloc = self._num_alloc_total - num_alloc_before
        self._num_reused += num_reused
        self._num_missed += num_blocks - num_reused
        self._num_alloc_new += num_alloc - num_copied
        sequence = SequenceBlocks(
            blocks,
            cache_salt_id,
            len(match.blocks) * self.tokens_per_block + match.num_partial_tokens,
            len(match.blocks),
            KvCacheMetrics(
                num_total_allocated_blocks=num_alloc,
                num_new_allocated_blocks=num_alloc - num_copied,
                num_reused_blocks=num_reused,
                num_missed_blocks=num_blocks - num_reused,
            ),
        )
        self._sequences.add(sequence)
        return sequence

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Add blocks until `num_tokens` tokens fit; False (and nothing changed) without room."""
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.blocks)
        if num_missing > self.num_free_blocks:
            return False
        for _ in range(num_missing):
            sequence.blocks.append(self._take())
            self._num_alloc_new += 1
        return True

    def store_full_blocks(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Make the full blocks among the first `num_computed` tokens findable by others."""
        size = self.tokens_per_block
        if not self._config.enable_block_reuse:
            return
        while sequence.num_stored < num_computed // size:
            i = sequence.num_stored
            parent = sequence.blocks[i - 1] if i else self._tree.root(sequence.cache_salt_id)
            key = tuple(token_ids[i * size : (i + 1) * size])
            if key in parent.children:
                # Hanging our next blocks under a block that we don't reference would let an
                # unreferenced block have referenced children: it could not be evicted.
                return
            self._tree.insert(parent, key, sequence.blocks[i])
            sequence.num_stored += 1

    def release(
        self,
        sequence: SequenceBlocks,
        token_ids: Sequence[int],
        num_computed: int,
        *,
        ended: bool = False,
    ) -> None:
        """End of a sequence: keep the KV of its first `num_computed` tokens for reuse.

        ended: the request is complete; what was cut short (cancel, internal pause) is kept longer.
        """
        path: list[Block] = []
        if self._config.enable_block_reuse and num_computed:
            path = self._store_all(sequence, token_ids, num_computed)
        self._drop(sequence, path, ended)

    def discard(self, sequence: SequenceBlocks) -> None:
        """End of a sequence whose last step failed: store nothing more."""
        self._drop(sequence, [], ended=True)

    def take_copies(self) -> list[BlockCopy]:
        """Copies recorded since the last call; to be run in order before the next step."""
        copies, self._copies = self._copies, []
        return copies

    def stats(self) -> KvCacheStats:
        """Pool figures. alloc_total: blocks taken from the pool, alloc_new: those of them that were
        not filled by a copy; reused/missed: prompt blocks found (also in part) or not."""
        looked_up = self._num_reused + self._num_missed
        return KvCacheStats(
            max_num_blocks=self.num_total_blocks,
            free_num_blocks=self.num_free_blocks,
            used_num_blocks=self.num_used_blocks,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=self._num_alloc_total,
            alloc_new_blocks=self._num_alloc_new,
            reused_blocks=self._num_reused,
            missed_blocks=self._num_missed,
            cache_hit_rate=self._num_reused / looked_up if looked_up else 0.0,
        )

    def _match(self, token_ids: Sequence[int], cache_salt_id: int | None) -> Match:
        if not self._config.enable_block_reuse:
            return Match()
        return self._tree.match(
            token_ids[:-1],
            cache_salt_id,
            partial=self._config.enable_partial_reuse,
            only_evictable_partial=not self._config.copy_on_partial_reuse,
        )

    def _reuse_partly(
        self, source: Block, num_tokens: int, token_ids: Sequence[int], match: Match
    ) -> Block:
        """A block of the new sequence that starts with `num_tokens` tokens of `source`."""
        start = len(match.blocks) * self.tokens_per_block
        ours = tuple(token_ids[start : start + len(source.token_ids)])
        nothing_lost = ours == source.token_ids
        must_take_over = self.num_free_blocks < 2 or not self._config.copy_on_partial_reuse
        if source.is_evictable and (nothing_lost or must_take_over):
            self._tree.remove(source)
            self._acquire(source)
            return source
        self._acquire(source)  # so that taking the target does not evict it
        target = self._take()
        self._copies.append(BlockCopy(source.slot, target.slot, num_tokens))
        self._unreference(source, ended=source.last_use < _TO_BE_CONTINUED)
        return target

    def _take(self) -> Block:
        """A referenced block without content, evicting a leaf if no slot is free."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            victim = self._evictable.pop()
            if victim is None:
                raise InternalError("no block can be evicted although some are unreferenced")
            self._offer(self._tree.remove(victim))
            slot = victim.slot
        block = Block(slot)
        self._num_alloc_total += 1
        self._acquire(block)
        return block

    def _acquire(self, block: Block) -> None:
        if block.ref_count == 0:
            self.num_used_blocks += 1
        block.ref_count += 1

    def _unreference(self, block: Block, *, ended: bool) -> None:
        block.ref_count -= 1
        if block.ref_count:
            return
        self.num_used_blocks -= 1
        if block.is_stored:
            self._touch(block, ended=ended)
        else:
            self._free_slots.append(block.slot)

    def _touch(self, block: Block, *, ended: bool) -> None:
        self._tick += 1
        block.last_use = self._tick + (0 if ended else _TO_BE_CONTINUED)
        self._offer(block)

    def _offer(self, node: TreeNode) -> None:
        if isinstance(node, Block) and node.is_evictable:
            self._evictable.push(node)

    def _store_all(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int
    ) -> list[Block]:
        """Store what is not stored yet; returns the tree's block for each position."""
        size = self.tokens_per_block
        node = self._tree.root(sequence.cache_salt_id)
        path: list[Block] = []
        for i, block in enumerate(sequence.blocks[: self.num_blocks_for(num_computed)]):
            key = tuple(token_ids[i * size : min((i + 1) * size, num_computed)])
            stored = block if i < sequence.num_stored else self._tree.covering(node, key)
            if stored is None:
                self._tree.insert(node, key, block)
                stored = block
            path.append(stored)
            node = stored
        return path

    def _drop(self, sequence: SequenceBlocks, path: list[Block], ended: bool) -> None:
        # Last block first: it gets the oldest tick, so tails are evicted before the beginnings.
        for i in range(len(sequence.blocks) - 1, -1, -1):
            block = sequence.blocks[i]
            stored = path[i] if i < len(path) else block
            self._unreference(block, ended=ended)
            if stored is not block and stored.ref_count == 0:
                self._touch(stored, ended=ended)
        self._sequences.remove(sequence)
        sequence.blocks = []

    def check_integrity(self) -> None:
        """Assert every invariant of the pool and the tree; for tests and idle moments."""
        stored = list(self._tree)
        counts: dict[Block, int] = dict.fromkeys(stored, 0)
        for sequence in self._sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks), "block twice in a sequence"
            for i, block in enumerate(sequence.blocks):
                counts[block] = counts.get(block, 0) + 1
                if block.is_stored:
                    assert i < sequence.num_stored, "block stored out of order"
                    assert i == 0 or block.parent is sequence.blocks[i - 1], "wrong parent"
        cached = [block for block in stored if block.ref_count == 0]
        slots = [block.slot for block in counts] + self._free_slots
        assert sorted(slots) == list(range(self.num_total_blocks)), "slot lost or owned twice"
        used = sum(count > 0 for count in counts.values())
        assert used == self.num_used_blocks
        assert len(self._free_slots) + used + len(cached) == self.num_total_blocks
        for block, count in counts.items():
            assert block.ref_count == count, "reference count differs from the references"
        for block in stored:
            parent = block.parent
            assert parent is not None
            assert parent.children[block.token_ids] is block
            if isinstance(parent, Block):
                assert len(parent.token_ids) == self.tokens_per_block, "child of a partial block"
                assert parent.ref_count or not block.ref_count, "parent of a used block unused"
            assert not block.is_evictable or block in self._evictable, "cached block lost"
