"""Copies ahead of need: begun between two steps, running beside them, taken over when complete.

Owns the flights and what their end means for a block. A block on its way counts where it was until
then; neither its source nor its target is given away meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenflow.inflight.flights import Flight, Flights
from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.runner import CopyDirection

if TYPE_CHECKING:
    from tokenflow.inflight.tiers import BlockTiers, HostTier

_OFFLOAD_SHARE = 0.75
"""Of the blocks that may be on their way: a rush to the host leaves room for who comes back."""


class CopiesAhead:
    """Begins copies and takes over their results, on behalf of the tiers."""

    def __init__(self, tiers: BlockTiers, host: HostTier | None) -> None:
        self._tiers = tiers
        self._host = host
        self._flights = Flights(host.transport if host else None)

    def __bool__(self) -> bool:
        """True while copies run beside the steps."""
        return bool(self._flights)

    @property
    def flights(self) -> tuple[Flight, ...]:
        """The copies that were not taken over yet."""
        return tuple(self._flights)

    def num_slots_in_transit(self) -> tuple[int, int]:
        """Device and host slots that only a copy under way owns."""
        return self._flights.num_slots_in_transit()

    def offload(self, path: Sequence[Block], max_blocks: int) -> None:
        """Start to copy up to `max_blocks` of the blocks of `path` that have no copy."""
        flights: list[Flight] = []
        for block in path:
            if len(flights) >= max_blocks or not self._may_fly(len(flights), _OFFLOAD_SHARE):
                break
            if block.slot is None or block.host_slot is not None or block.in_transit:
                continue
            host_slot = self._tiers.take_host_for_copy()
            if host_slot is None:
                break
            flights.append(Flight(block, CopyDirection.OFFLOAD, block.slot, host_slot))
        self._start(CopyDirection.OFFLOAD, flights)

    def onboard(self, path: Sequence[Block]) -> None:
        """Start to bring the blocks of `path` that are on the host only to the device, from the
        first on, as far as there is room. The others of `path` must be pinned."""
        flights: list[Flight] = []
        for block in path:
            if block.slot is not None or block.in_transit:
                continue
            if not self._may_fly(len(flights), 1.0):
                break
            slot = self._tiers.take_device_unseen()
            if slot is None:
                break
            assert block.host_slot is not None
            flights.append(Flight(block, CopyDirection.ONBOARD, slot, block.host_slot))
        self._start(CopyDirection.ONBOARD, flights)

    def settle(self) -> None:
        """Take over the copies that are complete by now."""
        done = self._flights.take_done()
        if done:
            self._land(done)

    def land_first(self) -> None:
        """Wait for the oldest copies under way."""
        self._land(self._flights.wait_for_first())

    def _may_fly(self, num_more: int, share: float) -> bool:
        host = self._host
        if host is None:
            return False
        limit = max(1, int(share * host.max_blocks_in_flight))
        return len(self._flights) + num_more < limit

    def _start(self, direction: CopyDirection, flights: list[Flight]) -> None:
        if not flights:
            return
        for flight in flights:
            flight.block.in_transit = True
            if direction is CopyDirection.ONBOARD:
                assert flight.block.parent is not None
                flight.block.parent.num_device_children += 1
        self._tiers.counters.started(direction, len(flights))
        self._land(self._flights.start(direction, flights))
        if self._host is not None and not self._host.overlap:
            while self._flights:
                self.land_first()

    def _land(self, flights: Sequence[Flight]) -> None:
        self._tiers.counters.add(self._flights.take_times())
        for flight in flights:
            self._tiers.counters.ended(flight.direction, flight.error)
            flight.block.in_transit = False
            if flight.direction is CopyDirection.OFFLOAD:
                self._tiers.offloaded(flight)
            else:
                self._tiers.onboarded(flight)
