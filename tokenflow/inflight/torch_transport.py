"""Copies between device KV and host KV by a thread, where the CPU computes.

Owns the copying thread of a CPU engine and the order of copies; runs are torch_runs.py's, and
`torch_streams.py` is the counterpart for CUDA.

Invariants: runs are made one at a time; those of a transfer only when every earlier transfer that
shares a block with it is done, and else in no particular order: the thread takes the two directions
in turn, as the streams of a device would; a transfer is done only when nothing writes its targets
any more, be it complete or failed; a failed one does not touch those behind it.

The thread must not fight the model's for the cores. It copies with numpy, which lets go of the GIL
like torch, copies a run with the C library's memcpy, and brings no team of threads of its own
(torch's number of threads can only be set for the whole process). And it runs at low priority: at
the same one as the model's threads, copies that last as long as a step make it twice as long, since
the model's threads wait for each other; at `_NICENESS` a tenth longer. Nor for the memory: a
decode step reads the model's weights at the speed of the memory, and copies without a break take a
quarter of that, so the thread rests between runs and copies `_SHARE` of its time. What waits for a
transfer makes its copies itself, at its own priority, without rests and without a switch of
threads, and no others: a step that needs one block must not make a long write-through first. The
thread stands aside meanwhile.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Protocol

import numpy as np

from tokenflow.errors import InternalError
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_memory import ByteRows
from tokenflow.inflight.torch_runs import CopyRun, plan_runs, split_runs

_NICENESS = 10
"""Of the thread: a tenth of a core where others want all of it, a whole one where it is idle."""

_SHARE = 0.15
"""Of the time in which the thread copies while it has something to copy: on a machine that copies
10 GB/s a decode step takes 5 to 10 % longer meanwhile, at twice the share 15 %
(`python -m perf.kv_tiers --section steps`). It still is more than 100 MB in a decode step."""

_MAX_RUN_BYTES = 4 << 20
"""A waiting thread cannot take over a run that was begun; this much takes half a millisecond."""


class TierMemory(Protocol):
    """Both pools, as a thread copies between them."""

    @property
    def num_device_blocks(self) -> int:
        """Blocks of the device pool."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        """Make one copy; complete when it returns. May raise, then the target holds rubbish."""
        ...


class ArrayMemory:
    """Both pools in memory that the CPU addresses."""

    def __init__(self, device: ByteRows, host: ByteRows) -> None:
        self._device = device
        self._host = host

    @property
    def num_device_blocks(self) -> int:
        """See TierMemory."""
        return len(self._device)

    @property
    def num_host_blocks(self) -> int:
        """See TierMemory."""
        return len(self._host)

    @property
    def block_bytes(self) -> int:
        """See TierMemory."""
        return self._device.shape[1]

    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        """See TierMemory."""
        device = self._device[run.device_block : run.device_block + run.num_blocks]
        host = self._host[run.host_block : run.host_block + run.num_blocks]
        if direction is CopyDirection.OFFLOAD:
            np.copyto(host, device)
        else:
            np.copyto(device, host)


class ThreadTransfer:
    """A transfer of a `ThreadTransport`. Implements `runner.Transfer`.

    behind: earlier transfers that share a block with it.
    error, seconds: written before it is done and final from then on. `seconds` is the time inside
    copies, whichever thread makes them. waited_s: see Transfer.
    """

    def __init__(
        self,
        direction: CopyDirection,
        copies: Sequence[TierCopy],
        runs: Sequence[CopyRun],
        behind: Sequence[ThreadTransfer],
        transport: ThreadTransport,
    ) -> None:
        self._direction = direction
        self._device_blocks = {copy.device_block for copy in copies}
        self._host_blocks = {copy.host_block for copy in copies}
        self._runs = deque(runs)
        self._behind = list(behind)
        self._transport = transport
        self._is_done = not runs
        self.error: str | None = None
        self.seconds = 0.0
        self.waited_s = 0.0

    def is_done(self) -> bool:
        """See Transfer."""
        return self._is_done

    def wait(self) -> None:
        """See Transfer. The calling thread makes the copies, and those this one is behind."""
        if self._is_done:
            return
        start = time.perf_counter()
        self._transport.finish(self)
        self.waited_s += time.perf_counter() - start

    def shares_block(self, device_blocks: Set[int], host_blocks: Set[int]) -> bool:
        """True if it touches one of these blocks."""
        return not (
            self._device_blocks.isdisjoint(device_blocks)
            and self._host_blocks.isdisjoint(host_blocks)
        )

    def first_due(self) -> ThreadTransfer:
        """The one to be copied first, so that this one gets done: itself or one it is behind."""
        due = self
        while True:
            due._behind = [transfer for transfer in due._behind if not transfer.is_done()]
            if not due._behind:
                return due
            due = due._behind[0]

    def copy_next(self, memory: TierMemory) -> None:
        """Make one copy. A failure is kept here, and raised only when it stops the whole process
        (an interrupt of a thread that waits)."""
        start = time.perf_counter()
        try:
            memory.copy(self._direction, self._runs.popleft())
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.seconds += time.perf_counter() - start
            self._is_done = not self._runs

    def fail(self, error: BaseException) -> None:
        """Leave out the copies that are not made yet."""
        self.error = str(error) or type(error).__name__
        self._runs.clear()


class ThreadTransport:
    """Copies in a thread of its own. Implements `runner.KvTransport`.

    What a step wrote before `start` is in memory when `start` hands the transfer over, and what a
    transfer wrote is when its `is_done` or `wait` says so.
    """

    def __init__(self, memory: TierMemory, rest: Callable[[float], None] = time.sleep) -> None:
        """rest: how the thread rests between its copies, for so many seconds."""
        self._memory: TierMemory | None = memory
        self._rest = rest
        self._max_blocks = max(1, _MAX_RUN_BYTES // memory.block_bytes)
        self._under_way: list[ThreadTransfer] = []  # the starting thread's own
        self._queues = {direction: deque[ThreadTransfer]() for direction in CopyDirection}
        self._turns = deque(CopyDirection)
        self._copying = threading.Lock()
        self._is_awaited = False
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-copies", daemon=True)
        self._thread.start()

    def start(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> ThreadTransfer:
        """See KvTransport. Raises InternalError after `close`."""
        if self._memory is None:
            raise InternalError("a transfer was started after the transport was closed")
        sizes = self._memory.num_device_blocks, self._memory.num_host_blocks
        try:
            runs = split_runs(plan_runs(copies, *sizes), self._max_blocks)
        except ValueError as error:
            refused = ThreadTransfer(direction, (), (), (), self)
            refused.fail(error)
            return refused
        blocks = {copy.device_block for copy in copies}, {copy.host_block for copy in copies}
        self._under_way = [transfer for transfer in self._under_way if not transfer.is_done()]
        behind = [transfer for transfer in self._under_way if transfer.shares_block(*blocks)]
        transfer = ThreadTransfer(direction, copies, runs, behind, self)
        if runs:
            self._under_way.append(transfer)
            self._queues[direction].append(transfer)
            self._wake.put(True)
        return transfer

    def finish(self, transfer: ThreadTransfer) -> None:
        """Make the copies that `transfer` needs, in the calling thread, and no others."""
        self._is_awaited = True  # else the thread could take the lock again and again
        try:
            while not transfer.is_done():
                with self._copying:
                    if not transfer.is_done():
                        self._copy_one(transfer)
        finally:
            self._is_awaited = False
            self._wake.put(True)

    def close(self) -> None:
        """See KvTransport."""
        if self._memory is None:
            return
        while self._copy_in_turn():
            pass
        self._wake.put(False)
        self._thread.join()
        self._memory = None

    def _copy_in_turn(self) -> bool:
        """Make one copy of a direction that has some; False if there is none to make now."""
        with self._copying:
            if self._is_awaited:
                return False
            for _ in CopyDirection:
                transfers = self._queues[self._turns[0]]
                self._turns.rotate()
                while transfers and transfers[0].is_done():
                    transfers.popleft()
                if transfers:
                    self._copy_one(transfers[0])
                    return True
            return False

    def _copy_one(self, transfer: ThreadTransfer) -> None:
        """One of the copies that `transfer` needs; with the lock."""
        assert self._memory is not None, "closed with a transfer under way"
        transfer.first_due().copy_next(self._memory)

    def _work(self) -> None:
        """The thread."""
        os.nice(_NICENESS)  # on Linux it is the thread's own
        while self._wake.get():
            start = time.thread_time()  # not the time it had no core: then nothing was taken
            while self._copy_in_turn():
                end = time.thread_time()
                self._rest((end - start) * (1 / _SHARE - 1))
                start = time.thread_time()
