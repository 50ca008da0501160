"""Copies between the tiers of the scripted runner: of cells, at a pace that tests choose.

Owns the copies that are not over and the rules that a real transport cannot check. A copy moves its
cells when it completes, never before, and a failed one fills its targets with POISON, so that KV
read too early or after a failure is an error. When copies complete is the pace's (`CopyPace`); here
is only the one that completes each at its start.

Invariants, restated from runner.py and enforced with a RuntimeError that names the block:
- sources and targets of one transfer are all different, and no two transfers under way share a
  target;
- the runner neither reads nor writes a target, nor writes a source, of a transfer under way;
- a source holds KV when it is copied.
A transfer counts as under way until its caller was told that it is over (`is_done` said so, `wait`
returned, or that of a later one that had to come after it did): who goes on without asking is right
only by luck, however fast the copies are. Once a rule was broken the transport stays broken, and
with it every step: a caller that takes a refusal for a failed copy must not get away with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenflow.inflight.runner import CopyDirection, TierCopy

Cell = tuple[int, int]
"""Token, and fingerprint of the history that ends with it."""
CellBlock = list[Cell | None]

POISON: Cell = (-1, -1)
"""What a failed copy leaves: there is no such token, so no history contains it."""

_OFFLOAD = CopyDirection.OFFLOAD


class ScriptedTransfer:
    """Implements `runner.Transfer`.

    direction, copies: as asked for. earlier: transfers that must come first, because they were
    under way at its start and share a block with it.
    """

    def __init__(
        self,
        transport: ScriptedTransport,
        direction: CopyDirection,
        copies: Sequence[TierCopy],
        earlier: Sequence[ScriptedTransfer],
    ) -> None:
        self._transport = transport
        self.direction = direction
        self.copies = tuple(copies)
        self.earlier = tuple(earlier)
        self._is_over = False
        self._error: str | None = None
        self._seconds = 0.0
        self._waited_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the cells have moved, or never will; asking does not tell the caller."""
        return self._is_over

    @property
    def sources(self) -> set[int]:
        """Block ids, in the tier that the direction says."""
        return {c.device_block if self.direction is _OFFLOAD else c.host_block for c in self.copies}

    @property
    def targets(self) -> set[int]:
        """Block ids, in the other tier."""
        return {c.host_block if self.direction is _OFFLOAD else c.device_block for c in self.copies}

    def shares_block(self, other: ScriptedTransfer) -> bool:
        """True if some block of either tier is in both."""
        return any(
            a.device_block == b.device_block or a.host_block == b.host_block
            for a in self.copies
            for b in other.copies
        )

    def finish(self, seconds: float = 0.0, error: str | None = None) -> None:
        """For the pace: move the cells now, or fail; what must come first is finished first."""
        if self._is_over:
            return
        for transfer in self.earlier:
            transfer.finish()
        self._is_over, self._seconds, self._error = True, seconds, error
        self._transport.move(self)

    def is_done(self) -> bool:
        """See Transfer."""
        self._transport.pace.poll()
        if self._is_over:
            self._transport.settle(self)
        return self._is_over

    def wait(self) -> None:
        """See Transfer."""
        if not self._is_over:
            self._waited_s += self._transport.pace.wait(self)
        self._transport.settle(self)

    @property
    def error(self) -> str | None:
        """See Transfer."""
        return self._error

    @property
    def seconds(self) -> float:
        """See Transfer: as the pace had it."""
        return self._seconds

    @property
    def waited_s(self) -> float:
        """See Transfer: as the pace had it."""
        return self._waited_s


class CopyPace(Protocol):
    """Decides when transfers complete, by calling `ScriptedTransfer.finish`."""

    def start(self, transfer: ScriptedTransfer) -> None:
        """A transfer was asked for."""
        ...

    def poll(self) -> None:
        """Finish what is complete by now."""
        ...

    def wait(self, transfer: ScriptedTransfer) -> float:
        """Finish it, however long that takes; returns how many seconds it took."""
        ...


