"""Time in the virtual runner: steps, copies beside them, and steps that wait for copies."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.inflight.runner import CopyDirection, SequenceChunk, TierCopy
from tokenflow.inflight.virtual_runner import VirtualRunner
from tokenflow.inflight.virtual_transport import CopyCosts

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD
COSTS = CopyCosts(
    block_bytes=1000, offload_bytes_per_s=1e4, onboard_bytes_per_s=2e4, start_s=0.25
)  # 0.25 s, and 0.1 s or 0.05 s a block
CHUNK = SequenceChunk(7, (1,), 0, [0], True, 0)


def make(costs=COSTS, step_s=0.5):
    runner = VirtualRunner(lambda chunks, step: step_s, costs)
    runner.allocate_kv(100, 4, 100 if costs else 0)
    return runner


def start(runner, direction, *pairs):
    return runner.transport.start(direction, [TierCopy(*pair) for pair in pairs])


def blocks(first, count):
    return [(i, i) for i in range(first, first + count)]


def test_a_step_takes_what_the_cost_says_and_an_empty_one_hardly_any():
    runner = make()
    runner.reset(3.0)
    assert 0 < runner.step_s < 1e-3
    assert runner.now == 3.0
    assert runner.forward([CHUNK]).token_ids == [0]
    assert (runner.step_s, runner.now, runner.scheduled_ids) == (0.5, 3.5, (7,))


def test_copies_run_beside_the_steps():
    runner = make()
    runner.reset(10.0)
    transfer = start(runner, OFFLOAD, *blocks(0, 5))
    assert not transfer.is_done()
    runner.forward([CHUNK])
    assert not transfer.is_done()
    runner.reset(10.75)
    assert transfer.is_done()
    assert transfer.error is None
    assert transfer.seconds == pytest.approx(0.75)
    assert runner.wait_s == 0.0


def test_waiting_makes_the_step_longer_and_later_waits_find_time_gone_by():
    runner = make()
    runner.reset(10.0)
    first, second = start(runner, ONBOARD, (0, 0)), start(runner, ONBOARD, (1, 1))
    third = start(runner, OFFLOAD, (2, 2))
    third.wait()
    assert first.is_done()  # beside it, and shorter
    assert runner.now == pytest.approx(10.35)
    second.wait()
    second.wait()
    assert runner.wait_s == pytest.approx(0.6)
    assert (third.waited_s, first.waited_s) == (pytest.approx(0.35), 0.0)
    assert second.waited_s == pytest.approx(0.25)
    assert second.is_done()
    runner.forward([CHUNK])
    assert runner.step_s == pytest.approx(1.1)
    runner.reset(11.1)
    assert runner.wait_s == 0.0


def test_one_direction_is_a_line():
    runner = make()
    runner.reset(0.0)
    times = [start(runner, OFFLOAD, (i, i)).done_time for i in range(3)]
    assert times == pytest.approx([0.35, 0.7, 1.05])
    runner.reset(5.0)
    assert start(runner, OFFLOAD, (9, 9)).done_time == pytest.approx(5.35)


def test_a_shared_block_keeps_the_order_of_the_directions():
    runner = make()
    runner.reset(0.0)
    out = start(runner, OFFLOAD, (3, 4))
    assert start(runner, ONBOARD, (3, 9)).done_time == pytest.approx(out.done_time + 0.3)
    assert start(runner, ONBOARD, (8, 4)).done_time == pytest.approx(out.done_time + 0.6)
    runner = make()
    runner.reset(0.0)
    start(runner, OFFLOAD, (3, 4))
    assert start(runner, ONBOARD, (8, 9)).done_time == pytest.approx(0.3)


def test_a_step_that_has_computed_waits_no_more():
    runner = make()
    runner.reset(0.0)
    transfer = start(runner, OFFLOAD, *blocks(0, 20))
    runner.forward([CHUNK])
    with pytest.raises(RuntimeError, match="after it has computed"):
        transfer.wait()


def test_without_costs_there_is_no_host_tier():
    runner = make(None)
    assert runner.kv_block_bytes(4) == 1
    with pytest.raises(ValueError, match="copy_costs"):
        runner.allocate_kv(4, 4, 1)
    assert make().kv_block_bytes(4) == 1000


def contended(share, step_s=0.5):
    return make(dataclasses.replace(COSTS, onboard_bytes_per_s=1e4, duplex_share=share), step_s)


def test_the_later_direction_gets_what_the_earlier_leaves():
    """Rates are 10 blocks/s each way; both at once reach 15: the later one gets 5."""
    runner = contended(0.75)
    runner.reset(0.0)
    out = start(runner, OFFLOAD, *blocks(0, 10))  # 0.25 s, then 1 s of bytes
    back = start(runner, ONBOARD, *blocks(50, 2))
    assert out.done_time == pytest.approx(1.25)
    assert back.done_time == pytest.approx(0.25 + 2 / 5)
    later = start(runner, ONBOARD, *blocks(60, 4))  # 0.65 to 0.9 its start, to 1.25 shared
    assert later.done_time == pytest.approx(1.25 + (4 - 5 * 0.35) / 10)
    assert out.done_time == pytest.approx(1.25)  # it never moves
    assert later.seconds == pytest.approx(later.done_time - back.done_time)


def test_without_duplex_the_directions_take_turns():
    runner = contended(0.5)
    runner.reset(0.0)
    out = start(runner, OFFLOAD, *blocks(0, 10))
    assert start(runner, ONBOARD, *blocks(50, 10)).done_time == pytest.approx(out.done_time + 1)
    with pytest.raises(ValueError, match="duplex_share"):
        contended(0.0)


@given(
    st.floats(0.5, 1.0),
    st.lists(st.tuples(st.sampled_from(CopyDirection), st.integers(1, 8), st.floats(0, 1.5))),
)
def test_both_directions_together_stay_within_their_share(share, requests):
    runner, now, moved = contended(share), 0.0, []
    for index, (direction, count, gap_s) in enumerate(requests):
        now += gap_s
        runner.reset(now)
        transfer = start(runner, direction, *blocks(10 * index, count))
        alone_s = 0.25 + count / 10
        assert transfer.seconds >= alone_s - 1e-9
        moved.append((now, transfer.done_time, count))
        first = min(begin for begin, _, _ in moved)
        busy_s = max(done for _, done, _ in moved) - first
        assert sum(num for _, _, num in moved) <= 20 * share * busy_s + 1e-6
