"""Copies between device KV and host KV on a device's own copy queues.

Owns the order of copies on two streams, one for each direction, against each other and against the
steps. The streams come through a seam (`CopyStream`, `Mark`): `torch_cuda.py` implements it with
CUDA streams and events, tests with queues that run in any order the marks allow.

Invariants: a copy begins after everything that the compute stream had been given when its transfer
was started, because its source may still be written and its target still be read by then; transfers
of one direction run in order; a transfer that shares a block with an earlier one of the other
direction begins after that one; a transfer is done only when nothing of it is under way, also when
it failed halfway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenflow.errors import InternalError
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_runs import CopyRun, plan_runs


class Mark(Protocol):
    """A point in a stream. Its methods raise RuntimeError when the device has failed."""

    def is_reached(self) -> bool:
        """True once everything before it is complete; never blocks."""
        ...

    def wait(self) -> None:
        """Return when it is reached."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks of one stream, both reached."""
        ...


class CopyStream(Protocol):
    """An in-order queue of copies. Nothing here waits for the device."""

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on begins after `mark`, which may be another stream's."""
        ...

    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        """Queue one copy. Raises RuntimeError when the device does not take it."""
        ...

    def mark(self) -> Mark:
        """The present end of the queue."""
        ...


class StreamTransfer:
    """A transfer on a stream. Implements `runner.Transfer`.

    error: why not all of its copies were queued.
    begin, end: marks around its copies; None where none was queued.
    """

    def __init__(
        self,
        copies: Sequence[TierCopy],
        begin: Mark | None,
        end: Mark | None,
        error: str | None,
    ) -> None:
        self._device_blocks = {copy.device_block for copy in copies}
        self._host_blocks = {copy.host_block for copy in copies}
        self._begin = begin
        self._end = end
        self._error = error
        self._seconds = 0.0
        self._waited_s = 0.0

    @property
    def error(self) -> str | None:
        """See Transfer."""
        return self._error

    @property
    def seconds(self) -> float:
        """See Transfer. Waiting for other streams is left out."""
        return self._seconds

    @property
    def waited_s(self) -> float:
        """See Transfer."""
        return self._waited_s

    def is_done(self) -> bool:
        """See Transfer."""
        if self._end is None:
            return True
        try:
            if self._end.is_reached():
                self._finish()
        except RuntimeError as error:
            self._fail(error)
        return self._end is None

    def wait(self) -> None:
        """See Transfer."""
        if self._end is None:
            return
        start = time.perf_counter()
        try:
            self._end.wait()
            self._finish()
        except RuntimeError as error:
            self._fail(error)
        self._waited_s += time.perf_counter() - start

    def put_before(self, stream: CopyStream) -> None:
        """Let `stream` go on only behind this transfer."""
        if self._end is not None:
            stream.wait_for(self._end)

    def shares_block(self, other: Sequence[TierCopy]) -> bool:
        """True if one of `other` touches a block that this transfer touches."""
        return any(
            copy.device_block in self._device_blocks or copy.host_block in self._host_blocks
            for copy in other
        )

    def _finish(self) -> None:
        """Take the time and let the marks go."""
        assert self._begin is not None
        assert self._end is not None
        self._seconds = self._end.seconds_since(self._begin)
        self._begin = self._end = None

    def _fail(self, error: RuntimeError) -> None:
        """The device has failed: nothing runs on it any more."""
        self._error = self._error or str(error)
        self._begin = self._end = None


class StreamTransport:
    """Copies on one stream for each direction. Implements `runner.KvTransport`.

    compute_mark: gives the present end of the stream that steps run on.
    release: gives the host pool back; called once, by `close`, when nothing is under way.
    """

    def __init__(
        self,
        streams: Mapping[CopyDirection, CopyStream],
        compute_mark: Callable[[], Mark],
        num_device_blocks: int,
        num_host_blocks: int,
        release: Callable[[], None],
    ) -> None:
        self._streams = streams
        self._compute_mark = compute_mark
        self._sizes = num_device_blocks, num_host_blocks
        self._release: Callable[[], None] | None = release
        self._under_way: dict[CopyDirection, deque[StreamTransfer]] = {
            direction: deque() for direction in CopyDirection
        }

    def start(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> StreamTransfer:
        """See KvTransport. Raises InternalError after `close`."""
        if self._release is None:
            raise InternalError("a transfer was started after the transport was closed")
        self._forget_done()
        try:
            runs = plan_runs(copies, *self._sizes)
        except ValueError as error:
            return StreamTransfer(copies, None, None, str(error))
        transfer = self._queue(direction, copies, runs)
        self._under_way[direction].append(transfer)
        return transfer

    def close(self) -> None:
        """See KvTransport."""
        if self._release is None:
            return
        for transfers in self._under_way.values():
            for transfer in transfers:
                transfer.wait()
            transfers.clear()
        self._release()
        # Streams and `release` refer to the pools.
        self._streams, self._release = {}, None

    def _queue(
        self, direction: CopyDirection, copies: Sequence[TierCopy], runs: Sequence[CopyRun]
    ) -> StreamTransfer:
        """Queue the copies between two marks. What was queued before a failure stays under way:
        the transfer is done behind it."""
        stream = self._streams[direction]
        begin = end = None
        problem = None
        try:
            stream.wait_for(self._compute_mark())
            self._wait_for_shared(stream, direction, copies)
            begin = stream.mark()
            for run in runs:
                stream.copy(direction, run)
        except Exception as error:
            problem = str(error) or type(error).__name__
        if begin is not None:
            try:
                end = stream.mark()
            except RuntimeError as error:
                problem = problem or str(error)
        return StreamTransfer(copies, begin, end, problem)

    def _wait_for_shared(
        self, stream: CopyStream, direction: CopyDirection, copies: Sequence[TierCopy]
    ) -> None:
        """Go on behind the latest transfer of the other direction that shares a block; those before
        it on its stream are complete by then."""
        for other, transfers in self._under_way.items():
            if other is direction:
                continue
            for transfer in reversed(transfers):
                if transfer.shares_block(copies):
                    transfer.put_before(stream)
                    break

    def _forget_done(self) -> None:
        for transfers in self._under_way.values():
            while transfers and transfers[0].is_done():
                transfers.popleft()
