"""Who uses which block, and since when nobody does.

Owns the reference counts, the order of last use, and what ends by time: retention priorities, and
the protection of what was brought to the device ahead of need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenflow.executor.api import KvCacheRetentionConfig
from tokenflow.inflight.block_store import BlockStore
from tokenflow.inflight.retention import Expiry, mark_prompt_block
from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.tiers import BlockTiers

_WANTED_S = 10.0
"""What was brought back ahead of need and is not used for so long is like any other block again."""
_RENEW_S = 1.0
"""Asked for again after this time, it is wanted anew."""


class BlockUse:
    """References to blocks. num_used_blocks: device blocks that somebody references."""

    def __init__(self, store: BlockStore, tiers: BlockTiers) -> None:
        self._store = store
        self._tiers = tiers
        self._expiry = Expiry(self._priority_changed)
        self._wanted: deque[tuple[float, Block]] = deque()
        self._tick = 0
        self.now = 0.0
        self.num_used_blocks = 0

    def begin(self, now: float) -> None:
        """A boundary at instant `now`: end what is over."""
        self.now = now
        self._expiry.refresh(now)
        while self._wanted and self._wanted[0][0] < now - _WANTED_S:
            since, block = self._wanted.popleft()
            if (
                block.is_wanted and block.wanted_time == since
            ):  # else it was used, or asked for anew
                block.is_wanted = False
                self._tiers.offer(block)

    def take(self) -> Block:
        """A referenced block without content."""
        block = Block(self._tiers.take_device())
        self.acquire(block)
        return block

    def acquire(self, block: Block) -> None:
        """One more sequence uses `block`."""
        if block.ref_count == 0:
            self.num_used_blocks += 1
        block.ref_count += 1
        block.is_wanted = False

    def unreference(self, block: Block, *, ended: bool) -> None:
        """One sequence less; `ended` as in `touch`."""
        block.ref_count -= 1
        if block.ref_count:
            return
        self.num_used_blocks -= 1
        if block.is_stored:
            self.touch(block, ended=ended)
        else:
            self._tiers.free_device(block)

    def touch(self, block: Block, *, ended: bool) -> None:
        """An unreferenced block was used. ended: by a request that is complete."""
        self._tick += 1
        block.last_use = self._tick
        block.last_use_time = self.now
        block.ended = ended
        self._expiry.released(block, self.now)
        self._tiers.offer(block)

    def pin(self, blocks: Sequence[Block]) -> None:
        """Keep `blocks` where they are while room is made for what belongs to them."""
        for block in blocks:
            block.ref_count += 1

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Undo `pin`."""
        for block in blocks:
            block.ref_count -= 1
            self._tiers.offer(block)

    def want(self, blocks: Sequence[Block]) -> None:
        """They are wanted on the device, on which they are or will be soon."""
        for block in blocks:
            if block.is_wanted and block.wanted_time > self.now - _RENEW_S:
                continue
            block.is_wanted, block.wanted_time = True, self.now
            self._wanted.append((self.now, block))
            self._tiers.offer(block)

    def mark(self, block: Block, first_token: int, config: KvCacheRetentionConfig | None) -> None:
        """Give a block of a prompt the priority that a request asks for."""
        old = block.priority
        mark_prompt_block(block, first_token, config)
        if block.is_stored and block.priority != old:
            self._priority_changed(block, old)

    def _priority_changed(self, block: Block, old: int) -> None:
        self._store.priority_changed(block, old)
        self._tiers.offer(block)
