"""What an engine's KV cache holds, as told by its events.

Owns the mirror of the engine's tree of reusable blocks: which tokens hang under which, in which
tier, with a host copy or not; and the watches, which tell whose KV moved so that nobody has to look
through everybody's. Pure: no clock, no engine.

Invariants:
- after every event of an engine from its first on, the mirror holds exactly the engine's blocks
  (`is_complete`);
- events that are missing (a gap in the ids, or a stream that does not begin with Created) empty it:
  from then on it knows what it hears, which is a lower bound of what there is;
- `changed` names every watched handle whose location may differ from what `watch` returned.

Facts it rests on: a block is found under its parent by exactly the tokens it holds, and only a
block of `tokens_per_block` tokens has others below it. Events carry no salt, so equal tokens under
one parent may be there twice, for two salts; the least favourable counts. Blocks that share a
beginning with the tokens and then differ are left out, although an engine may reuse a part of one:
less than a block is understated. Events of further attention windows repeat the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenflow.executor.kv_api import (
    DEVICE_LEVEL,
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvLocation,
)
from tokenflow.kv_watches import Watches

TokenKey = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node:
    """A block, or the root. children: blocks below by their tokens, several for several salts.
    child_lengths: how many children there are of each number of tokens."""

    block_hash: int | None
    parent: _Node | None
    tokens: TokenKey = ()
    level: int = DEVICE_LEVEL
    has_host_copy: bool = False
    children: dict[TokenKey, list[_Node]] = field(default_factory=dict)
    child_lengths: dict[int, int] = field(default_factory=dict)
    watches: Watches = field(default_factory=Watches)


class KvMirror:
    """Feeds on events; `locate` says where the KV of tokens is.

    is_complete: False after a gap. num_gaps: how often events were missing.
    num_blocks_per_level: sizes of [device, host] as the engine made them; [] until it said so.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._next_id: int | None = None
        self._window: int | None = None
        self._root = _Node(None, None)
        self._nodes: dict[int, _Node] = {}
        self._anchors: dict[int, list[_Node]] = {}
        self._changed: dict[int, None] = {}
        self._touched: dict[_Node, None] = {}
        self._counts = [0, 0]
        self._num_copied = 0
        self.is_complete = False
        self.num_gaps = 0
        self.num_blocks_per_level: list[int] = []

    def __len__(self) -> int:
        """Blocks that can be found, in either tier."""
        return len(self._nodes)

    @property
    def num_device_blocks(self) -> int:
        """Blocks that can be found on the device."""
        return self._counts[DEVICE_LEVEL]

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be found on the host only."""
        return self._counts[HOST_LEVEL]

    @property
    def num_copied_blocks(self) -> int:
        """Blocks on the device that have a copy on the host."""
        return self._num_copied

    # -- events --------------------------------------------------------------------------------

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        """Take events in, in the order in which the engine gave them."""
        for event in events:
            data = event.data
            if self._window is None:
                self._window = event.window_size
            is_ours = event.window_size == self._window
            is_new_start = is_ours and isinstance(data, KVCacheCreatedData)
            if event.event_id != self._next_id and not is_new_start:
                self._forget_all()
                self.is_complete = False
            self._next_id = event.event_id + 1
            if not is_ours:
                continue
            if isinstance(data, KVCacheCreatedData):
                self._on_created(data)
            elif isinstance(data, KVCacheStoredData):
                self._on_stored(data)
            elif isinstance(data, KVCacheRemovedData):
                for block_hash in data.block_hashes:
                    self._on_removed(block_hash)
            else:
                self._on_updated(data)

    def _on_created(self, data: KVCacheCreatedData) -> None:
        """New pools hold nothing, so that from here on everything is known."""
        if self._nodes or self.num_blocks_per_level:
            self._forget_all()
        self.is_complete = True
        self.num_blocks_per_level = list(data.num_blocks_per_cache_level)

    def _on_stored(self, data: KVCacheStoredData) -> None:
        parent = self._root if data.parent_hash is None else self._nodes.get(data.parent_hash)
        for block in data.blocks:
            if parent is None:
                return  # it hangs under something that was missed
            tokens = tuple(block.tokens)
            node = self._nodes.get(block.block_hash)
            if node is not None and node.parent is parent and node.tokens == tokens:
                self._set_level(node, block.cache_level)
            else:
                self._on_removed(block.block_hash)
                node = self._add(_Node(block.block_hash, parent, tokens, block.cache_level))
            parent = node

    def _add(self, node: _Node) -> _Node:
        parent, length = node.parent, len(node.tokens)
        assert parent is not None
        assert node.block_hash is not None
        self._nodes[node.block_hash] = node
        self._counts[node.level] += 1
        twins = parent.children.setdefault(node.tokens, [])
        self._touched.update(dict.fromkeys(twins))
        twins.append(node)
        parent.child_lengths[length] = parent.child_lengths.get(length, 0) + 1
        self._note_parent(node)
        return node

    def _on_removed(self, block_hash: int) -> None:
        """The block goes with all that hangs below it, which is unreachable from now on."""
        node = self._nodes.get(block_hash)
        if node is None:
            return
        self._note_parent(node)
        for gone in _subtree(node, set()):
            assert gone.block_hash is not None
            self._changed.update(dict.fromkeys(gone.watches))
            self._touched.pop(gone, None)
            del self._nodes[gone.block_hash]
            self._counts[gone.level] -= 1
            self._num_copied -= gone.has_host_copy
        parent = node.parent
        assert parent is not None
        twins = parent.children[node.tokens]
        twins.remove(node)
        self._touched.update(dict.fromkeys(twins))
        if not twins:
            del parent.children[node.tokens]
        length = len(node.tokens)
        parent.child_lengths[length] -= 1
        if not parent.child_lengths[length]:
            del parent.child_lengths[length]

    def _on_updated(self, data: KVCacheUpdatedData) -> None:
        node = self._nodes.get(data.block_hash)
        if node is None:
            return
        if data.cache_level is not None:
            self._set_level(node, data.cache_level.new_value)
        if data.has_host_copy is not None:
            self._set_host_copy(node, data.has_host_copy and node.level == DEVICE_LEVEL)

    def _set_level(self, node: _Node, level: int) -> None:
        if level != DEVICE_LEVEL:
            self._set_host_copy(node, False)  # a copy is something that the device has too
        self._counts[node.level] -= 1
        self._counts[level] += 1
        node.level = level
        self._touch(node)

    def _set_host_copy(self, node: _Node, has_host_copy: bool) -> None:
        self._num_copied += has_host_copy - node.has_host_copy
        node.has_host_copy = has_host_copy
        self._touch(node)

    def _touch(self, node: _Node) -> None:
        self._touched[node] = None
        self._note_parent(node)

    def _note_parent(self, node: _Node) -> None:
        """Those whose tokens end within `node` are watched at its parent."""
        assert node.parent is not None
        self._changed.update(dict.fromkeys(node.parent.watches.related_to(node.tokens)))

    def _forget_all(self) -> None:
        self.num_gaps += 1
        self._changed = dict.fromkeys(self._anchors)
        self._anchors = {}
        self._touched.clear()
        self._nodes.clear()
        self._root = _Node(None, None)
        self._counts = [0, 0]
        self._num_copied = 0

    # -- questions -----------------------------------------------------------------------------

    def locate(self, token_ids: Sequence[int]) -> KvLocation:
        """Where the KV of the beginning of `token_ids` is."""
        return self._follow(token_ids)[0]

    def watch(self, handle: int, token_ids: Sequence[int]) -> KvLocation:
        """Where it is, and from now on whether that changes; replaces an earlier watch."""
        self.unwatch(handle)
        location, anchors, key = self._follow(token_ids)
        for node in anchors:
            node.watches.add(handle, key)
        self._anchors[handle] = anchors
        return location

    def unwatch(self, handle: int) -> None:
        """`changed` names it no more."""
        for node in self._anchors.pop(handle, ()):
            node.watches.discard(handle)
        self._changed.pop(handle, None)

    @property
    def num_watched(self) -> int:
        """Handles that are watched."""
        return len(self._anchors)

    def watched(self) -> list[int]:
        """The handles that are watched."""
        return list(self._anchors)

    def changed(self) -> list[int]:
        """Watched handles whose location may have changed since the last call, or since their
        `watch`. After events were missing: all, and none is watched any more."""
        seen: set[_Node] = set()
        for touched in self._touched:
            for node in _subtree(touched, seen):
                self._changed.update(dict.fromkeys(node.watches))
        self._touched.clear()
        handles = list(self._changed)
        self._changed.clear()
        return handles

    def _follow(self, token_ids: Sequence[int]) -> tuple[KvLocation, list[_Node], TokenKey]:
        """The location, the last whole blocks of the way (one for each salt) and the tokens that
        were looked for below them."""
        size = self._tokens_per_block
        nodes, start = [self._root], 0
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

    def add(self, nodes: Sequence[_Node]) -> None:
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


def _last_blocks(node: _Node, key: TokenKey) -> list[_Node]:
    """The longest blocks under `node` whose tokens begin `key`."""
    for length in sorted(node.child_lengths, reverse=True):
        if length <= len(key):
            twins = node.children.get(key[:length])
            if twins:
                return twins
    return []


def _subtree(node: _Node, seen: set[_Node]) -> Iterator[_Node]:
    """`node` and all below it, without what hangs below a block that is in `seen`; adds to it."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            for twins in node.children.values():
                stack += twins
