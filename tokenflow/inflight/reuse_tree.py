"""Blocks, and the tree of reusable blocks.

Owns the shape of the tree and nothing else: who references a block and which slots are free belongs
to kv_cache.py and tiers.py. The tree is keyed as TensorRT-LLM keys it: a block is found under its
parent by exactly the tokens whose KV it holds, so the path from the root is the whole history; each
cache_salt_id has a root of its own, hence different salts never meet.

Invariants:
- a block under a parent holds valid KV for every token of its key, on the device, on the host or on
  both;
- only a block with `tokens_per_block` tokens has children, so a partial block is a leaf;
- a referenced block is on the device and its parent is referenced too (kv_cache.py sees to it), and
  the parent of a block that is on the device, or on its way there, is on the device (tiers.py sees
  to it): a tier is left from the leaves up, so every unreferenced block can be evicted.

A block is an identity; its slots are merely where its KV lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TokenKey = tuple[int, ...]

DEFAULT_PRIORITY = 35
"""Retention priority of a block that nobody gave one."""


class TreeNode:
    """A root, or a block: something blocks can hang under.

    num_device_children: children that are on the device or on their way there.
    depth: blocks above it.
    """

    __slots__ = ("children", "depth", "num_device_children")

    def __init__(self) -> None:
        self.children: dict[TokenKey, Block] = {}
        self.num_device_children = 0
        self.depth = 0


class Block(TreeNode):
    """KV of up to `tokens_per_block` tokens.

    slot, host_slot: device and host block that hold it; None = not there. One that is not stored
        is on the device only.
    in_transit: a copy of it to the other tier is under way.
    ref_count: sequences that use it now.
    parent, token_ids: place and key in the tree; None and () while it is not stored there.
    block_hash: name in events, set when it is stored.
    last_use, last_use_time: tick and instant of the last release; smaller is evicted earlier.
    priority: retention priority, 0..100. duration_s: for so long after a release, then the default;
        None = for good.
    ended: the request that released it last was complete.
    is_wanted: it was asked for on the device ahead of need, at wanted_time, and nobody has used it
        since.
    """

    __slots__ = (
        "block_hash",
        "duration_s",
        "ended",
        "host_slot",
        "in_transit",
        "is_wanted",
        "last_use",
        "last_use_time",
        "parent",
        "priority",
        "ref_count",
        "slot",
        "token_ids",
        "wanted_time",
    )

    def __init__(self, slot: int | None, priority: int = DEFAULT_PRIORITY) -> None:
        super().__init__()
        self.slot = slot
        self.host_slot: int | None = None
        self.in_transit = False
        self.ref_count = 0
        self.parent: TreeNode | None = None
        self.token_ids: TokenKey = ()
        self.block_hash = 0
        self.last_use = 0
        self.last_use_time = 0.0
        self.priority = priority
        self.duration_s: float | None = None
        self.ended = False
        self.is_wanted = False
        self.wanted_time = 0.0

    @property
    def device_slot(self) -> int:
        """The device block; the block must be on the device."""
        assert self.slot is not None
        return self.slot

    @property
    def is_stored(self) -> bool:
        """True while other requests can find the block."""
        return self.parent is not None

    @property
    def is_left_over(self) -> bool:
        """True for what an ended request left, nothing else is built on, and nobody gave more than
        the default priority."""
        return self.ended and not self.children and self.priority <= DEFAULT_PRIORITY

    @property
    def is_unused_leaf(self) -> bool:
        """True for an unreferenced leaf of the tree that no copy reads or writes."""
        return (
            self.parent is not None
            and self.ref_count == 0
            and not self.children
            and not self.in_transit
        )


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks that hold the beginning of some tokens.

    blocks: full blocks, to be shared by reference.
    partial: a further block whose first `num_partial_tokens` tokens match, or None.
    """

    blocks: list[Block] = field(default_factory=list)
    partial: Block | None = None
    num_partial_tokens: int = 0

    @property
    def path(self) -> list[Block]:
        """All of them, from the root down."""
        return self.blocks if self.partial is None else [*self.blocks, self.partial]


class ReuseTree:
    """Finds stored blocks by the tokens they hold."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._roots: dict[int | None, TreeNode] = {}

    def root(self, cache_salt_id: int | None) -> TreeNode:
        """The root of a salt, made on first use and dropped with its last block."""
        return self._roots.setdefault(cache_salt_id, TreeNode())

    def match(
        self,
        token_ids: Sequence[int],
        cache_salt_id: int | None,
        *,
        partial: bool,
        only_unused_partial: bool,
    ) -> Match:
        """Longest stored beginning of `token_ids`; changes nothing.

        Full blocks by exact key first; where none fits, with `partial`, the child that shares most
        leading tokens (first stored wins a tie). Matching stops after a partial match or a miss.
        """
        size = self._tokens_per_block
        node = self._roots.get(cache_salt_id)
        blocks: list[Block] = []
        while node is not None:
            start = len(blocks) * size
            key = tuple(token_ids[start : start + size])
            child = node.children.get(key) if len(key) == size else None
            if child is None:
                if not partial or not key:
                    break
                best, length = _longest_common(node, key, only_unused_partial)
                return Match(blocks, best, length)
            blocks.append(child)
            node = child
        return Match(blocks)

    def covering(self, node: TreeNode, key: TokenKey) -> Block | None:
        """The child whose KV includes that of `key`: equal to it, or longer and starting with it.

        (A child longer than `key` exists only for a partial key.)
        """
        child = node.children.get(key)
        if child is None and len(key) < self._tokens_per_block:
            for other in node.children.values():
                if other.token_ids[: len(key)] == key:
                    return other
        return child

    def insert(self, parent: TreeNode, key: TokenKey, block: Block) -> None:
        """Make `block` findable under `parent`; its KV of every token in `key` must exist."""
        assert block.parent is None
        assert key not in parent.children
        block.parent, block.token_ids = parent, key
        block.depth = parent.depth + 1
        parent.children[key] = block
        parent.num_device_children += block.slot is not None

    def remove(self, block: Block) -> TreeNode:
        """Take a leaf out of the tree; returns what was its parent."""
        parent = block.parent
        assert parent is not None
        assert not block.children
        del parent.children[block.token_ids]
        parent.num_device_children -= block.slot is not None or block.in_transit
        block.parent, block.token_ids = None, ()
        if not parent.children and not isinstance(parent, Block):
            self._roots = {salt: node for salt, node in self._roots.items() if node is not parent}
        return parent

    def __iter__(self) -> Iterator[Block]:
        """Every stored block, parents before children."""
        pending: list[TreeNode] = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield from node.children.values()
            pending.extend(node.children.values())


def _longest_common(node: TreeNode, key: TokenKey, only_unused: bool) -> tuple[Block | None, int]:
    best: Block | None = None
    best_length = 0
    for child in node.children.values():
        if only_unused and not child.is_unused_leaf:
            continue
        length = 0
        for ours, theirs in zip(key, child.token_ids, strict=False):
            if ours != theirs:
                break
            length += 1
        if length > best_length:
            best, best_length = child, length
    return best, best_length
