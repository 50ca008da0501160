"""Copies between the tiers that run beside the steps, and the count of all copies.

Owns the transfers under way. A flight is one block of a transfer; what its end means for the block
is tiers.py's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tokenflow.inflight.moves import MoveResult
from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.runner import CopyDirection, KvTransport, TierCopy, Transfer


@dataclass(eq=False, slots=True)
class Flight:
    """One block on its way. error: why it failed, once it is done."""

    block: Block
    direction: CopyDirection
    device_slot: int
    host_slot: int
    error: str | None = None


@dataclass(slots=True)
class CopyTimes:
    """Seconds of copies, by direction, and for how long somebody had to wait for them."""

    offload_s: float = 0.0
    onboard_s: float = 0.0
    wait_s: float = 0.0


class Flights:
    """The transfers under way, oldest first."""

    def __init__(self, transport: KvTransport | None) -> None:
        self._transport = transport
        self._batches: deque[tuple[Transfer, list[Flight]]] = deque()
        self._times = CopyTimes()

    def __len__(self) -> int:
        return sum(len(flights) for _, flights in self._batches)

    def __iter__(self) -> Iterator[Flight]:
        return (flight for _, flights in self._batches for flight in flights)

    def start(self, direction: CopyDirection, flights: list[Flight]) -> list[Flight]:
        """Begin to copy. Returns `flights`, as failed ones, if that cannot even be begun."""
        assert self._transport is not None
        copies = [TierCopy(flight.device_slot, flight.host_slot) for flight in flights]
        try:
            transfer = self._transport.start(direction, copies)
        except Exception as error:
            for flight in flights:
                flight.error = f"{type(error).__name__}: {error}"
            return flights
        self._batches.append((transfer, flights))
        return []

    def take_done(self) -> list[Flight]:
        """The flights of all transfers that are complete or have failed."""
        if not self._batches:
            return []
        done = [batch for batch in self._batches if batch[0].is_done()]
        if not done:
            return []
        self._batches = deque(batch for batch in self._batches if batch not in done)
        return [flight for batch in done for flight in self._ended(*batch)]

    def wait_for_first(self) -> list[Flight]:
        """The flights of the oldest transfer, when it is done."""
        transfer, flights = self._batches.popleft()
        transfer.wait()
        return self._ended(transfer, flights)

    def num_slots_in_transit(self) -> tuple[int, int]:
        """Device and host slots that are the target of a copy, or whose block was forgotten
        meanwhile: nobody else owns those."""
        if not self._batches:
            return 0, 0
        device = host = 0
        for flight in self:
            gone = flight.block.parent is None
            onboard = flight.direction is CopyDirection.ONBOARD
            device += onboard or gone
            host += not onboard or gone
        return device, host

    def take_times(self) -> CopyTimes:
        """Times since the last call."""
        times, self._times = self._times, CopyTimes()
        return times

    def _ended(self, transfer: Transfer, flights: list[Flight]) -> list[Flight]:
        for flight in flights:
            flight.error = transfer.error
        if flights[0].direction is CopyDirection.OFFLOAD:
            self._times.offload_s += transfer.seconds
        else:
            self._times.onboard_s += transfer.seconds
        self._times.wait_s += transfer.waited_s
        return flights


class TierCounters(msgspec.Struct):
    """What `kv_api.KvTierStats` counts since the start."""

    num_offloads_started: int = 0
    num_offloads_completed: int = 0
    num_offloads_failed: int = 0
    num_onboards_started: int = 0
    num_onboards_completed: int = 0
    num_onboards_failed: int = 0
    offload_s: float = 0.0
    onboard_s: float = 0.0
    wait_s: float = 0.0
    num_host_evicted_blocks: int = 0
    num_host_full: int = 0
    last_copy_error: str = ""

    def started(self, direction: CopyDirection, num_blocks: int) -> None:
        """Copies beside the steps were begun."""
        if direction is CopyDirection.OFFLOAD:
            self.num_offloads_started += num_blocks
        else:
            self.num_onboards_started += num_blocks

    def ended(self, direction: CopyDirection, error: str | None) -> None:
        """One of them is done, or failed with `error`."""
        completed = error is None
        self.last_copy_error = error or self.last_copy_error
        if direction is CopyDirection.OFFLOAD:
            self.num_offloads_completed += completed
            self.num_offloads_failed += not completed
        else:
            self.num_onboards_completed += completed
            self.num_onboards_failed += not completed

    def add(self, times: CopyTimes) -> None:
        """Times of copies that are done."""
        self.offload_s += times.offload_s
        self.onboard_s += times.onboard_s
        self.wait_s += times.wait_s

    def add_moves(self, result: MoveResult) -> None:
        """Copies that a step made."""
        self.num_offloads_started += result.num_offloads + result.num_failed_offloads
        self.num_offloads_completed += result.num_offloads
        self.num_offloads_failed += result.num_failed_offloads
        self.num_onboards_started += result.num_onboards + result.num_failed_onboards
        self.num_onboards_completed += result.num_onboards
        self.num_onboards_failed += result.num_failed_onboards
        self.add(CopyTimes(result.offload_s, result.onboard_s, result.wait_s))
        self.last_copy_error = result.error or self.last_copy_error
