"""The copying thread: what lands where, in which order, and what a failure leaves."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.transport_driving import (
    BLOCK_BYTES,
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    Action,
    actions,
    apply,
    new_pools,
)
from tokenflow.errors import InternalError
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_memory import ByteRows, allocate_rows
from tokenflow.inflight.torch_runs import CopyRun, plan_runs, split_runs
from tokenflow.inflight.torch_transport import ArrayMemory, ThreadTransport, TierMemory

pytestmark = pytest.mark.torch

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD


class HookedMemory:
    """Memory that calls `before` with each run, which may wait or raise."""

    def __init__(self, device: ByteRows, host: ByteRows, before: Callable[[CopyRun], None]) -> None:
        self._memory = ArrayMemory(device, host)
        self._before = before
        self.num_device_blocks = self._memory.num_device_blocks
        self.num_host_blocks = self._memory.num_host_blocks
        self.block_bytes = self._memory.block_bytes

    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        self._before(run)
        self._memory.copy(direction, run)


@contextmanager
def opened(memory: TierMemory) -> Iterator[ThreadTransport]:
    """A transport that leaves no thread."""
    before = set(threading.enumerate())
    transport = ThreadTransport(memory)
    try:
        yield transport
    finally:
        transport.close()
    assert set(threading.enumerate()) == before


@given(copies=actions())
def test_runs_make_exactly_the_copies_and_are_maximal(copies: Action) -> None:
    runs = plan_runs(copies[1], NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    made = [
        TierCopy(run.device_block + i, run.host_block + i)
        for run in runs
        for i in range(run.num_blocks)
    ]
    assert sorted(made, key=lambda copy: copy.host_block) == made
    assert set(made) == set(copies[1])
    assert len(made) == len(copies[1])
    for one, two in itertools.pairwise(runs):
        end = one.device_block + one.num_blocks, one.host_block + one.num_blocks
        assert end != (two.device_block, two.host_block)
    pieces = split_runs(runs, 2)
    assert max(piece.num_blocks for piece in pieces) <= 2
    assert [
        TierCopy(piece.device_block + i, piece.host_block + i)
        for piece in pieces
        for i in range(piece.num_blocks)
    ] == made


@settings(max_examples=80, deadline=None)
@given(
    data=st.lists(st.tuples(actions(), st.booleans(), st.integers(0, 40)), max_size=12),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.0005]), min_size=1, max_size=5),
)
def test_any_sequence_of_transfers_leaves_what_copies_in_order_leave(
    data: list[tuple[Action, bool, int]], pauses: list[float]
) -> None:
    """Whoever is waited for, and however the thread comes along meanwhile."""
    device, host = new_pools()
    want_device, want_host = device.copy(), host.copy()
    pause = itertools.cycle(pauses)

    def dawdle(run: CopyRun) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(next(pause))

    with opened(HookedMemory(device, host, dawdle)) as transport:
        transfers = []
        for action, waits, earlier in data:
            transfers.append(transport.start(*action))
            apply(action, want_device, want_host)
            if waits:
                transfers[-1].wait()
                assert transfers[-1].is_done()
                for copy in action[1]:  # of both, nobody else has touched them since
                    for got, want, block in (
                        (device, want_device, copy.device_block),
                        (host, want_host, copy.host_block),
                    ):
                        np.testing.assert_array_equal(got[block], want[block])
            transfers[earlier % len(transfers)].wait()
    # close() finished what was under way
    assert all(transfer.is_done() and transfer.error is None for transfer in transfers)
    np.testing.assert_array_equal(device, want_device)
    np.testing.assert_array_equal(host, want_host)


def test_a_source_may_be_overwritten_once_the_transfer_is_done() -> None:
    device, host = new_pools()
    original = device[2].copy()
    with opened(ArrayMemory(device, host)) as transport:
        transfer = transport.start(OFFLOAD, [TierCopy(2, 0)])
        while not transfer.is_done():
            time.sleep(0.001)
        device[2] = 0
        back = transport.start(ONBOARD, [TierCopy(4, 0)])
        back.wait()
    np.testing.assert_array_equal(device[4], original)
    assert transfer.seconds > 0
    assert transfer.waited_s == 0


def test_start_and_is_done_do_not_block_and_transfers_keep_their_order() -> None:
    device, host = new_pools()
    gate = threading.Event()
    order: list[int] = []

    def hold(run: CopyRun) -> None:
        gate.wait(20)
        order.append(run.host_block)

    with opened(HookedMemory(device, host, hold)) as transport:
        transfers = [transport.start(OFFLOAD, [TierCopy(0, i)]) for i in (3, 1, 2)]
        assert not any(transfer.is_done() for transfer in transfers)
        threading.Timer(0.05, gate.set).start()
        transfers[2].wait()
        assert all(transfer.is_done() for transfer in transfers)
    assert order == [3, 1, 2]
    assert transfers[2].waited_s > 0
    assert transfers[0].seconds > 0.04


def test_the_directions_take_turns_and_only_shared_blocks_hold_one_up() -> None:
    device, host = new_pools()
    gate = threading.Event()
    order: list[tuple[int, int]] = []

    def hold(run: CopyRun) -> None:
        gate.wait(20)
        order.append((run.device_block, run.host_block))

    with opened(HookedMemory(device, host, hold)) as transport:
        for direction, copy in (
            (OFFLOAD, (0, 0)),
            (OFFLOAD, (1, 1)),
            (OFFLOAD, (2, 2)),
            (ONBOARD, (3, 3)),
            (ONBOARD, (4, 2)),  # what the third one copies
            (ONBOARD, (5, 4)),
        ):
            last = transport.start(direction, [TierCopy(*copy)])
        gate.set()
        deadline = time.monotonic() + 20
        while not last.is_done() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert order == [(0, 0), (3, 3), (1, 1), (2, 2), (4, 2), (5, 4)]


def test_whoever_waits_makes_what_that_needs_and_nothing_else() -> None:
    """A long write-through is under way when a step needs three blocks back."""
    num_offloads = 40
    device = np.zeros((num_offloads + 3, BLOCK_BYTES), np.uint8)
    host = np.arange(num_offloads + 3, dtype=np.uint8)[:, None].repeat(BLOCK_BYTES, axis=1)
    device[7] = 77
    mine: list[tuple[int, int]] = []
    of_thread: list[CopyRun] = []

    def be_slow(run: CopyRun) -> None:
        if threading.current_thread() is threading.main_thread():
            mine.append((run.device_block, run.host_block))
        else:
            of_thread.append(run)
            time.sleep(0.02)

    with opened(HookedMemory(device, host, be_slow)) as transport:
        out = [transport.start(OFFLOAD, [TierCopy(i, i)]) for i in range(num_offloads)]
        spare = range(num_offloads, num_offloads + 3)
        other = transport.start(ONBOARD, [TierCopy(9, 9)])
        needed = transport.start(
            ONBOARD, [TierCopy(spare[0], 41), TierCopy(spare[1], 7), TierCopy(spare[2], 42)]
        )
        num_before = len(of_thread)
        needed.wait()
        assert len(of_thread) - num_before <= 2  # it stands aside
        assert needed.is_done()
        assert set(mine) <= {(7, 7), (40, 41), (41, 7), (42, 42)}
        assert out[7].is_done()
        assert not out[-1].is_done()
        assert [int(device[i, 0]) for i in spare] == [41, 77, 42]
        # The thread goes on with the rest by itself.
        deadline = time.monotonic() + 20
        while not (out[-1].is_done() and other.is_done()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert all(transfer.is_done() for transfer in (*out, other))
        assert set(mine) <= {(7, 7), (40, 41), (41, 7), (42, 42)}


def test_whoever_waits_makes_copies_while_the_thread_is_slow() -> None:
    device, host = new_pools()
    makers: list[threading.Thread] = []

    def be_slow(run: CopyRun) -> None:
        makers.append(threading.current_thread())
        if makers[-1] is not threading.main_thread():
            time.sleep(0.2)

    with opened(HookedMemory(device, host, be_slow)) as transport:
        transfer = transport.start(
            OFFLOAD, [TierCopy(i, NUM_HOST_BLOCKS - 1 - i) for i in range(5)]
        )
        later = transport.start(OFFLOAD, [TierCopy(5, 0)])
        deadline = time.monotonic() + 20
        while not makers and time.monotonic() < deadline:
            time.sleep(0.001)
        transfer.wait()
        assert makers[0] is not threading.main_thread()
        assert threading.main_thread() in makers
        # What it did not wait for goes on without it.
        while not later.is_done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert later.is_done()
    np.testing.assert_array_equal(host[0], device[5])


def test_the_thread_yields_to_the_model_and_nothing_else_does() -> None:
    device, host = new_pools()
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []

    def look(run: CopyRun) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with opened(HookedMemory(device, host, look)) as transport:
        transfer = transport.start(OFFLOAD, [TierCopy(0, 0)])
        while not transfer.is_done():
            time.sleep(0.001)
    assert seen == [min(19, mine + 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_the_thread_rests_from_what_it_worked_and_whoever_waits_does_not() -> None:
    work_s = 0.002
    rests: list[tuple[float, threading.Thread]] = []

    def work(run: CopyRun) -> None:
        end = time.thread_time() + work_s
        while time.thread_time() < end:
            pass

    def rest(seconds: float) -> None:
        rests.append((seconds, threading.current_thread()))

    memory = HookedMemory(*new_pools(), work)
    transport = ThreadTransport(memory, rest)
    transfer = transport.start(OFFLOAD, [TierCopy(0, 0), TierCopy(2, 2), TierCopy(4, 4)])
    deadline = time.monotonic() + 20
    while len(rests) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert transfer.is_done()
    assert len(rests) == 3  # one behind each of its runs
    assert all(seconds > 3 * work_s for seconds, _ in rests)
    transport.start(OFFLOAD, [TierCopy(0, 0), TierCopy(2, 2), TierCopy(4, 4)]).wait()
    assert {thread.name for _, thread in rests} == {"kv-copies"}
    transport.close()


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([TierCopy(0, 0), TierCopy(NUM_DEVICE_BLOCKS, 1)], "device block 6 is not in [0, 6)"),
        ([TierCopy(0, 0), TierCopy(1, -1)], "host block -1 is not in [0, 5)"),
        ([TierCopy(0, 0), TierCopy(0, 1)], "a device block is named twice in one transfer"),
    ],
)
def test_a_refused_transfer_touches_nothing_and_later_ones_go_on(
    copies: list[TierCopy], message: str
) -> None:
    device, host = new_pools()
    want = host.copy()
    with opened(ArrayMemory(device, host)) as transport:
        refused = transport.start(OFFLOAD, copies)
        refused.wait()
        assert refused.is_done()
        assert refused.error == message
        np.testing.assert_array_equal(host, want)
        later = transport.start(OFFLOAD, [TierCopy(0, 0)])
        later.wait()
        assert later.error is None
    np.testing.assert_array_equal(host[0], device[0])


@pytest.mark.parametrize("error", [OSError("a page is gone"), MemoryError()])
def test_a_failed_copy_fails_its_transfer_only(error: Exception) -> None:
    device, host = new_pools()

    def fail(run: CopyRun) -> None:
        if run.host_block == 2:
            raise error

    with opened(HookedMemory(device, host, fail)) as transport:
        untouched = host[4].copy()
        failed = transport.start(OFFLOAD, [TierCopy(5, 0), TierCopy(1, 2), TierCopy(0, 4)])
        later = transport.start(OFFLOAD, [TierCopy(3, 3)])
        failed.wait()
        later.wait()
        assert failed.is_done()
        assert failed.error == (str(error) or "MemoryError")
        np.testing.assert_array_equal(host[4], untouched)
        assert later.error is None
    np.testing.assert_array_equal(host[3], device[3])


def test_an_interrupt_of_the_waiting_thread_gets_through_and_fails_the_transfer() -> None:
    device, host = new_pools()

    def interrupt(run: CopyRun) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.1)

    with opened(HookedMemory(device, host, interrupt)) as transport:
        transfer = transport.start(
            OFFLOAD, [TierCopy(i, NUM_HOST_BLOCKS - 1 - i) for i in range(5)]
        )
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        assert transfer.is_done()
        assert transfer.error == "KeyboardInterrupt"


def test_nothing_to_copy_is_done_at_once() -> None:
    with opened(ArrayMemory(*new_pools())) as transport:
        transfer = transport.start(ONBOARD, [])
        assert transfer.is_done()
        assert transfer.error is None


def test_close_is_idempotent_and_final() -> None:
    transport = ThreadTransport(ArrayMemory(*new_pools()))
    transport.close()
    transport.close()
    with pytest.raises(InternalError, match="closed"):
        transport.start(OFFLOAD, [TierCopy(0, 0)])
    assert "kv-copies" not in {thread.name for thread in threading.enumerate()}


def test_a_host_pool_takes_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    host = allocate_rows(4096, 1 << 20)
    assert host.shape == (4096, 1 << 20)
    assert host.ctypes.data % (2 << 20) == 0
    assert resident() - before < 64 << 20
    host[:8] = 1
    assert resident() - before > 6 << 20


@pytest.mark.parametrize("num_rows", [1 << 40, 1 << 60, 1 << 80])
def test_a_pool_that_cannot_be_is_a_memory_error(num_rows: int) -> None:
    with pytest.raises(MemoryError):
        allocate_rows(num_rows, BLOCK_BYTES << 10)
