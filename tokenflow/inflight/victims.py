"""Who gives up its place in a tier next.

Owns the queues of candidates and what orders them. A tier is left from the leaves up; what is
referenced, or read or written by a copy, is no candidate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from tokenflow.inflight.reuse_tree import Block, TreeNode

VictimKey = tuple[int, ...]


class EvictionQueue:
    """Candidates, smallest key first.

    A heap whose entries are checked when they come up: one whose block is no candidate any more, or
    has another key by now, is passed over. Rebuilt when stale entries outnumber the live ones.

    key: what orders a block now, or None if it is no candidate. num_blocks: size of the tier.
    """

    def __init__(self, num_blocks: int, key: Callable[[Block], VictimKey | None]) -> None:
        self._key = key
        self._heap: list[tuple[VictimKey, int, Block]] = []
        self._num_pushed = 0
        self._limit = 4 * num_blocks + 16

    def offer(self, block: Block) -> None:
        """Take `block` in if it is a candidate; to be called whenever its key may have changed."""
        key = self._key(block)
        if key is None:
            return
        self._num_pushed += 1
        heapq.heappush(self._heap, (key, self._num_pushed, block))
        if len(self._heap) > self._limit:
            live = {id(b): (k, n, b) for k, n, b in self._heap if self._key(b) == k}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def first(self) -> Block | None:
        """The next victim, or None; it stays a candidate."""
        while self._heap:
            key, _, block = self._heap[0]
            if self._key(block) == key:
                return block
            heapq.heappop(self._heap)
        return None

    def covers(self, blocks: Iterable[Block]) -> bool:
        """True if each of `blocks` is queued, or no candidate."""
        queued = {(id(block), key) for key, _, block in self._heap}
        return all(key is None or (id(b), key) in queued for b in blocks for key in [self._key(b)])


class Victims:
    """The candidates of both tiers.

    device: cached blocks on the device. host: blocks that are on the host only. copies: host copies
    of blocks that are on the device too.
    inclusive: the host keeps copies (tiers.py). Then what an ended request left goes before what
    was cut short, of each a device block that has a copy before those that have none, and what was
    brought back ahead of need last. Otherwise the order is TensorRT-LLM's: lowest retention
    priority first, then least recently used.
    """

    def __init__(self, num_device_blocks: int, num_host_blocks: int, *, inclusive: bool) -> None:
        self._inclusive = inclusive
        self.device = EvictionQueue(num_device_blocks, self._device_key)
        self.host = EvictionQueue(num_host_blocks, self._host_key)
        self.copies = EvictionQueue(num_host_blocks, _copy_key)

    def offer(self, node: TreeNode | None) -> None:
        """The state of `node` changed: it may have become a candidate somewhere."""
        if isinstance(node, Block):
            self.device.offer(node)
            if node.host_slot is not None:
                self.host.offer(node)
                self.copies.offer(node)

    def covers(self, blocks: Sequence[Block]) -> bool:
        """True if each of `blocks` is queued wherever it is a candidate."""
        return all(queue.covers(blocks) for queue in (self.device, self.host, self.copies))

    def _device_key(self, block: Block) -> VictimKey | None:
        if (
            block.parent is None
            or block.slot is None
            or block.ref_count
            or block.num_device_children
            or block.in_transit
        ):
            return None
        if not self._inclusive:
            return (block.priority, block.last_use)
        return (
            block.is_wanted,
            not block.is_left_over,
            block.host_slot is None,
            block.priority,
            block.last_use,
        )

    def _host_key(self, block: Block) -> VictimKey | None:
        if block.slot is not None or block.host_slot is None or not block.is_unused_leaf:
            return None
        return (self._inclusive and not block.is_left_over, block.priority, block.last_use)


def _copy_key(block: Block) -> VictimKey | None:
    """Of one stream the last blocks first: a pause frees blocks from the beginning on."""
    if block.slot is None or block.host_slot is None or block.in_transit:
        return None
    return (block.priority, block.last_use, -block.depth)
