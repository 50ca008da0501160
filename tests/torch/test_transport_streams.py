"""Copies on streams: whatever order the device picks, content is that of copies made in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.transport_driving import (
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    Action,
    actions,
    apply,
    new_pools,
)
from tokenflow.errors import CapacityError, InternalError
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_cuda import pin
from tokenflow.inflight.torch_runs import CopyRun
from tokenflow.inflight.torch_streams import Mark, StreamTransport
from tokenflow.inflight.torch_transport import ArrayMemory

pytestmark = pytest.mark.torch

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD


class Queue:
    """A stream whose work is done when the test says so. Implements CopyStream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.waiting: deque[Callable[[], None] | QueueMark] = deque()
        self.num_queued = self.num_done = 0

    def put(self, work: Callable[[], None] | QueueMark) -> None:
        self.waiting.append(work)
        self.num_queued += 1

    def step(self) -> bool:
        """Do the first thing in the queue; False if there is none or it must wait."""
        if not self.waiting:
            return False
        work = self.waiting[0]
        if isinstance(work, QueueMark):
            if not work.is_passed():
                return False
        else:
            work()
        self.waiting.popleft()
        self.num_done += 1
        self.device.time += 0.5
        return True

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, QueueMark)
        self.put(mark)

    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        self.device.count_copy()
        self.put(lambda: self.device.memory.copy(direction, run))

    def mark(self) -> QueueMark:
        self.device.check()
        mark = QueueMark(self, self.num_queued + 1)
        self.put(mark.stamp)
        return mark


@dataclass(eq=False)
class QueueMark:
    """Implements Mark. time: when the queue came to it."""

    queue: Queue
    position: int
    time: float = 0.0

    def stamp(self) -> None:
        self.time = self.queue.device.time

    def is_passed(self) -> bool:
        return self.queue.num_done >= self.position

    def is_reached(self) -> bool:
        self.queue.device.check()
        return self.is_passed()

    def wait(self) -> None:
        while not self.is_reached():
            assert self.queue.device.step_any(), "a wait that nothing will end"

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, QueueMark)
        return self.time - earlier.time


@dataclass
class Device:
    """Three queues over one memory. fails_at: number of the copy that is not taken.
    is_lost: marks raise from then on."""

    memory: ArrayMemory
    fails_at: int = 0
    is_lost: bool = False
    num_copies: int = 0
    time: float = 0.0
    queues: list[Queue] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues = [Queue(self) for _ in range(3)]

    @property
    def compute(self) -> Queue:
        return self.queues[2]

    def step_any(self) -> bool:
        return any(queue.step() for queue in self.queues)

    def count_copy(self) -> None:
        self.num_copies += 1
        if self.num_copies == self.fails_at:
            raise RuntimeError("the queue is full")

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("the device is lost")

    def open(self, release: Callable[[], None] = lambda: None) -> StreamTransport:
        return StreamTransport(
            {OFFLOAD: self.queues[0], ONBOARD: self.queues[1]},
            self.compute.mark,
            NUM_DEVICE_BLOCKS,
            NUM_HOST_BLOCKS,
            release,
        )


_STEPS = st.lists(st.integers(0, 2), max_size=6)
_WRITES = st.lists(st.integers(0, NUM_DEVICE_BLOCKS - 1), max_size=2)


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.tuples(_WRITES, actions(), _STEPS), max_size=10), seed=st.integers(0, 9))
def test_content_is_that_of_copies_in_order_whatever_order_the_device_picks(
    data: list[tuple[list[int], Action, list[int]]], seed: int
) -> None:
    device_pool, host_pool = new_pools(seed)
    want_device, want_host = device_pool.copy(), host_pool.copy()
    device = Device(ArrayMemory(device_pool, host_pool))
    transport = device.open()
    started = []
    for number, (writes, action, steps) in enumerate(data):
        busy = {
            copy.device_block
            for transfer, (_, copies) in started
            if not transfer.is_done()
            for copy in copies
        }
        for block in set(writes) - busy:  # as a step does: never into a transfer's blocks
            value = 100 + number
            device.compute.put(lambda row=device_pool[block], v=value: row.fill(v))
            want_device[block] = value
        started.append((transport.start(*action), action))
        apply(action, want_device, want_host)
        for queue in steps:
            device.queues[queue].step()
    transport.close()
    assert all(transfer.is_done() and transfer.error is None for transfer, _ in started)
    assert all(transfer.seconds > 0 for transfer, _ in started)
    while device.step_any():
        pass
    np.testing.assert_array_equal(device_pool, want_device)
    np.testing.assert_array_equal(host_pool, want_host)


