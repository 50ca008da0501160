"""Paged KV bookkeeping: who uses which block, and what can be reused.

Owns the sequences and the reference counts. What can be found is in block_store.py; where a block
lies, on the device or on the host, and who gives up its place is tiers.py's. Moves no data: copies
are recorded and made by `run_moves`, before anything else is computed; because every copy reads
what the block held when it was recorded, a source may be given away afterwards.

A device block is *used* (referenced by a sequence), *cached* (unreferenced, findable), *in transit*
(the target of a copy beside the steps) or *free*; together they are the pool, and all but the used
ones can be allocated: `num_free_blocks`.

What is stored for reuse (TensorRT-LLM, restated): a block as soon as it is full and computed, and
at the end of a sequence (finish, cancel, internal pause) everything computed, partial last block
included. Never more than was computed: a cancel in mid-prefill stores only the finished chunks (the
1.2 line of TensorRT-LLM stores the rest as well, and later reads garbage). The KV of the last
sampled token does not exist, so it is never stored. After a failed step nothing more is stored.

Two departures, both in what is kept and never in what is correct:
- A partly matching unreferenced leaf is taken over in place only if what it holds beyond the match
  is what the new sequence computes anyway, or if no other block is left; otherwise it is copied.
  TensorRT-LLM always takes it over, which would ruin the cached tail of a paused stream as soon as
  a newcomer shares its first tokens.
- A running sequence whose next full block duplicates a stored one stores that and the following
  blocks only at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tokenflow.executor.api import (
    KvCacheConfig,
    KvCacheMetrics,
    KvCacheRetentionConfig,
    KvCacheStats,
)
from tokenflow.executor.kv_api import KvLocation, KvTierStats
from tokenflow.inflight.block_store import BlockStore, SequenceBlocks
from tokenflow.inflight.kv_events import KvEvents
from tokenflow.inflight.kv_integrity import check_blocks
from tokenflow.inflight.pools import num_pool_blocks
from tokenflow.inflight.retention import Expiry, mark_decode_block, mark_prompt_block
from tokenflow.inflight.reuse_tree import Block, Match
from tokenflow.inflight.runner import BlockCopy
from tokenflow.inflight.tiers import BlockTiers, HostTier

_WANTED_S = 10.0
"""What was brought back ahead of need and is not used for so long is like any other block again."""


class KvCacheManager:
    """Allocates, shares and stores blocks. Used from one thread."""

    def __init__(
        self, config: KvCacheConfig, tokens_per_block: int, host: HostTier | None = None
    ) -> None:
        """host: the host pool; None = device only. Raises ConfigError for a device pool that this
        engine cannot have."""
        self._config = config
        self.tokens_per_block = tokens_per_block
        self.num_total_blocks = num_pool_blocks(config, tokens_per_block)
        self.num_used_blocks = 0
        self.events: KvEvents | None = None
        if config.event_buffer_max_size and config.enable_block_reuse:
            num_host_blocks = host.num_blocks if host else 0
            self.events = KvEvents(
                config.event_buffer_max_size, self.num_total_blocks, num_host_blocks
            )
        self._store = BlockStore(config, tokens_per_block, self.events)
        self._tiers = BlockTiers(self.num_total_blocks, host, self._store)
        self._expiry = Expiry(self._on_priority)
        self._sequences: set[SequenceBlocks] = set()
        self._bad: list[Block] = []
        self._damaged: set[SequenceBlocks] = set()
        self._wanted: deque[tuple[float, list[Block]]] = deque()
        self._now = 0.0
        self._tick = 0
        self._num_alloc_total = self._num_alloc_new = self._num_reused = self._num_missed = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: unreferenced ones, cached ones included."""
        return self.num_total_blocks - self.num_used_blocks

    @property
    def has_flights(self) -> bool:
        """True while copies run beside the steps."""
        return self._tiers.has_flights

    def begin(self, now: float) -> None:
        """A boundary at instant `now`: copies that are complete count, retention may be over."""
        self._now = now
        self._expiry.refresh(now)
        self._tiers.settle()
        while self._wanted and self._wanted[0][0] < now - _WANTED_S:
            for block in self._wanted.popleft()[1]:
                block.is_wanted = False
                self._tiers.offer(block)

    def flush_events(self) -> None:
        """Make the events so far visible."""
        if self.events is not None:
            self.events.flush()

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
        match = self._match_landed(token_ids, cache_salt_id)
        num_blocks = self.num_blocks_for(len(token_ids))
        num_revived = sum(block.ref_count == 0 for block in match.blocks)
        if num_revived + num_blocks - len(match.blocks) > self.num_free_blocks:
            return None
        for block in match.blocks:
            self._acquire(block)
        num_alloc_before = self._num_alloc_total
        num_onboarded = self._bring_back(match)
        blocks = list(match.blocks)
        num_copied, num_partial_tokens = num_onboarded, 0
        if match.partial is not None and self._may_reuse(match.partial):
            num_onboarded += match.partial.slot is None
            before = self._num_alloc_total
            blocks.append(self._reuse_partly(match.partial, match, token_ids))
            num_copied += self._num_alloc_total - before
            num_partial_tokens = match.num_partial_tokens
        num_reused = len(blocks)
        while len(blocks) < num_blocks:
            blocks.append(self._take())
        for i, block in enumerate(blocks):
            self._mark(block, i, retention)
        num_alloc = self._num_alloc_total - num_alloc_before
        self._num_reused += num_reused
        self._num_missed += num_blocks - num_reused
        self._num_alloc_new += num_alloc - num_copied
        sequence = SequenceBlocks(
            blocks,
            cache_salt_id,
            retention,
            len(match.blocks) * self.tokens_per_block + num_partial_tokens,
            num_onboarded,
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
            block = self._take()
            mark_decode_block(block, sequence.retention)
            sequence.blocks.append(block)
            self._num_alloc_new += 1
        return True

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

    def discard(self, sequence: SequenceBlocks) -> None:
        """End of a sequence whose last step failed: store nothing more."""
        self._drop(sequence, [], ended=True)

    # -- copies --------------------------------------------------------------------------------

    def run_moves(self, copy_blocks: Callable[[Sequence[BlockCopy]], None]) -> Exception | None:
        """Make the copies that the step needs; `copy_blocks` makes those inside the device. Returns
        what it raised. Sequences whose content did not arrive are in `take_damaged` afterwards."""
        bad_device, bad_host, failure = self._tiers.run_moves(copy_blocks)
        if bad_device or bad_host:
            self._bad += [
                block
                for block in self._store
                if block.slot in bad_device or (block.slot is None and block.host_slot in bad_host)
            ]
            self._damaged = {
                sequence
                for sequence in self._sequences
                if any(block.slot in bad_device for block in sequence.blocks)
            }
        return failure

    def take_damaged(self) -> set[SequenceBlocks]:
        """Sequences with a block that should have been filled by a copy that failed. They are to be
        discarded; then `forget_bad` is due."""
        damaged, self._damaged = self._damaged, set()
        return damaged

    def forget_bad(self) -> None:
        """Take out of the tree what copies that failed should have filled. Nobody may reference it
        any more."""
        bad, self._bad = self._bad, []
        for block in bad:
            if block.parent is not None:  # else it went with a block above it
                self._tiers.forget(block)

    # -- tiers ---------------------------------------------------------------------------------

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """See `kv_api.KvTiering`."""
        match = self._store.match(token_ids, cache_salt_id)
        path = match.path
        device = [block for block in path if block.slot is not None]
        num_copied = next(
            (i for i, block in enumerate(device) if block.host_slot is None), len(device)
        )
        return KvLocation(
            num_tokens=len(match.blocks) * self.tokens_per_block + match.num_partial_tokens,
            num_device_blocks=len(device),
            num_host_blocks=len(path) - len(device),
            num_copied_blocks=num_copied,
        )

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """See `kv_api.KvTiering`; only between steps."""
        match = self._store.match(token_ids, cache_salt_id)
        self._tiers.offload_ahead(match.path, max_blocks)

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See `kv_api.KvTiering`; only between steps."""
        path = self._store.match(token_ids, cache_salt_id).path
        there = [block for block in path if block.slot is not None]
        for block in there:
            block.ref_count += 1  # so that room for the rest is not taken from them
        self._tiers.onboard_ahead(path)
        self._wanted.append((self._now, path))
        for block in reversed(there):
            block.ref_count -= 1
            if not block.ref_count:
                self._touch(block, ended=False)

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See `kv_api.KvTiering`; only between steps."""
        match = self._store.match(token_ids, cache_salt_id)
        path = match.path if self._covers_partial(match, token_ids) else match.blocks
        self._tiers.give_up(path)

    # -- figures -------------------------------------------------------------------------------

    def stats(self) -> KvCacheStats:
        """Figures as TensorRT-LLM counts them (see KvCacheStats). alloc_total: blocks taken from
        the pool, alloc_new: those of them that were not filled by a copy; reused/missed: prompt
        blocks found (also in part) or not."""
        looked_up = self._num_reused + self._num_missed
        return KvCacheStats(
            max_num_blocks=self.num_total_blocks + self._tiers.num_host_blocks,
            free_num_blocks=self.num_free_blocks,
            used_num_blocks=self.num_used_blocks + self._tiers.num_host_blocks,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=self._num_alloc_total,
            alloc_new_blocks=self._num_alloc_new,
            reused_blocks=self._num_reused,
            missed_blocks=self._num_missed,
            cache_hit_rate=self._num_reused / looked_up if looked_up else 0.0,
        )

    def tier_stats(self) -> KvTierStats:
        """Both tiers now."""
        return self._tiers.stats(self.num_used_blocks)

    # -- internals -----------------------------------------------------------------------------

    def _match_landed(self, token_ids: Sequence[int], cache_salt_id: int | None) -> Match:
        """A match without a block that is on its way to the device, or whose end may be taken over
        while it is read: such copies are waited for."""
        while True:
            match = self._store.match(token_ids, cache_salt_id)
            waits = any(block.in_transit and block.slot is None for block in match.blocks)
            if not waits and not (match.partial and match.partial.in_transit):
                return match
            self._tiers.land_all()

    def _bring_back(self, match: Match) -> int:
        """Device slots for those of referenced blocks that are on the host; how many those were."""
        num_onboarded, partial = 0, match.partial
        if partial is not None:
            partial.ref_count += 1  # room is not to be made of what is needed next
        for block in match.blocks:
            if block.slot is None:
                self._tiers.bring_back(block)
                self._num_alloc_total += 1
                num_onboarded += 1
        if partial is not None:
            partial.ref_count -= 1
            self._tiers.offer(partial)
        return num_onboarded

    def _may_reuse(self, source: Block) -> bool:
        """False for a block that would have to be copied into the room that it takes itself."""
        return self.num_free_blocks > 1 or source.slot is None or source.is_unused_leaf

    def _reuse_partly(self, source: Block, match: Match, token_ids: Sequence[int]) -> Block:
        """A block of the new sequence that starts with the partly matching tokens of `source`."""
        nothing_lost = self._covers_partial(match, token_ids)
        must_take_over = self.num_free_blocks < 2 or not self._config.copy_on_partial_reuse
        on_device = source.slot is not None
        if source.is_unused_leaf and (nothing_lost or (must_take_over and on_device)):
            self._take_over(source)
            return source
        source.ref_count += 1  # so that taking the target does not evict it
        target = self._take()
        self._tiers.copy_tokens(source, target, match.num_partial_tokens)
        source.ref_count -= 1
        if not source.ref_count:
            self._touch(source, ended=source.ended)
        return target

    def _covers_partial(self, match: Match, token_ids: Sequence[int]) -> bool:
        """True if the partly matching block holds only tokens of `token_ids`: else it is also, or
        only, somebody else's."""
        if match.partial is None:
            return True
        start = len(match.blocks) * self.tokens_per_block
        ours = tuple(token_ids[start : start + len(match.partial.token_ids)])
        return ours == match.partial.token_ids

    def _take_over(self, block: Block) -> None:
        """An unreferenced leaf becomes a sequence's own, to be written on."""
        self._store.remove(block)
        self._acquire(block)
        if block.slot is None:
            self._tiers.bring_back(block)
            self._num_alloc_total += 1
        else:
            self._tiers.release_host(block)

    def _take(self) -> Block:
        """A referenced block without content."""
        block = Block(self._tiers.take_device())
        self._num_alloc_total += 1
        self._acquire(block)
        return block

    def _acquire(self, block: Block) -> None:
        if block.ref_count == 0:
            self.num_used_blocks += 1
        block.ref_count += 1
        block.is_wanted = False

    def _unreference(self, block: Block, *, ended: bool) -> None:
        block.ref_count -= 1
        if block.ref_count:
            return
        self.num_used_blocks -= 1
        if block.is_stored:
            self._touch(block, ended=ended)
        else:
            self._tiers.free_device(block)

    def _touch(self, block: Block, *, ended: bool) -> None:
        self._tick += 1
        block.last_use = self._tick
        block.ended = ended
        self._expiry.released(block, self._now)
        self._tiers.offer(block)

    def _mark(self, block: Block, index: int, retention: KvCacheRetentionConfig | None) -> None:
        old = block.priority
        mark_prompt_block(block, index * self.tokens_per_block, retention)
        if block.is_stored and block.priority != old:
            self._on_priority(block, old)

    def _on_priority(self, block: Block, old: int) -> None:
        self._store.priority_changed(block, old)
        self._tiers.offer(block)

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
