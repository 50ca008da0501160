"""What an engine's KV cache holds, as told by its events.

Owns the mirror of the engine's tree of reusable blocks (kv_mirror_tree.py) and the watches, which
tell whose KV moved so that nobody has to look through everybody's. Pure: no clock, no engine.

Invariants:
- from Created on, with which an engine begins or tells everything anew, the mirror holds after
  every event exactly the engine's blocks (`is_complete`);
- events that are missing (a gap in the ids, or a stream that does not begin with Created) empty it:
  until the next Created it knows what it hears, which is a lower bound of what there is;
- `changed` names every watched handle whose location may differ from what `watch` returned.

Events of further attention windows repeat the first one's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.executor.kv_api import (
    DEVICE_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvLocation,
)
from tokenflow.kv_mirror_tree import MirrorTree, Node
from tokenflow.kv_watches import Watches


class KvMirror:
    """Feeds on events; `locate` says where the KV of tokens is.

    is_complete: False after a gap. num_gaps: how often events were missing.
    num_blocks_per_level: sizes of [device, host] as the engine made them; [] until it said so.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._next_id: int | None = None
        self._window: int | None = None
        self._tree = MirrorTree(tokens_per_block)
        self._anchors: dict[int, list[Node]] = {}
        self._changed: dict[int, None] = {}
        self._touched: dict[Node, None] = {}
        self.is_complete = False
        self.num_gaps = 0
        self.num_blocks_per_level: list[int] = []

    def __len__(self) -> int:
        """Blocks that can be found, in either tier."""
        return len(self._tree)

    @property
    def num_device_blocks(self) -> int:
        """Blocks that can be found on the device."""
        return self._tree.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be found on the host only."""
        return self._tree.num_host_blocks

    @property
    def num_copied_blocks(self) -> int:
        """Blocks on the device that have a copy on the host."""
        return self._tree.num_copied_blocks

    # -- events --------------------------------------------------------------------------------

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        """Take events in, in the order in which the engine gave them."""
        for event in events:
            data = event.data
            if self._window is None:
                self._window = event.window_size
            is_ours = event.window_size == self._window
            is_first = self._next_id is None and is_ours and isinstance(data, KVCacheCreatedData)
            if event.event_id != self._next_id and not is_first:
                self.num_gaps += 1
                self.is_complete = False
                self._forget_all()
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
        """The pools are empty, or all that they hold follows: from here on everything is known."""
        if len(self._tree) or self.num_blocks_per_level:
            self._forget_all()
        self.is_complete = True
        self.num_blocks_per_level = list(data.num_blocks_per_cache_level)

    def _on_stored(self, data: KVCacheStoredData) -> None:
        tree = self._tree
        if data.parent_hash is not None:
            parent = tree.get(data.parent_hash)
        else:
            parent = tree.root_of(data.blocks[0].lora_id if data.blocks else None)
        for block in data.blocks:
            if parent is None:
                return  # it hangs under something that was missed
            tokens = tuple(block.tokens)
            node = tree.get(block.block_hash)
            if node is not None and node.parent is parent and node.tokens == tokens:
                tree.set_level(node, block.cache_level)
                self._touch(node)
            else:
                self._on_removed(block.block_hash)
                for twin in parent.children.get(tokens, ()):
                    self._touched[twin] = None
                node = tree.add(block.block_hash, parent, tokens, block.cache_level)
                self._note_parent(node)
            parent = node

    def _on_removed(self, block_hash: int) -> None:
        """The block goes with all that hangs below it, which is unreachable from now on. Who goes
        by its twins, too, is watched at each."""
        node = self._tree.get(block_hash)
        if node is None:
            return
        self._note_parent(node)
        for gone in self._tree.remove(node):
            self._changed.update(dict.fromkeys(gone.watches or ()))
            self._touched.pop(gone, None)

    def _on_updated(self, data: KVCacheUpdatedData) -> None:
        node = self._tree.get(data.block_hash)
        if node is None:
            return
        if data.cache_level is not None:
            self._tree.set_level(node, data.cache_level.new_value)
            self._touch(node)
        if data.has_host_copy is not None:
            self._tree.set_host_copy(node, data.has_host_copy and node.level == DEVICE_LEVEL)
            self._touch(node)

    def _touch(self, node: Node) -> None:
        self._touched[node] = None
        self._note_parent(node)

    def _note_parent(self, node: Node) -> None:
        """Those whose tokens end within `node` are watched at its parent."""
        assert node.parent is not None
        watches = node.parent.watches
        if watches is not None:
            self._changed.update(dict.fromkeys(watches.related_to(node.tokens)))

    def _forget_all(self) -> None:
        self._changed.update(dict.fromkeys(self._anchors))
        self._anchors = {}
        self._touched.clear()
        self._tree = MirrorTree(self._tokens_per_block)

    # -- questions -----------------------------------------------------------------------------

    def locate(self, token_ids: Sequence[int], lora_id: int | None = None) -> KvLocation:
        """Where the KV of the beginning of `token_ids` is, computed with that LoRA adapter."""
        return self._tree.follow(token_ids, lora_id)[0]

    def watch(
        self, handle: int, token_ids: Sequence[int], lora_id: int | None = None
    ) -> KvLocation:
        """Where it is, and from now on whether that changes; replaces an earlier watch."""
        self.unwatch(handle)
        location, anchors, key = self._tree.follow(token_ids, lora_id)
        for node in anchors:
            if node.watches is None:
                node.watches = Watches()
            node.watches.add(handle, key)
            self._tree.keep_or_drop(node)
        self._anchors[handle] = anchors
        return location

    def unwatch(self, handle: int) -> None:
        """`changed` names it no more."""
        for node in self._anchors.pop(handle, ()):
            if node.watches is not None:
                node.watches.discard(handle)
                self._tree.keep_or_drop(node)
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
        `watch`. After events were missing, or everything was told anew: all, and none is watched
        any more."""
        seen: set[Node] = set()
        for touched in self._touched:
            for node in touched.subtree(seen):
                self._changed.update(dict.fromkeys(node.watches or ()))
        self._touched.clear()
        handles = list(self._changed)
        self._changed.clear()
        return handles
