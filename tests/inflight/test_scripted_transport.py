"""The scripted host tier must notice what a careless engine would get away with."""

import pytest

from tests.inflight.paces import FailsSometimes, Timed, WhenTold
from tokenflow.clock import ManualClock
from tokenflow.executor.api import Request
from tokenflow.inflight.runner import BlockCopy, CopyDirection, SequenceChunk, TierCopy
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

VOCAB = 100
OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD
PROMPT = (1, 2, 3, 4, 5)
NEXT = expected(pseudo_random(VOCAB), (*PROMPT, 6), 1)[0]


def make(pace=None):
    """Request 1 has computed its prompt in device blocks 0 and 1."""
    runner = ScriptedRunner(pseudo_random(VOCAB), VOCAB, pace=pace)
    runner.allocate_kv(8, 4, 4)
    runner.add_request(1, Request(input_token_ids=PROMPT, max_tokens=9))
    runner.forward([SequenceChunk(1, PROMPT, 0, [0, 1], True, 0)])
    return runner


def copies(*pairs):
    return [TierCopy(device, host) for device, host in pairs]


def move(runner, direction, *pairs):
    transfer = runner.transport.start(direction, copies(*pairs))
    transfer.wait()
    return transfer


def next_of(runner, block_ids):
    return runner.forward([SequenceChunk(1, (6,), 5, block_ids, True, 1)]).token_ids


def overwrite(runner, *block_ids):
    """Somebody else's KV in these device blocks."""
    runner.add_request(99, Request(input_token_ids=(50,), max_tokens=9))
    for block_id in block_ids:
        runner.forward([SequenceChunk(99, (50,), 0, [block_id], False, 0)])


def test_content_goes_out_and_comes_back_elsewhere():
    runner = make()
    assert runner.kv_block_bytes(4) == 4096
    done = move(runner, OFFLOAD, (0, 2), (1, 3))
    assert done.is_done()
    assert done.error is None
    overwrite(runner, 0, 1)
    move(runner, ONBOARD, (6, 2), (5, 3))
    assert next_of(runner, [6, 5]) == NEXT
    assert runner.transport.num_under_way == 0


def test_blocks_that_change_places_are_noticed():
    runner = make()
    move(runner, OFFLOAD, (0, 2), (1, 3))
    move(runner, ONBOARD, (6, 3), (5, 2))
    with pytest.raises(RuntimeError, match=r"has no KV|another history"):
        next_of(runner, [6, 5])


def test_nothing_moves_before_completion():
    pace = WhenTold()
    runner = make(pace)
    transfer = runner.transport.start(OFFLOAD, copies((0, 0)))
    assert not transfer.is_done()
    back = runner.transport.start(ONBOARD, copies((7, 0)))
    pace.complete(1)  # needs the first
    assert transfer.is_over
    assert back.is_done()
    assert transfer.is_done()
    assert pace.pending == []
    move(runner, OFFLOAD, (1, 1))
    move(runner, ONBOARD, (6, 1))
    assert next_of(runner, [7, 6]) == NEXT


@pytest.mark.parametrize(
    "use",
    [
        lambda runner: next_of(runner, [4, 1]),
        lambda runner: overwrite(runner, 4),
        lambda runner: runner.copy_blocks([BlockCopy(4, 5, 1)]),
        lambda runner: runner.copy_blocks([BlockCopy(0, 4, 1)]),
    ],
)
@pytest.mark.parametrize("complete_unseen", [False, True])
def test_target_under_way_is_neither_read_nor_written(use, complete_unseen):
    pace = WhenTold()
    runner = make(pace)
    move(runner, OFFLOAD, (0, 0))
    runner.transport.start(ONBOARD, copies((4, 0)))
    if complete_unseen:
        pace.complete()  # and nobody asks
    with pytest.raises(RuntimeError, match="device block 4 is used before"):
        use(runner)
    with pytest.raises(RuntimeError, match="device block 4 is used before"):
        next_of(runner, [0, 1])  # a rule that was broken stays broken


def test_target_can_be_used_once_its_copy_is_known_to_be_complete():
    pace = WhenTold()
    runner = make(pace)
    move(runner, OFFLOAD, (0, 0))
    transfer = runner.transport.start(ONBOARD, copies((4, 0)))
    pace.complete()
    assert transfer.is_done()
    assert next_of(runner, [4, 1]) == NEXT


@pytest.mark.parametrize(
    ("use", "block"),
    [
        (lambda runner: next_of(runner, [0, 1]), 1),
        (lambda runner: runner.copy_blocks([BlockCopy(1, 0, 1)]), 0),
    ],
)
def test_source_under_way_is_not_written(use, block):
    runner = make(WhenTold())
    runner.transport.start(OFFLOAD, copies((0, 0), (1, 1)))
    with pytest.raises(RuntimeError, match=f"device block {block} is written while"):
        use(runner)