def _new_device(fails_at: int = 0) -> Device:
    return Device(ArrayMemory(*new_pools()), fails_at)


def test_independent_transfers_of_both_directions_run_beside_each_other() -> None:
    device = _new_device()
    transport = device.open()
    first = transport.start(OFFLOAD, [TierCopy(0, 0)])
    second = transport.start(ONBOARD, [TierCopy(1, 1)])
    device.compute.step(), device.compute.step()
    while device.queues[1].step():
        pass
    assert second.is_done()
    assert not first.is_done()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((OFFLOAD, [TierCopy(0, 0)]), (ONBOARD, [TierCopy(1, 0)])),
        ((ONBOARD, [TierCopy(0, 0)]), (OFFLOAD, [TierCopy(0, 1)])),
        ((OFFLOAD, [TierCopy(0, 0)]), (ONBOARD, [TierCopy(0, 1)])),
        ((ONBOARD, [TierCopy(0, 0)]), (OFFLOAD, [TierCopy(1, 0)])),
    ],
    ids=["host read after write", "device read after write", "device write", "host write"],
)
def test_transfers_of_both_directions_that_share_a_block_keep_their_order(
    first: tuple[CopyDirection, list[TierCopy]], second: tuple[CopyDirection, list[TierCopy]]
) -> None:
    device = _new_device()
    transport = device.open()
    one, two = transport.start(*first), transport.start(*second)
    queues = {OFFLOAD: device.queues[0], ONBOARD: device.queues[1]}
    while device.compute.step() or queues[second[0]].step():
        pass
    assert not two.is_done()
    while queues[first[0]].step():
        pass
    assert one.is_done()
    two.wait()
    assert two.error is None


def test_a_transfer_is_done_only_behind_what_was_queued_before_its_failure() -> None:
    device_pool, host_pool = new_pools()
    device = Device(ArrayMemory(device_pool, host_pool), fails_at=2)
    transport = device.open()
    failed = transport.start(OFFLOAD, [TierCopy(5, 0), TierCopy(0, 1)])
    assert not failed.is_done()
    # The copy that is under way into host block 0 must not meet a later one.
    later = transport.start(ONBOARD, [TierCopy(3, 0)])
    later.wait()
    assert failed.is_done()
    assert failed.error == "the queue is full"
    assert later.error is None
    np.testing.assert_array_equal(device_pool[3], device_pool[5])


def test_a_block_that_does_not_exist_is_refused_before_anything_is_queued() -> None:
    device = _new_device()
    transport = device.open()
    refused = transport.start(ONBOARD, [TierCopy(0, 0), TierCopy(1, NUM_HOST_BLOCKS)])
    assert refused.is_done()
    assert refused.error == "host block 5 is not in [0, 5)"
    assert device.num_copies == 0
    refused.wait()
    assert transport.start(ONBOARD, [TierCopy(0, 0)]).error is None


def test_a_lost_device_fails_what_is_under_way_and_what_comes() -> None:
    device = _new_device()
    transport = device.open()
    under_way = [transport.start(OFFLOAD, [TierCopy(i, i)]) for i in range(2)]
    device.is_lost = True
    assert under_way[0].is_done()
    under_way[1].wait()
    come = transport.start(ONBOARD, [TierCopy(3, 3)])
    assert come.is_done()
    assert [transfer.error for transfer in (*under_way, come)] == ["the device is lost"] * 3
    transport.close()


def test_close_waits_and_releases_once() -> None:
    device = _new_device()
    released: list[bool] = []
    transport = device.open(lambda: released.append(transfer.is_done()))
    transfer = transport.start(OFFLOAD, [TierCopy(0, 0)])
    assert not transfer.is_done()
    transport.close()
    transport.close()
    assert released == [True]
    assert transfer.waited_s > 0
    with pytest.raises(InternalError, match="closed"):
        transport.start(OFFLOAD, [TierCopy(0, 0)])


class FakeRuntime:
    """The CUDA runtime's pinning, which fails with `code`."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls.append((pointer, size, flags))
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        raise AssertionError("nothing was registered")


def test_the_whole_pool_is_pinned_or_there_is_none() -> None:
    _, host = new_pools()
    runtime = FakeRuntime(0)
    pin(host, runtime)
    assert runtime.calls == [(host.ctypes.data, host.nbytes, 0)]
    with pytest.raises(CapacityError, match="cannot be pinned: CUDA error 2 "):
        pin(host, FakeRuntime(2))