class AtOnce:
    """Every transfer is complete when `start` returns."""

    def start(self, transfer: ScriptedTransfer) -> None:
        """See CopyPace."""
        transfer.finish()

    def poll(self) -> None:
        """Nothing is ever under way."""

    def wait(self, transfer: ScriptedTransfer) -> float:
        """See CopyPace."""
        transfer.finish()
        return 0.0


class ScriptedTransport:
    """Implements `runner.KvTransport` between two lists of blocks, which it shares."""

    def __init__(
        self, device_blocks: list[CellBlock], host_blocks: list[CellBlock], pace: CopyPace
    ) -> None:
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self.pace = pace
        self._under_way: list[ScriptedTransfer] = []
        self._is_closed = False
        self._broken: str | None = None

    @property
    def num_under_way(self) -> int:
        """Transfers that their caller does not know to be over."""
        return len(self._under_way)

    def start(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> ScriptedTransfer:
        """See KvTransport. Raises RuntimeError for copies that break a rule."""
        if self._is_closed:
            raise RuntimeError("the transport is closed")
        self._check_rules()
        self._check(direction, copies)
        transfer = ScriptedTransfer(self, direction, copies, ())
        earlier = [other for other in self._under_way if transfer.shares_block(other)]
        for other in earlier:
            shared = transfer.targets & other.targets
            if other.direction is direction and shared:
                tier = "host" if direction is _OFFLOAD else "device"
                raise self._break(f"{tier} block {min(shared)} is the target of another copy")
        transfer.earlier = tuple(earlier)
        self._under_way.append(transfer)
        try:
            self.pace.start(transfer)
        except BaseException:
            self._under_way.remove(transfer)
            raise
        return transfer

    def close(self) -> None:
        """See KvTransport."""
        self._is_closed = True
        for transfer in list(self._under_way):
            transfer.wait()

    def settle(self, transfer: ScriptedTransfer) -> None:
        """The caller of `transfer` knows that it, and what had to come before it, is over."""
        if not transfer.is_over:
            raise RuntimeError("the pace came back from waiting with a copy under way")
        for other in transfer.earlier:
            self.settle(other)
        transfer.earlier = ()
        if transfer in self._under_way:
            self._under_way.remove(transfer)

    def move(self, transfer: ScriptedTransfer) -> None:
        """Carry out the copies of a transfer that is over, or poison its targets."""
        for copy in transfer.copies:
            source, target = self._device_blocks, self._host_blocks
            ids = copy.device_block, copy.host_block
            if transfer.direction is not _OFFLOAD:
                source, target = target, source
                ids = copy.host_block, copy.device_block
            if transfer.error is not None:
                target[ids[1]] = [POISON] * len(target[ids[1]])
                continue
            if all(cell is None for cell in source[ids[0]]):
                raise self._break(f"{transfer.direction.value}: block {ids[0]} holds no KV")
            target[ids[1]] = list(source[ids[0]])

    def check_device_use(self, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Raises RuntimeError if the runner must not use these device blocks now."""
        self._check_rules()
        if not self._under_way:
            return
        targets: set[int] = set()
        sources: set[int] = set()
        for transfer in self._under_way:
            blocks = sources if transfer.direction is _OFFLOAD else targets
            blocks.update(copy.device_block for copy in transfer.copies)
        writes = list(writes)
        for block in (*reads, *writes):
            if block in targets:
                raise self._break(f"device block {block} is used before its copy is complete")
        for block in writes:
            if block in sources:
                raise self._break(f"device block {block} is written while it is copied")

    def _check(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> None:
        if not copies:
            raise self._break("a transfer of nothing")
        for tier, blocks, ids in (
            ("device", self._device_blocks, [copy.device_block for copy in copies]),
            ("host", self._host_blocks, [copy.host_block for copy in copies]),
        ):
            for block in ids:
                if not 0 <= block < len(blocks):
                    raise self._break(f"there is no {tier} block {block}")
                if ids.count(block) > 1:
                    raise self._break(f"{tier} block {block} twice in a transfer")

    def _break(self, rule: str) -> RuntimeError:
        self._broken = self._broken or rule
        return RuntimeError(rule)

    def _check_rules(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