def test_source_under_way_can_be_read():
    runner = make(WhenTold())
    runner.transport.start(OFFLOAD, copies((0, 0), (1, 1)))
    runner.copy_blocks([BlockCopy(1, 5, 1)])
    assert next_of(runner, [0, 5]) == NEXT


def test_two_transfers_share_no_target():
    runner = make(WhenTold())
    runner.transport.start(OFFLOAD, copies((0, 2)))
    with pytest.raises(RuntimeError, match="host block 2 is the target"):
        runner.transport.start(OFFLOAD, copies((1, 2)))
    with pytest.raises(RuntimeError, match="host block 2 is the target"):
        next_of(runner, [0, 1])
    runner = make(WhenTold())
    move(runner, OFFLOAD, (0, 0), (1, 1))
    runner.transport.start(ONBOARD, copies((4, 0)))
    with pytest.raises(RuntimeError, match="device block 4 is the target"):
        runner.transport.start(ONBOARD, copies((4, 1)))


def test_a_block_can_be_left_and_filled_in_one_go():
    """Offload 0, and onboard something else into 0 without waiting: in this order."""
    pace = WhenTold()
    runner = make(pace)
    move(runner, OFFLOAD, (1, 1))
    runner.transport.start(OFFLOAD, copies((0, 0)))
    back = runner.transport.start(ONBOARD, copies((0, 1)))
    pace.complete(1)
    assert back.is_done()
    assert runner.transport.num_under_way == 0
    move(runner, ONBOARD, (1, 0))
    assert next_of(runner, [1, 0]) == NEXT


def test_failed_copy_leaves_nothing_that_can_be_read():
    pace = WhenTold()
    runner = make(pace)
    transfer = runner.transport.start(OFFLOAD, copies((0, 0)))
    pace.fail(error="link down")
    assert transfer.is_done()
    assert transfer.error == "link down"
    move(runner, ONBOARD, (4, 0))
    with pytest.raises(RuntimeError, match="failed copy"):
        next_of(runner, [4, 1])
    assert next_of(runner, [0, 1]) == NEXT


def test_nonsense_is_refused():
    for direction, pairs, match in (
        (OFFLOAD, [(0, 4)], "no host block 4"),
        (ONBOARD, [(8, 0)], "no device block 8"),
        (OFFLOAD, [(0, 1), (1, 1)], "host block 1 twice"),
        (OFFLOAD, [], "nothing"),
        (OFFLOAD, [(3, 0)], "block 3 holds no KV"),
        (ONBOARD, [(3, 0)], "block 0 holds no KV"),
    ):
        runner = make()
        with pytest.raises(RuntimeError, match=match):
            runner.transport.start(direction, copies(*pairs))
    bare = ScriptedRunner(pseudo_random(VOCAB), VOCAB)
    bare.allocate_kv(2, 4)
    with pytest.raises(RuntimeError, match="no host block"):
        bare.transport.start(OFFLOAD, copies((0, 0)))


def test_close_finishes_and_refuses_more():
    pace = WhenTold()
    runner = make(pace)
    transfer = runner.transport.start(OFFLOAD, copies((0, 0)))
    runner.transport.close()
    runner.transport.close()
    assert transfer.is_over
    with pytest.raises(RuntimeError, match="closed"):
        runner.transport.start(OFFLOAD, copies((0, 0)))


def test_timed_pace_has_a_line_for_each_direction():
    clock = ManualClock(10.0)
    pace = Timed(clock.now, clock.advance, 0.5)
    runner = make(pace)
    first = runner.transport.start(OFFLOAD, copies((0, 0), (1, 1)))
    second = runner.transport.start(OFFLOAD, copies((0, 2)))
    clock.advance(0.75)
    assert not first.is_done()
    clock.advance(0.25)
    assert first.is_done()
    assert not second.is_done()
    back = runner.transport.start(ONBOARD, copies((4, 0)))  # beside the second
    second.wait()
    assert (clock.now(), back.is_done(), second.seconds) == (11.5, True, 0.5)
    assert (second.waited_s, first.waited_s, pace.waited_s) == (0.5, 0.0, 0.5)
    assert next_of(runner, [4, 1]) == NEXT


def test_a_transfer_that_cannot_even_start_is_not_under_way():
    class Refuses(WhenTold):
        def start(self, transfer):
            raise OSError("no stream")

    runner = make(Refuses())
    with pytest.raises(OSError, match="no stream"):
        runner.transport.start(OFFLOAD, copies((0, 0)))
    assert runner.transport.num_under_way == 0
    assert next_of(runner, [0, 1]) == NEXT


def test_verdicts_fail_transfers():
    pace = FailsSometimes(lambda t: "no" if t.direction is ONBOARD else None)
    runner = make(pace)
    assert move(runner, OFFLOAD, (0, 0)).error is None
    assert move(runner, ONBOARD, (0, 0)).error == "no"
