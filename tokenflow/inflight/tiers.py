"""Where blocks lie: the slots of the device pool and of the host pool, and who gives theirs up.

Owns the free slots of both tiers, the copies that a step has to make (moves.py) and those that run
beside the steps (copies_ahead.py). The order of victims is victims.py's, sharing and storing
kv_cache.py's.

Two ways to use the host (`HostTier.inclusive`):
- TensorRT-LLM's rules: a cached block goes to the host only when its device block is wanted for
  something else, if its priority is worth it and the host has a block to give; it is in one tier at
  a time, and an onboard gives the host block up.
- Driven from above (`kv_api.KvTiering`): copies are made ahead of need and kept.

Invariants:
- per tier, slots: used or cached + in transit + free = total; a slot has one owner;
- a tier is left from the leaves up (reuse_tree.py), a referenced block never;
- a block is found where its copy is complete, never before, and neither its source nor its target
  is given away while a copy is under way;
- a copy that fails changes nothing, but that what it alone would have kept is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tokenflow.errors import InternalError
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.block_store import BlockStore
from tokenflow.inflight.copies_ahead import CopiesAhead
from tokenflow.inflight.flights import Flight, TierCounters
from tokenflow.inflight.moves import StepMoves
from tokenflow.inflight.reuse_tree import Block, TreeNode
from tokenflow.inflight.runner import BlockCopy, KvTransport
from tokenflow.inflight.victims import Victims

_STALE_S = 60.0
"""Whoever was cut short so long ago comes back hardly ever: most likely its client left."""

DEFAULT_MIN_PRIORITY = 30
"""TensorRT-LLM's threshold where none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """The host pool.

    min_priority: retention priority from which a block is worth a host block.
    inclusive: see the module's text. overlap: copies made ahead of need run beside the steps.
    max_blocks_in_flight: of those, at most so many at once.
    """

    num_blocks: int
    transport: KvTransport
    min_priority: int = DEFAULT_MIN_PRIORITY
    inclusive: bool = False
    overlap: bool = True
    max_blocks_in_flight: int = 1 << 30


class BlockTiers:
    """Slots of both tiers. host: None = device only.

    store: from which evicted blocks are taken, and which is told of moves.
    block_bytes: KV of one block, for the statistics.
    """

    def __init__(
        self,
        num_device_blocks: int,
        host: HostTier | None,
        store: BlockStore,
        block_bytes: int,
    ) -> None:
        self._block_bytes = block_bytes
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = host.num_blocks if host else 0
        self._host = host
        self._inclusive = host is not None and host.inclusive
        self._store = store
        self._free_device = list(range(num_device_blocks - 1, -1, -1))
        # First in, first out: a slot just given up is the source of a copy that the next one into
        # it would have to wait for.
        self._free_host = deque(range(self.num_host_blocks))
        self.victims = Victims(num_device_blocks, self.num_host_blocks, inclusive=self._inclusive)
        self._moves = StepMoves()
        self._read_from_host: dict[int, Block] = {}
        self.ahead = CopiesAhead(self, host)
        self.now = 0.0
        self.counters = TierCounters()

    def offer(self, node: TreeNode | None) -> None:
        """The state of `node` changed: it may have become a victim."""
        self.victims.offer(node)

    # -- device slots --------------------------------------------------------------------------

    def take_device(self) -> int:
        """A device slot, taken from a cached block if none is free; one must be obtainable."""
        while not self._free_device:
            victim = self.victims.device.first()
            if victim is not None:
                return self._vacate(victim)
            if not self.ahead:
                raise InternalError("no block can be evicted although some are unreferenced")
            self.ahead.land_first()
        return self._free_device.pop()

    def free_device(self, block: Block) -> None:
        """An unstored, unreferenced block gives its slot back, if another one did not adopt it."""
        if block.slot is not None:
            self._free_device.append(block.slot)
            block.slot = None

    def adopt(self, stored: Block, twin: Block) -> None:
        """A stored block that is on the host only gets the device slot of a sequence's own block,
        which holds the same KV and is about to be released."""
        assert stored.parent is not None
        stored.slot, twin.slot = twin.device_slot, None
        stored.parent.num_device_children += 1
        if not self._inclusive:
            self.release_host(stored)
        self._store.moved_to_device(stored)

    def bring_back(self, block: Block) -> None:
        """Give a referenced block that is on the host only a device slot; the step's moves fill it
        before anything is computed."""
        assert block.ref_count
        assert block.host_slot is not None
        block.slot = self.take_device()
        self._moves.onboard(block.host_slot, block.slot)
        if block.parent is not None:
            block.parent.num_device_children += 1
        if not self._inclusive or block.parent is None:
            self._free_host.append(block.host_slot)
            block.host_slot = None
        self._store.moved_to_device(block)
        self.victims.offer(block)

    def copy_tokens(self, source: Block, target: Block, num_tokens: int) -> None:
        """Let the step's moves fill the first tokens of `target` from `source`, a block of either
        tier that is referenced or left alone until then."""
        if source.slot is not None:
            self._moves.copy(source.slot, target.device_slot, num_tokens)
        else:
            assert source.host_slot is not None
            self._moves.onboard(source.host_slot, target.device_slot)
            self._read_from_host[target.device_slot] = source

    def _vacate(self, victim: Block) -> int:
        """The device slot of `victim`, whose content goes to the host or is lost."""
        slot = victim.device_slot
        if victim.host_slot is None and (self._is_worth_a_copy(victim) or self._fits(victim)):
            victim.host_slot = self._take_host()
            if victim.host_slot is not None:
                self._moves.offload(slot, victim.host_slot)
        if victim.host_slot is None:
            self.forget(victim, keep_slot=True)
            return slot
        self._leave_device(victim)
        return slot

    def _is_worth_a_copy(self, block: Block) -> bool:
        """By priority; driven from above, what an ended request left is not, unless it was given
        more than the default."""
        if self._host is None or block.priority < self._host.min_priority:
            return False
        return not (self._inclusive and block.is_left_over)

    def _fits(self, block: Block) -> bool:
        """True for what is not worth another block's place on the host, but need not be lost."""
        host = self._host
        return host is not None and block.priority >= host.min_priority and bool(self._free_host)

    def _leave_device(self, block: Block) -> None:
        block.slot, block.is_wanted = None, False
        assert block.parent is not None
        block.parent.num_device_children -= 1
        self._store.moved_to_host(block)
        self.victims.offer(block)
        self.victims.offer(block.parent)

    def take_device_unseen(self) -> int | None:
        """A device slot that no step has to copy for: free, or of a block that has a host copy or
        is not worth one, and was not brought back ahead of need itself."""
        if self._free_device:
            return self._free_device.pop()
        victim = self.victims.device.first()
        if victim is None or victim.is_wanted:
            return None
        slot = victim.device_slot
        if victim.host_slot is not None:
            self._leave_device(victim)
        elif self._is_worth_a_copy(victim):
            return None
        else:
            self.forget(victim, keep_slot=True)
        return slot

    # -- host slots ----------------------------------------------------------------------------

    def take_host_for_copy(self) -> int | None:
        """A host slot for a copy ahead of need, or None. It takes none from another copy: two
        streams would take turns in losing theirs; and none of what somebody may come back for."""
        if self._free_host:
            return self._free_host.popleft()
        victim = self.victims.host.first()
        if victim is None or not self._is_stale(victim):
            self.counters.num_host_full += 1
            return None
        return self._evict_from_host(victim)

    def _take_host(self) -> int | None:
        """A host slot for what would be lost without one, or None."""
        if self._free_host:
            return self._free_host.popleft()
        victim = self.victims.host.first()
        if victim is None or not victim.is_left_over:
            victim = self.victims.copies.first() or victim
        if victim is None:
            self.counters.num_host_full += 1
            return None
        return self._evict_from_host(victim)

    def _is_stale(self, block: Block) -> bool:
        return block.is_left_over or block.last_use_time < self.now - _STALE_S

    def _evict_from_host(self, victim: Block) -> int:
        self.counters.num_host_evicted_blocks += 1
        slot = victim.host_slot
        assert slot is not None
        victim.host_slot = None
        if victim.slot is None:
            self.offer(self._store.remove(victim))
        else:
            self._store.copied(victim)
            self.offer(victim)
        return slot

    def release_host(self, block: Block) -> None:
        """`block`, on the device and about to change, gives up its host copy."""
        if block.host_slot is not None:
            self._free_host.append(block.host_slot)
            block.host_slot = None

    # -- copies --------------------------------------------------------------------------------

    def offloaded(self, flight: Flight) -> None:
        """A copy to the host that ran beside the steps is over."""
        block = flight.block
        if flight.error is None and block.parent is not None:
            block.host_slot = flight.host_slot
            self._store.copied(block)
        else:
            self._free_host.append(flight.host_slot)
        if block.parent is None:  # it was forgotten meanwhile
            self._free_device.append(flight.device_slot)
        self.victims.offer(block)

    def onboarded(self, flight: Flight) -> None:
        """A copy to the device that ran beside the steps is over."""
        block = flight.block
        if block.parent is None:  # it was forgotten meanwhile
            self._free_device.append(flight.device_slot)
            self._free_host.append(flight.host_slot)
            return
        if flight.error is None:
            block.slot = flight.device_slot
            self._store.moved_to_device(block)
            self.victims.offer(block)
            return
        block.parent.num_device_children -= 1
        self._free_device.append(flight.device_slot)
        self.forget(block)  # what cannot be read is as good as lost

    def run_moves(
        self, copy_blocks: Callable[[Sequence[BlockCopy]], None]
    ) -> tuple[set[int], list[Block], Exception | None]:
        """Make the copies that the step needs. Returns the device slots that hold nothing because
        their copy failed, the blocks whose only content could not be saved or read, and what
        `copy_blocks` raised."""
        read, self._read_from_host = self._read_from_host, {}
        if not self._moves:
            return set(), [], None
        transport = self._host.transport if self._host else None
        result = self._moves.run(copy_blocks, transport)
        self.counters.add_moves(result)
        lost = [block for slot, block in read.items() if slot in result.bad_device]
        if result.bad_device or result.bad_host:
            for block in self._store:
                is_bad_copy = block.host_slot in result.bad_host
                if block.slot in result.bad_device or (is_bad_copy and block.slot is None):
                    lost.append(block)
                elif is_bad_copy:  # the block came back by another way meanwhile
                    self.release_host(block)
                    self._store.copied(block)
                    self.offer(block)
        return result.bad_device, lost, result.failure

    # -- leaving the tree ----------------------------------------------------------------------

    def give_up(self, path: Sequence[Block]) -> None:
        """Forget those blocks of `path` that are on the host only, from the last one up."""
        for block in reversed(path):
            if block.slot is not None or not block.is_unused_leaf:
                return
            self.forget(block)

    def forget(self, block: Block, *, keep_slot: bool = False) -> None:
        """Take an unreferenced block and everything below it out of the tree; their slots are free.

        keep_slot: the device slot of `block` itself goes to somebody else.
        """
        for child in list(block.children.values()):
            self.forget(child)
        assert not block.ref_count
        parent = self._store.remove(block)
        if not block.in_transit:  # else its slots come back when the copy is over
            if block.slot is not None and not keep_slot:
                self._free_device.append(block.slot)
            self.release_host(block)
            block.slot = None
        self.offer(parent)

    # -- figures -------------------------------------------------------------------------------

    @property
    def free_device_slots(self) -> tuple[int, ...]:
        """The device slots that nobody has."""
        return tuple(self._free_device)

    @property
    def free_host_slots(self) -> tuple[int, ...]:
        """The host slots that nobody has."""
        return tuple(self._free_host)

    def stats(self, num_used_blocks: int) -> KvTierStats:
        """Both tiers now; num_used_blocks: referenced device blocks."""
        device_slots, host_slots = self.ahead.num_slots_in_transit()
        return KvTierStats(
            block_bytes=self._block_bytes,
            num_device_blocks=self.num_device_blocks,
            num_device_used_blocks=num_used_blocks,
            num_device_cached_blocks=(
                self.num_device_blocks - num_used_blocks - len(self._free_device) - device_slots
            ),
            num_device_in_transit_blocks=device_slots,
            num_host_blocks=self.num_host_blocks,
            num_host_cached_blocks=self.num_host_blocks - len(self._free_host) - host_slots,
            num_host_in_transit_blocks=host_slots,
            **msgspec.structs.asdict(self.counters),
        )
