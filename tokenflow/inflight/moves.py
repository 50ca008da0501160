"""Copies that a step has to make before it computes: recorded one by one, made in batches.

Owns their order. Allocation records copies while it hands blocks out; a block that was read or
written by one may be given away and be the source or target of a later one. Each copy gets the
first level behind those it depends on; everything of one level is independent and goes as one batch
per kind. Whatever order is taken, each copy reads what its source held when it was recorded.

A copy that fails, or whose source is the target of one that failed, leaves its target without
content; `MoveResult` says which blocks those are.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenflow.inflight.runner import BlockCopy, CopyDirection, KvTransport, TierCopy, Transfer


class _Kind(enum.Enum):
    OFFLOAD = CopyDirection.OFFLOAD
    ONBOARD = CopyDirection.ONBOARD
    COPY = "device to device"


_DEVICE, _HOST = 0, 1
_Place = tuple[int, int]
"""Tier and block."""


class _Move(msgspec.Struct, frozen=True):
    kind: _Kind
    source: _Place
    target: _Place
    num_tokens: int = 0


@dataclass(slots=True)
class MoveResult:
    """What `StepMoves.run` did.

    bad_device, bad_host: blocks that should have been written and hold nothing.
    error: why the first copy failed. failure: what copying inside the device raised.
    num_offloads, num_onboards: blocks copied; num_failed_*: not. *_s: time the copies took.
    """

    bad_device: set[int] = field(default_factory=set)
    bad_host: set[int] = field(default_factory=set)
    error: str | None = None
    failure: Exception | None = None
    num_offloads: int = 0
    num_onboards: int = 0
    num_failed_offloads: int = 0
    num_failed_onboards: int = 0
    offload_s: float = 0.0
    onboard_s: float = 0.0
    wait_s: float = 0.0


class StepMoves:
    """Records copies and makes them."""

    def __init__(self) -> None:
        self._levels: dict[int, list[_Move]] = defaultdict(list)
        self._last_write: dict[_Place, int] = {}
        self._last_read: dict[_Place, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values())) if self._levels else 0

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of a device block into another one."""
        self._record(_Move(_Kind.COPY, (_DEVICE, source), (_DEVICE, target), num_tokens))

    def offload(self, device_slot: int, host_slot: int) -> None:
        """A device block into a host block."""
        self._record(_Move(_Kind.OFFLOAD, (_DEVICE, device_slot), (_HOST, host_slot)))

    def onboard(self, host_slot: int, device_slot: int) -> None:
        """A host block into a device block."""
        self._record(_Move(_Kind.ONBOARD, (_HOST, host_slot), (_DEVICE, device_slot)))

    def run(
        self, copy_blocks: Callable[[Sequence[BlockCopy]], None], transport: KvTransport | None
    ) -> MoveResult:
        """Make everything recorded; returns when all of it is done. Does not raise for copies that
        fail. transport: may be None where nothing was recorded between tiers."""
        levels = [self._levels[level] for level in sorted(self._levels)]
        self._levels, self._last_write, self._last_read = defaultdict(list), {}, {}
        batches = _Batches(copy_blocks, transport)
        for moves in levels:
            batches.start(moves)
        batches.wait()
        return batches.result

    def _record(self, move: _Move) -> None:
        before = max(
            self._last_write.get(move.source, -1),
            self._last_write.get(move.target, -1),
            self._last_read.get(move.target, -1),
        )
        if move.kind is not _Kind.COPY:  # a transfer names a block once
            before = max(before, self._last_read.get(move.source, -1))
        level = before + 1
        self._levels[level].append(move)
        self._last_write[move.target] = level
        self._last_read[move.source] = max(level, self._last_read.get(move.source, -1))


