"""The tree of a mirrored KV cache: which tokens hang under which, and in which tier they are.

Owns the nodes, their names and their counts; who is to be told of a change is kv_mirror.py's.

Facts it rests on: a block is found under its parent by exactly the tokens it holds, and only a
block of `tokens_per_block` tokens has others below it. Events tell which LoRA adapter a block was
computed with, so each has a root of its own. They carry no salt, so equal tokens under one parent
may be there twice, for two salts; the least favourable counts. Blocks that share a beginning with
the tokens and then differ are left out, although an engine may reuse a part of one: less than a
block is understated.

Invariant: a root is kept while a block hangs below it or somebody watches there, and no longer:
clients may name any number of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenflow.executor.kv_api import DEVICE_LEVEL, HOST_LEVEL, KvLocation
from tokenflow.kv_watches import Watches

TokenKey = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A block, or the root. children: blocks below by their tokens, several for several salts.
    child_lengths: how many children there are of each number of tokens. watches: who looks for
    something right below it; None while nobody ever did."""

    block_hash: int | None
    parent: Node | None
    tokens: TokenKey = ()
    level: int = DEVICE_LEVEL
    has_host_copy: bool = False
    children: dict[TokenKey, list[Node]] = field(default_factory=dict)
    child_lengths: dict[int, int] = field(default_factory=dict)
    watches: Watches | None = None

    def subtree(self, seen: set[Node]) -> Iterator[Node]:
        """It and all below it, without what hangs below a block that is in `seen`; adds to that."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                yield node
                for twins in node.children.values():
                    stack += twins


@dataclass(eq=False, slots=True)
class Root(Node):
    """What a LoRA adapter computed hangs below it; None: what was computed without one."""

    lora_id: int | None = None


class MirrorTree:
    """Blocks by their names and by their tokens.

    num_device_blocks, num_host_blocks: blocks on the device, and on the host only.
    num_copied_blocks: those on the device that have a copy on the host.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._nodes: dict[int, Node] = {}
        self._num_blocks = [0, 0]
        self._roots: dict[int | None, Root] = {}
        self.num_copied_blocks = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_device_blocks(self) -> int:
        """See the class."""
        return self._num_blocks[DEVICE_LEVEL]

    @property
    def num_host_blocks(self) -> int:
        """See the class."""
        return self._num_blocks[HOST_LEVEL]

    def root_of(self, lora_id: int | None) -> Root:
        """The root of an adapter. A new one is kept from its first block or watch on."""
        return self._roots.get(lora_id) or Root(None, None, lora_id=lora_id)

    def keep_or_drop(self, node: Node) -> None:
        """A block below `node`, or a watch there, is new or gone: a root is kept for either."""
        if not isinstance(node, Root):
            return
        if node.children or node.watches:
            self._roots[node.lora_id] = node
        else:
            self._roots.pop(node.lora_id, None)

    def get(self, block_hash: int) -> Node | None:
        """The block of that name."""
        return self._nodes.get(block_hash)

    def add(self, block_hash: int, parent: Node, tokens: TokenKey, level: int) -> Node:
        """A block that was not there."""
        node = Node(block_hash, parent, tokens, level)
        self._nodes[block_hash] = node
        self._num_blocks[level] += 1
        parent.children.setdefault(tokens, []).append(node)
        parent.child_lengths[len(tokens)] = parent.child_lengths.get(len(tokens), 0) + 1
        self.keep_or_drop(parent)
        return node

    def remove(self, node: Node) -> list[Node]:
        """A block goes, with all that hangs below it; returns them all."""
        parent, length = node.parent, len(node.tokens)
        assert parent is not None
        twins = parent.children[node.tokens]
        twins.remove(node)
        if not twins:
            del parent.children[node.tokens]
        parent.child_lengths[length] -= 1
        if not parent.child_lengths[length]:
            del parent.child_lengths[length]
        self.keep_or_drop(parent)
        gone = list(node.subtree(set()))
        for block in gone:
            assert block.block_hash is not None
            del self._nodes[block.block_hash]
            self._num_blocks[block.level] -= 1
            self.num_copied_blocks -= block.has_host_copy
        return gone

    def set_level(self, node: Node, level: int) -> None:
        """The block is in that tier."""
        if level != DEVICE_LEVEL:
            self.set_host_copy(node, False)  # a copy is something that the device has too
        self._num_blocks[node.level] -= 1
        self._num_blocks[level] += 1
        node.level = level

    def set_host_copy(self, node: Node, has_host_copy: bool) -> None:
        """The block, on the device, has a copy on the host, or not."""
        self.num_copied_blocks += has_host_copy - node.has_host_copy
        node.has_host_copy = has_host_copy

    def follow(
        self, token_ids: Sequence[int], lora_id: int | None = None
    ) -> tuple[KvLocation, list[Node], TokenKey]:
        """Where the KV of the beginning of `token_ids` is, the last whole blocks of the way (one
        for each salt) and the tokens that were looked for below them."""
        size = self._tokens_per_block
        nodes: list[Node] = [self.root_of(lora_id)]
        start = 0
        counter = _LocationCounter()
        while True:
            key = tuple(token_ids[start : start + size])
            if len(key) < size:
                break
            found = [node.children.get(key, ()) for node in nodes]
            if not all(found):
                break
            nodes = [child for children in found for child in children]
            counter.add(nodes)
            start += size
        last = [_last_blocks(node, key) for node in nodes]
        length = min(len(twins[0].tokens) if twins else 0 for twins in last)
        counter.add([node for twins in last for node in twins] if length else [])
        return counter.location(start + length), nodes, key


class _LocationCounter:
    """Adds up the blocks of a way, the least favourable of those that stand for one position."""

    def __init__(self) -> None:
        self._num_device = self._num_host = self._num_copied = 0

    def add(self, nodes: Sequence[Node]) -> None:
        """The blocks of the next position."""
        if not nodes:
            return
        if any(node.level != DEVICE_LEVEL for node in nodes):
            self._num_host += 1
        elif not self._num_host:
            if self._num_copied == self._num_device:
                self._num_copied += all(node.has_host_copy for node in nodes)
            self._num_device += 1

    def location(self, num_tokens: int) -> KvLocation:
        """The sum."""
        return KvLocation(
            num_tokens=num_tokens,
            num_device_blocks=self._num_device,
            num_host_blocks=self._num_host,
            num_copied_blocks=self._num_copied,
        )


def _last_blocks(node: Node, key: TokenKey) -> list[Node]:
    """The longest blocks under `node` whose tokens begin `key`."""
    for length in sorted(node.child_lengths, reverse=True):
        if length <= len(key):
            twins = node.children.get(key[:length])
            if twins:
                return twins
    return []
