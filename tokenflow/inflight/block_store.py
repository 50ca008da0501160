"""What can be found for reuse: the reuse tree, and the events that tell of its changes.

Owns which blocks of a sequence are stored and under which parent. Where the blocks lie is the
business of tiers.py, which says here when one moved: one place knows whether anybody listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenflow.executor.api import KvCacheConfig, KvCacheMetrics, KvCacheRetentionConfig
from tokenflow.executor.kv_api import DEVICE_LEVEL, HOST_LEVEL
from tokenflow.inflight.kv_events import KvEvents, block_hash
from tokenflow.inflight.reuse_tree import Block, Match, ReuseTree, TokenKey, TreeNode


@dataclass(eq=False, slots=True)
class SequenceBlocks:
    """The blocks of one sequence, in order.

    num_reused_tokens: tokens at the beginning whose KV was found at allocation.
    num_onboarded_blocks: of their blocks, those that came from the host.
    num_stored: leading blocks that are in the tree, each under the one before it.
    """

    blocks: list[Block]
    cache_salt_id: int | None
    retention: KvCacheRetentionConfig | None
    num_reused_tokens: int
    num_onboarded_blocks: int
    num_stored: int
    metrics: KvCacheMetrics
    _slots: tuple[int, ...] = ()

    def slots(self, num_blocks: int) -> tuple[int, ...]:
        """Device block ids of the first `num_blocks` blocks. A block keeps its own while somebody
        uses it, so they are looked up once."""
        num_known = len(self._slots)
        if num_blocks < num_known:
            return self._slots[:num_blocks]
        if num_blocks > num_known:
            self._slots += tuple(b.device_slot for b in self.blocks[num_known:num_blocks])
        return self._slots


class BlockStore:
    """Finds, stores and forgets blocks. events: None = nobody is told."""

    def __init__(
        self, config: KvCacheConfig, tokens_per_block: int, events: KvEvents | None
    ) -> None:
        self._config = config
        self._tokens_per_block = tokens_per_block
        self._tree = ReuseTree(tokens_per_block)
        self.events = events

    def __iter__(self) -> Iterator[Block]:
        """Every stored block, parents before children."""
        return iter(self._tree)

    def match(self, token_ids: Sequence[int], cache_salt_id: int | None) -> Match:
        """What is stored of the beginning of `token_ids`. The last token is never looked up: it has
        to be computed for the next one to be sampled."""
        if not self._config.enable_block_reuse:
            return Match()
        return self._tree.match(
            token_ids[:-1],
            cache_salt_id,
            partial=self._config.enable_partial_reuse,
            only_unused_partial=not self._config.copy_on_partial_reuse,
        )

    def covers_partial(self, match: Match, token_ids: Sequence[int]) -> bool:
        """True if the partly matching block of `match` holds only tokens of `token_ids`: else it is
        also, or only, somebody else's."""
        if match.partial is None:
            return True
        start = len(match.blocks) * self._tokens_per_block
        ours = tuple(token_ids[start : start + len(match.partial.token_ids)])
        return ours == match.partial.token_ids

    def store_full_blocks(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Make the full blocks among the first `num_computed` tokens findable by others."""
        size = self._tokens_per_block
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
            self._insert(parent, key, sequence.blocks[i], sequence.cache_salt_id)
            sequence.num_stored += 1

    def store_all(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int
    ) -> Iterator[tuple[Block, bool]]:
        """Store what is not stored yet, for a sequence that ends.

        Yields, for each of its blocks from the first on that holds computed tokens, the block of
        the tree that stands for it, and whether that one holds just as much (it may be another one,
        with the same tokens or more). Blocks are stored under it, so whoever iterates sees to it in
        between that it is on the device.
        """
        if not self._config.enable_block_reuse or not num_computed:
            return  # a root without blocks would stay for ever
        size = self._tokens_per_block
        node = self._tree.root(sequence.cache_salt_id)
        for i, block in enumerate(sequence.blocks[: -(-num_computed // size)]):
            key = tuple(token_ids[i * size : min((i + 1) * size, num_computed)])
            stored = block if i < sequence.num_stored else self._tree.covering(node, key)
            if stored is None:
                self._insert(node, key, block, sequence.cache_salt_id)
                stored = block
            yield stored, stored.token_ids == key
            node = stored

    def remove(self, block: Block) -> TreeNode:
        """Take a leaf out of the tree; returns what was its parent."""
        if self.events is not None:
            self.events.record_removed(block)
        return self._tree.remove(block)

    def moved_to_host(self, block: Block) -> None:
        """`block` is on the host only from now on."""
        if self.events is not None:
            self.events.record_level(block, DEVICE_LEVEL, HOST_LEVEL)

    def moved_to_device(self, block: Block) -> None:
        """`block`, which was on the host only, is on the device, perhaps with a copy left there."""
        if self.events is not None and block.is_stored:
            self.events.record_level(block, HOST_LEVEL, DEVICE_LEVEL)
            if block.host_slot is not None:
                self.events.record_host_copy(block)

    def copied(self, block: Block) -> None:
        """`block`, on the device, got or lost its copy on the host."""
        if self.events is not None and block.is_stored:
            self.events.record_host_copy(block)

    def priority_changed(self, block: Block, old: int) -> None:
        """Its retention priority was `old`."""
        if self.events is not None and block.is_stored:
            self.events.record_priority(block, old)

    def _insert(
        self, parent: TreeNode, key: TokenKey, block: Block, cache_salt_id: int | None
    ) -> None:
        self._tree.insert(parent, key, block)
        block.block_hash = block_hash(parent, key, cache_salt_id)
        if self.events is not None:
            self.events.record_stored(block, DEVICE_LEVEL)
