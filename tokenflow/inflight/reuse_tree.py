"""Blocks, the tree of reusable blocks, and the order in which leaves are evicted.

Owns the shape of the tree and nothing else: who references a block and which slot is free belongs
to kv_cache.py. The tree is keyed as TensorRT-LLM keys it: a block is found under its parent by
exactly the tokens whose KV it holds, so the path from the root is the whole history; each
cache_salt_id has a root of its own, hence different salts never meet.

Invariants:
- a block under a parent holds valid KV for every token of its key;
- only a block with `tokens_per_block` tokens has children, so a partial block is a leaf;
- a referenced block's parent is referenced too (kv_cache.py sees to it), therefore everything below
  an unreferenced block is unreferenced, and evicting leaves can free every unreferenced block.

A block is an identity; `slot` is merely where its KV lies on the device, so that a second tier can
move it without touching the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TokenKey = tuple[int, ...]


class TreeNode:
    """A root, or a block: something blocks can hang under."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[TokenKey, Block] = {}


class Block(TreeNode):
    """KV of up to `tokens_per_block` tokens.

    slot: device block id that holds it.
    ref_count: sequences that use it now.
    parent, token_ids: place and key in the tree; None and () while it is not stored there.
    last_use: tick of the last release; smaller is evicted earlier.
    """

    __slots__ = ("last_use", "parent", "ref_count", "slot", "token_ids")

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot
        self.ref_count = 0
        self.parent: TreeNode | None = None
        self.token_ids: TokenKey = ()
        self.last_use = 0

    @property
    def is_stored(self) -> bool:
        """True while other requests can find the block."""
        return self.parent is not None

    @property
    def is_evictable(self) -> bool:
        """True for an unreferenced leaf of the tree."""
        return self.parent is not None and self.ref_count == 0 and not self.children


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks that hold the beginning of some tokens.

    blocks: full blocks, to be shared by reference.
    partial: a further block whose first `num_partial_tokens` tokens match, or None.
    """

    blocks: list[Block] = field(default_factory=list)
    partial: Block | None = None
    num_partial_tokens: int = 0


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
        only_evictable_partial: bool,
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
                best, length = _longest_common(node, key, only_evictable_partial)
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
        parent.children[key] = block

    def remove(self, block: Block) -> TreeNode:
        """Take a leaf out of the tree; returns what was its parent."""
        parent = block.parent
        assert parent is not None
        assert not block.children
        del parent.children[block.token_ids]
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


class EvictionQueue:
    """Unreferenced leaves, least recently used first.

    A heap whose entries are checked when they come up: a block that was used, got children or left
    the tree meanwhile is passed over. Rebuilt when stale entries outnumber the live ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self._heap: list[tuple[int, int, Block]] = []
        self._num_pushed = 0
        self._limit = 4 * num_blocks + 16

    def push(self, block: Block) -> None:
        """Offer a block that has become evictable."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (block.last_use, self._num_pushed, block))
        if len(self._heap) > self._limit:
            live = {id(b): (use, n, b) for use, n, b in self._heap if _is_live(use, b)}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def pop(self) -> Block | None:
        """The least recently used evictable block, or None."""
        while self._heap:
            last_use, _, block = heapq.heappop(self._heap)
            if _is_live(last_use, block):
                return block
        return None

    def __contains__(self, block: Block) -> bool:
        return any(b is block and _is_live(use, b) for use, _, b in self._heap)


def _is_live(last_use: int, block: Block) -> bool:
    return block.last_use == last_use and block.is_evictable


def _longest_common(
    node: TreeNode, key: TokenKey, only_evictable: bool
) -> tuple[Block | None, int]:
    best: Block | None = None
    best_length = 0
    for child in node.children.values():
        if only_evictable and not child.is_evictable:
            continue
        length = 0
        for ours, theirs in zip(key, child.token_ids, strict=False):
            if ours != theirs:
                break
            length += 1
        if length > best_length:
            best, best_length = child, length
    return best, best_length
