"""Copies between the tiers in virtual time: they move nothing and take their time.

Owns when each copy is complete. A transfer takes a fixed start and then its bytes over the
bandwidth of its direction. Those of one direction go one after the other, the two directions side
by side, and one that shares a block with an earlier one begins after it, as runner.py demands.
No copy fails.

Invariant: an instant at which a transfer completes is fixed at its start and never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenflow.inflight.runner import CopyDirection, TierCopy


@dataclass(frozen=True, kw_only=True)
class CopyCosts:
    """What the link between the tiers does.

    block_bytes: KV of one block. start_s: from asking for a transfer to its first byte.
    """

    block_bytes: int
    offload_bytes_per_s: float
    onboard_bytes_per_s: float
    start_s: float = 50e-6

    def seconds(self, direction: CopyDirection, num_blocks: int) -> float:
        """A transfer of so many blocks that has the link for itself."""
        offload = direction is CopyDirection.OFFLOAD
        rate = self.offload_bytes_per_s if offload else self.onboard_bytes_per_s
        return self.start_s + num_blocks * self.block_bytes / rate


class StepTime(Protocol):
    """The time of whoever runs the steps; transfers read it and may spend it."""

    @property
    def now(self) -> float:
        """Current virtual instant, s."""
        ...

    def spend(self, seconds: float) -> None:
        """The step waits so long."""
        ...


class VirtualTransfer:
    """Implements `runner.Transfer`. done_time: instant at which it is complete."""

    def __init__(self, time: StepTime, done_time: float, seconds: float) -> None:
        self._time = time
        self.done_time = done_time
        self._seconds = seconds
        self._is_done = False
        self._waited_s = 0.0

    def is_done(self) -> bool:
        """See Transfer."""
        self._is_done = self._is_done or self._time.now >= self.done_time
        return self._is_done

    def wait(self) -> None:
        """See Transfer; the step takes so much longer."""
        if not self.is_done():
            self._waited_s = self.done_time - self._time.now
            self._time.spend(self._waited_s)
            self._is_done = True  # the sum of the instants may fall short by a rounding

    @property
    def error(self) -> str | None:
        """None: no copy fails here."""
        return None

    @property
    def seconds(self) -> float:
        """See Transfer; without what it stood in line for."""
        return self._seconds

    @property
    def waited_s(self) -> float:
        """See Transfer."""
        return self._waited_s


class VirtualTransport:
    """Implements `runner.KvTransport` on the bandwidths of `costs`."""

    def __init__(self, costs: CopyCosts, time: StepTime) -> None:
        self._costs = costs
        self._time = time
        self._free_time = dict.fromkeys(CopyDirection, 0.0)
        self._device_free_time: dict[int, float] = {}
        self._host_free_time: dict[int, float] = {}

    def start(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> VirtualTransfer:
        """See KvTransport."""
        begin = max(self._time.now, self._free_time[direction])
        for copy in copies:
            begin = max(
                begin,
                self._device_free_time.get(copy.device_block, 0.0),
                self._host_free_time.get(copy.host_block, 0.0),
            )
        seconds = self._costs.seconds(direction, len(copies))
        done_time = begin + seconds
        self._free_time[direction] = done_time
        for copy in copies:
            self._device_free_time[copy.device_block] = done_time
            self._host_free_time[copy.host_block] = done_time
        return VirtualTransfer(self._time, done_time, seconds)

    def close(self) -> None:
        """There is nothing to let go."""