class _Batches:
    """Makes one level of moves after the other.

    A transfer sees what earlier ones left in the blocks that they share, so nothing is waited for
    between levels, but where the device copies (which knows nothing of transfers) or a block is
    the target of two. What came of each move is settled in the order of the levels, at the waits.
    """

    def __init__(
        self,
        copy_blocks: Callable[[Sequence[BlockCopy]], None],
        transport: KvTransport | None,
    ) -> None:
        self._copy_blocks = copy_blocks
        self._transport = transport
        self._under_way: list[tuple[list[_Move], Transfer | str]] = []
        self._targets: set[_Place] = set()
        self.result = MoveResult()

    def start(self, moves: Sequence[_Move]) -> None:
        """Begin a level; its moves are independent of each other."""
        copies = [move for move in moves if move.kind is _Kind.COPY]
        if copies or not self._targets.isdisjoint(move.target for move in moves):
            self.wait()
        for direction in CopyDirection:
            kind = _Kind(direction)
            batch = [m for m in moves if m.kind is kind and not _poisoned(m, self.result)]
            if batch:
                assert self._transport is not None
                self._under_way.append((batch, _start(self._transport, direction, batch)))
                self._targets.update(move.target for move in batch)
        copies = [move for move in copies if not _poisoned(move, self.result)]
        if copies:
            _run_copies(copies, self._copy_blocks, self.result)

    def wait(self) -> None:
        """Wait for everything begun so far."""
        for batch, transfer in self._under_way:
            _finish(batch, transfer, self.result)
        self._under_way.clear()
        self._targets.clear()


def _poisoned(move: _Move, result: MoveResult) -> bool:
    """True if what `move` would read is not there; its target then holds nothing either."""
    if not _source_is_bad(move, result):
        return False
    _mark(move, result)
    _count(result, [move], failed=True)
    return True


def _source_is_bad(move: _Move, result: MoveResult) -> bool:
    tier, slot = move.source
    return slot in (result.bad_device if tier == _DEVICE else result.bad_host)


def _start(
    transport: KvTransport, direction: CopyDirection, batch: Sequence[_Move]
) -> Transfer | str:
    """The transfer, or why there is none."""
    offload = direction is CopyDirection.OFFLOAD
    copies = [
        TierCopy(m.source[1], m.target[1]) if offload else TierCopy(m.target[1], m.source[1])
        for m in batch
    ]
    try:
        return transport.start(direction, copies)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _finish(batch: Sequence[_Move], transfer: Transfer | str, result: MoveResult) -> None:
    error: str | None
    if isinstance(transfer, str):
        error = transfer
    else:
        transfer.wait()
        error = transfer.error
        result.wait_s += transfer.waited_s
        if batch[0].kind is _Kind.OFFLOAD:
            result.offload_s += transfer.seconds
        else:
            result.onboard_s += transfer.seconds
    made: list[_Move] = []
    failed: list[_Move] = []
    for move in batch:
        is_made = error is None and not _source_is_bad(move, result)
        (made if is_made else failed).append(move)
    for move in failed:
        _mark(move, result)
    for move in made:
        _unmark(move, result)
    result.error = result.error or error
    _count(result, made, failed=False)
    _count(result, failed, failed=True)


def _run_copies(
    moves: Sequence[_Move],
    copy_blocks: Callable[[Sequence[BlockCopy]], None],
    result: MoveResult,
) -> None:
    try:
        copy_blocks([BlockCopy(m.source[1], m.target[1], m.num_tokens) for m in moves])
    except Exception as error:
        result.failure = result.failure or error
        for move in moves:
            _mark(move, result)
        return
    for move in moves:
        _unmark(move, result)


def _mark(move: _Move, result: MoveResult) -> None:
    tier, slot = move.target
    (result.bad_device if tier == _DEVICE else result.bad_host).add(slot)


def _unmark(move: _Move, result: MoveResult) -> None:
    tier, slot = move.target
    (result.bad_device if tier == _DEVICE else result.bad_host).discard(slot)


def _count(result: MoveResult, moves: Sequence[_Move], *, failed: bool) -> None:
    if not moves:
        return
    num_offloads = sum(move.kind is _Kind.OFFLOAD for move in moves)
    num_onboards = sum(move.kind is _Kind.ONBOARD for move in moves)
    if failed:
        result.num_failed_offloads += num_offloads
        result.num_failed_onboards += num_onboards
    else:
        result.num_offloads += num_offloads
        result.num_onboards += num_onboards
