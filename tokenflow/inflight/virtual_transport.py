"""Copies between the tiers in virtual time: they move nothing and take their time.

Owns when each copy is complete. A transfer takes a fixed start and then its bytes over the
bandwidth of its direction. Those of one direction go one after the other, the two directions side
by side, and one that shares a block with an earlier one begins after it, as runner.py demands.
Where both directions at once reach less than the sum of their rates, the transfer that comes later
gets what the other direction leaves, for as long as that is busy: what is under way keeps its
instant. No copy fails.

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
    duplex_share: of the sum of both rates, what both directions reach at once; 1 = no contention.
        One direction alone keeps its rate, so at a share that leaves no more than that (0.5 with
        equal rates) they take turns. Raises ValueError outside (0, 1].
    """

    block_bytes: int
    offload_bytes_per_s: float
    onboard_bytes_per_s: float
    start_s: float = 50e-6
    duplex_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.duplex_share <= 1:
            raise ValueError(f"duplex_share must be in (0, 1], got {self.duplex_share}")

    def bytes_per_s(self, direction: CopyDirection) -> float:
        """A direction that has the link for itself."""
        offload = direction is CopyDirection.OFFLOAD
        return self.offload_bytes_per_s if offload else self.onboard_bytes_per_s

    def seconds(
        self, direction: CopyDirection, num_blocks: int, other_busy_s: float = 0.0
    ) -> float:
        """A transfer of so many blocks, while the other direction is busy for its first
        `other_busy_s` (from the asking on)."""
        rate = self.bytes_per_s(direction)
        num_bytes = num_blocks * self.block_bytes
        alone_s = self.start_s + num_bytes / rate
        shared_s = max(0.0, other_busy_s - self.start_s)
        if shared_s == 0.0 or self.duplex_share == 1.0:
            return alone_s
        both = self.offload_bytes_per_s + self.onboard_bytes_per_s
        left = max(0.0, self.duplex_share * both - (both - rate))
        if num_bytes <= shared_s * left:
            return self.start_s + num_bytes / left
        return self.start_s + shared_s + (num_bytes - shared_s * left) / rate


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
        other_free_time = max(t for d, t in self._free_time.items() if d is not direction)
        seconds = self._costs.seconds(direction, len(copies), other_free_time - begin)
        done_time = begin + seconds
        self._free_time[direction] = done_time
        for copy in copies:
            self._device_free_time[copy.device_block] = done_time
            self._host_free_time[copy.host_block] = done_time
        return VirtualTransfer(self._time, done_time, seconds)

    def close(self) -> None:
        """There is nothing to let go."""
