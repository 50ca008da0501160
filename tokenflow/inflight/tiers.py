"""Where blocks lie: the slots of the device pool and of the host pool, and who gives theirs up.

Owns the free slots of both tiers, the copies that a step has to make (moves.py) and those that run
beside the steps (flights.py). The order of victims is victims.py's, sharing and storing
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

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenflow.errors import InternalError
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.block_store import BlockStore
from tokenflow.inflight.flights import Flight, Flights, TierCounters
from tokenflow.inflight.moves import StepMoves
from tokenflow.inflight.reuse_tree import DEFAULT_PRIORITY, Block, TreeNode
from tokenflow.inflight.runner import BlockCopy, CopyDirection, KvTransport
from tokenflow.inflight.victims import Victims

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
    block_bytes: int
    transport: KvTransport
    min_priority: int = DEFAULT_MIN_PRIORITY
    inclusive: bool = False
    overlap: bool = True
    max_blocks_in_flight: int = 1 << 30


class BlockTiers:
    """Slots of both tiers. host: None = device only.

    store: from which evicted blocks are taken, and which is told of moves.
    """

    def __init__(
        self,
        num_device_blocks: int,
        host: HostTier | None,
        store: BlockStore,
    ) -> None:
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
        self._flights = Flights(host.transport if host else None)
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
            if not self._flights:
                raise InternalError("no block can be evicted although some are unreferenced")
            self.land(self._flights.wait_for_first())
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

    def _vacate(self, victim: Block) -> int:
        """The device slot of `victim`, whose content goes to the host or is lost."""
        slot = victim.device_slot
        if victim.host_slot is None and (self._is_worth_a_copy(victim) or self._fits(victim)):
            victim.host_slot = self._take_host(for_copy=False)
            if victim.host_slot is not None:
                self._moves.offload(slot, victim.host_slot)
        if victim.host_slot is None:
            self._forget_subtree(victim, keep_slot=True)
            return slot
        self._leave_device(victim)
        return slot

    def _is_worth_a_copy(self, block: Block) -> bool:
        """By priority; driven from above, what an ended request left is not, unless it was given
        more than the default."""
        if self._host is None or block.priority < self._host.min_priority:
            return False
        return not (self._inclusive and block.is_left_over) or block.priority > DEFAULT_PRIORITY

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

    def _take_device_unseen(self) -> int | None:
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
            self._forget_subtree(victim, keep_slot=True)
        return slot

    # -- host slots ----------------------------------------------------------------------------

    def _take_host(self, *, for_copy: bool) -> int | None:
        """A host slot, or None. for_copy: for a copy ahead of need, which takes none from another
        copy: two streams would take turns in losing theirs."""
        if self._free_host:
            return self._free_host.popleft()
        victim = self.victims.host.first()
        if not for_copy and (victim is None or not victim.is_left_over):
            victim = self.victims.copies.first() or victim
        if victim is None:
            self.counters.num_host_full += 1
            return None
        self.counters.num_host_evicted_blocks += 1
        slot = victim.host_slot
        assert slot is not None
        victim.host_slot = None
        if victim.slot is None:
            self.victims.offer(self._store.remove(victim))
        else:
            self._store.copied(victim)
            self.victims.offer(victim)
        return slot

    def release_host(self, block: Block) -> None:
        """`block`, on the device and about to change, gives up its host copy."""
        if block.host_slot is not None:
            self._free_host.append(block.host_slot)
            block.host_slot = None

    # -- ahead of need -------------------------------------------------------------------------

    def offload_ahead(self, path: Sequence[Block], max_blocks: int) -> None:
        """Start to copy up to `max_blocks` of the full blocks of `path` that have no copy."""
        flights: list[Flight] = []
        for block in path:
            if len(flights) >= max_blocks or not self._may_fly(len(flights)):
                break
            if block.slot is None or block.host_slot is not None or block.in_transit:
                continue
            host_slot = self._take_host(for_copy=True)
            if host_slot is None:
                break
            flights.append(Flight(block, CopyDirection.OFFLOAD, block.slot, host_slot))
        self._start(CopyDirection.OFFLOAD, flights)

    def onboard_ahead(self, path: Sequence[Block]) -> None:
        """Start to bring the blocks of `path` that are on the host only to the device, from the
        first on, as far as there is room. The others of `path` must be referenced. All that are on
        the device then, or on their way, are wanted."""
        flights: list[Flight] = []
        for block in path:
            if block.slot is not None or block.in_transit:
                block.is_wanted = True
                continue
            if not self._may_fly(len(flights)):
                break
            slot = self._take_device_unseen()
            if slot is None:
                break
            assert block.host_slot is not None
            block.is_wanted = True
            flights.append(Flight(block, CopyDirection.ONBOARD, slot, block.host_slot))
        self._start(CopyDirection.ONBOARD, flights)

    def give_up(self, path: Sequence[Block]) -> None:
        """Forget those blocks of `path` that are on the host only, from the last one up."""
        for block in reversed(path):
            if block.slot is not None or not block.is_unused_leaf:
                return
            self._forget_subtree(block)

    def _may_fly(self, num_more: int) -> bool:
        host = self._host
        return host is not None and len(self._flights) + num_more < host.max_blocks_in_flight

    def _start(self, direction: CopyDirection, flights: list[Flight]) -> None:
        if not flights:
            return
        for flight in flights:
            flight.block.in_transit = True
            if direction is CopyDirection.ONBOARD:
                assert flight.block.parent is not None
                flight.block.parent.num_device_children += 1
        self.counters.started(direction, len(flights))
        self.land(self._flights.start(direction, flights))
        if self._host is not None and not self._host.overlap:
            self.land_all()

    # -- copies --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take the copies beside the steps that are complete by now."""
        self.land(self._flights.take_done())

    def land_all(self) -> None:
        """Wait for all of them."""
        while self._flights:
            self.land(self._flights.wait_for_first())

    def land(self, flights: Sequence[Flight]) -> None:
        """Take over the results of copies that are done."""
        self.counters.add(self._flights.take_times())
        for flight in flights:
            self.counters.ended(flight.direction, flight.error is None)
            flight.block.in_transit = False
            if flight.direction is CopyDirection.OFFLOAD:
                self._land_offload(flight)
            else:
                self._land_onboard(flight)

    def _land_offload(self, flight: Flight) -> None:
        block = flight.block
        if flight.error is None and block.parent is not None:
            block.host_slot = flight.host_slot
            self._store.copied(block)
        else:
            self._free_host.append(flight.host_slot)
        if block.parent is None:  # it was forgotten meanwhile
            self._free_device.append(flight.device_slot)
        self.victims.offer(block)

    def _land_onboard(self, flight: Flight) -> None:
        block = flight.block
        if block.parent is None:
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
        self._forget_subtree(block)  # what cannot be read is as good as lost

    @property
    def has_flights(self) -> bool:
        """True while copies run beside the steps."""
        return bool(self._flights)

    def run_moves(
        self, copy_blocks: Callable[[Sequence[BlockCopy]], None]
    ) -> tuple[set[int], set[int], Exception | None]:
        """Make the copies that the step needs. Returns the device and host slots that hold nothing
        because their copy failed, and what `copy_blocks` raised."""
        if not self._moves:
            return set(), set(), None
        transport = self._host.transport if self._host else None
        result = self._moves.run(copy_blocks, transport)
        self.counters.add_moves(result)
        return result.bad_device, result.bad_host, result.failure

    # -- leaving the tree ----------------------------------------------------------------------

    def _forget_subtree(self, block: Block, *, keep_slot: bool = False) -> None:
        """Take an unreferenced block and everything below it out of the tree; their slots are free.

        keep_slot: the device slot of `block` itself goes to somebody else.
        """
        for child in list(block.children.values()):
            self._forget_subtree(child)
        assert not block.ref_count
        parent = self._store.remove(block)
        if not block.in_transit:  # else its slots come back when the copy is done
            if block.slot is not None and not keep_slot:
                self._free_device.append(block.slot)
            self.release_host(block)
            block.slot = None
        self.victims.offer(parent)

    def forget(self, block: Block) -> None:
        """The content of a stored, unreferenced block is lost: forget it and what hangs below."""
        self._forget_subtree(block)

    # -- figures -------------------------------------------------------------------------------

    @property
    def free_device_slots(self) -> tuple[int, ...]:
        """The device slots that nobody has."""
        return tuple(self._free_device)

    @property
    def free_host_slots(self) -> tuple[int, ...]:
        """The host slots that nobody has."""
        return tuple(self._free_host)

    @property
    def flights(self) -> tuple[Flight, ...]:
        """The copies beside the steps that were not taken over yet."""
        return tuple(self._flights)

    def stats(self, num_used_blocks: int) -> KvTierStats:
        """Both tiers now; num_used_blocks: referenced device blocks."""
        device_slots, host_slots = self._flights.num_slots_in_transit()
        return KvTierStats(
            block_bytes=self._host.block_bytes if self._host else 0,
            num_device_blocks=self.num_device_blocks,
            num_device_used_blocks=num_used_blocks,
            num_device_cached_blocks=(
                self.num_device_blocks - num_used_blocks - len(self._free_device) - device_slots
            ),
            num_device_in_transit_blocks=device_slots,
            num_host_blocks=self.num_host_blocks,
            num_host_cached_blocks=self.num_host_blocks - len(self._free_host) - host_slots,
            num_host_in_transit_blocks=host_slots,
            **dataclasses.asdict(self.counters),
        )
