"""Copies between device KV and host KV: what to copy, and the thread that does it on CPUs.

Owns the plan of a transfer and the copying thread of a CPU engine. `torch_streams.py` is the
counterpart for CUDA. Both pools are block-major, so that a block is one run of bytes in either and
a transfer is a few plain memory copies.

Invariants: runs are made one at a time in the order in which their transfers were started, so that
transfers that share a block need no further care; a transfer is done only when nothing writes its
targets any more, be it complete or failed; a failed one does not touch those behind it.

The thread must not fight the model's for the cores. It copies with numpy, which lets go of the GIL
like torch, copies a run with the C library's memcpy, and brings no team of threads of its own
(torch's number of threads can only be set for the whole process). And it runs at low priority: at
the same one as the model's threads, copies that last as long as a step make it twice as long, since
the model's threads wait for each other; at `_NICENESS` a tenth longer. What waits for a transfer
therefore makes the copies itself, at its own priority and without a switch of threads.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenflow.errors import InternalError
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_memory import ByteRows

_NICENESS = 10
"""Of the thread: a tenth of a core where others want all of it, a whole one where it is idle."""

_MAX_RUN_BYTES = 4 << 20
"""A waiting thread cannot take over a run that was begun; this much takes half a millisecond."""


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Blocks that follow each other in both pools: one plain copy."""

    device_block: int
    host_block: int
    num_blocks: int


def plan_runs(
    copies: Sequence[TierCopy], num_device_blocks: int, num_host_blocks: int
) -> list[CopyRun]:
    """The fewest runs that make all copies, by ascending host block.

    The blocks of one transfer are all different, so the order of its copies is free. Raises
    ValueError for a block that its pool does not have or that is named twice.
    """
    _check_blocks("device", [copy.device_block for copy in copies], num_device_blocks)
    _check_blocks("host", [copy.host_block for copy in copies], num_host_blocks)
    ordered = sorted(copies, key=lambda copy: copy.host_block)
    runs = []
    # Along a run both block ids grow like the position, so their distances to it stay the same.
    for _, members in itertools.groupby(
        enumerate(ordered),
        lambda item: (item[1].host_block - item[0], item[1].device_block - item[0]),
    ):
        run = [copy for _, copy in members]
        runs.append(CopyRun(run[0].device_block, run[0].host_block, len(run)))
    return runs


def split_runs(runs: Sequence[CopyRun], max_blocks: int) -> list[CopyRun]:
    """The same copies in runs of at most `max_blocks`."""
    return [
        CopyRun(
            run.device_block + first,
            run.host_block + first,
            min(max_blocks, run.num_blocks - first),
        )
        for run in runs
        for first in range(0, run.num_blocks, max_blocks)
    ]


def _check_blocks(pool: str, block_ids: list[int], num_blocks: int) -> None:
    if not block_ids:
        return
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        wrong = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise ValueError(f"{pool} block {wrong} is not in [0, {num_blocks})")
    if len(set(block_ids)) < len(block_ids):
        raise ValueError(f"a {pool} block is named twice in one transfer")


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

    error, seconds: written before it is done and final from then on. `seconds` is the time inside
    copies, whichever thread makes them. waited_s: see Transfer.
    """

    def __init__(
        self, direction: CopyDirection, runs: Sequence[CopyRun], transport: ThreadTransport
    ) -> None:
        self._direction = direction
        self._runs = deque(runs)
        self._transport = transport
        self._is_done = not runs
        self.error: str | None = None
        self.seconds = 0.0
        self.waited_s = 0.0

    def is_done(self) -> bool:
        """See Transfer."""
        return self._is_done

    def wait(self) -> None:
        """See Transfer. The calling thread makes copies, those of earlier transfers first."""
        if self._is_done:
            return
        start = time.perf_counter()
        while not self._is_done:
            self._transport.copy_next()
        self.waited_s += time.perf_counter() - start

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
    """Copies in a thread of its own, first come first served. Implements `runner.KvTransport`.

    What a step wrote before `start` is in memory when `start` hands the transfer over, and what a
    transfer wrote is when its `is_done` or `wait` says so.
    """

    def __init__(self, memory: TierMemory) -> None:
        self._memory: TierMemory | None = memory
        self._max_blocks = max(1, _MAX_RUN_BYTES // memory.block_bytes)
        self._under_way: deque[ThreadTransfer] = deque()
        self._copying = threading.Lock()
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
            refused = ThreadTransfer(direction, (), self)
            refused.fail(error)
            return refused
        transfer = ThreadTransfer(direction, runs, self)
        if runs:
            self._under_way.append(transfer)
            self._wake.put(True)
        return transfer

    def copy_next(self) -> bool:
        """Make the next copy of the oldest transfer under way, in the calling thread; False if
        there is none."""
        with self._copying:
            if not self._under_way:
                return False
            assert self._memory is not None, "closed with a transfer under way"
            transfer = self._under_way[0]
            try:
                transfer.copy_next(self._memory)
            finally:
                if transfer.is_done():
                    self._under_way.popleft()
            return True

    def close(self) -> None:
        """See KvTransport."""
        if self._memory is None:
            return
        while self.copy_next():
            pass
        self._wake.put(False)
        self._thread.join()
        self._memory = None

    def _work(self) -> None:
        """The thread."""
        os.nice(_NICENESS)  # on Linux it is the thread's own
        while self._wake.get():
            while self.copy_next():
                pass
