"""Copies that fail while others depend on them: nothing half done is found, no slot is lost."""

import pytest

from tests.inflight.helpers import VOCAB, executor_config, request
from tests.inflight.paces import FailsSometimes, WhenTold
from tokenflow.executor.api import KvCacheConfig
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import counting, pseudo_random
from tokenflow.inflight.tiers import HostTier

SIZE = 2


def make(num_blocks, num_host_blocks, pace, *, inclusive=False):
    runner = ScriptedRunner(counting(9), 9, pace=pace)
    runner.allocate_kv(num_blocks, SIZE, num_host_blocks)
    host = HostTier(
        num_blocks=num_host_blocks,
        transport=runner.transport,
        inclusive=inclusive,
    )
    return runner, KvCacheManager(KvCacheConfig(max_tokens=num_blocks * SIZE), SIZE, host)


def compute(runner, kv, token_ids):
    """A sequence with all its blocks filled, by hand."""
    sequence = kv.allocate(token_ids)
    assert kv.run_moves(runner.copy_blocks) is None
    for slot in sequence.slots(99):
        runner._blocks[slot] = [(1, 1)] * SIZE
    return sequence


def put(runner, kv, token_ids):
    kv.release(compute(runner, kv, token_ids), token_ids, len(token_ids))
    kv.check_integrity()


def test_what_was_to_be_brought_back_from_a_failed_offload_is_gone():
    """Pushed out and wanted again in one step: the copy back reads what the first one wrote."""
    num_to_fail = [0]

    def fate(transfer):
        num_to_fail[0] -= 1
        return "planned" if num_to_fail[0] >= 0 else None

    for fails in (False, True):
        runner, kv = make(4, 8, WhenTold(fate))
        put(runner, kv, [1, 1, 2, 2])
        other = kv.allocate([5, 6, 7, 5, 6, 7, 5, 6])
        kv.release(other, [], 0)
        again = kv.allocate([1, 1, 2, 2, 3])
        assert again.num_onboarded_blocks == 2
        num_to_fail[0] = int(fails)
        assert kv.run_moves(runner.copy_blocks) is None
        assert kv.take_damaged() == ({again} if fails else set())
        kv.discard(again)
        kv.forget_lost()
        kv.check_integrity()
        assert kv.ahead.locate([1, 1, 2, 2, 3]).num_tokens == (0 if fails else 4)
        assert runner.transport.num_under_way == 0


def test_blocks_below_one_whose_prefetch_failed_are_forgotten_on_their_way():
    pace = WhenTold()
    runner, kv = make(4, 8, pace, inclusive=True)
    path = [1, 1, 2, 2, 3, 3, 4, 4]
    put(runner, kv, path)
    kv.discard(compute(runner, kv, [5, 6, 7, 5, 6, 7, 5, 6]))
    assert kv.ahead.locate([*path, 0]).num_host_blocks == 4
    user = compute(runner, kv, [8, 8, 8, 8])
    kv.ahead.prefetch([*path, 0])
    kv.discard(user)
    kv.ahead.prefetch([*path, 0])
    assert [len(transfer.copies) for transfer in pace.pending] == [2, 2]
    pace.fail(0)
    kv.begin(0.0)
    kv.check_integrity()
    assert kv.ahead.locate([*path, 0]).num_tokens == 0, (
        "what is below the lost ones is lost with them"
    )
    assert kv.tier_stats().num_device_in_transit_blocks == 2, "their slots are still written to"
    assert kv.tier_stats().num_host_in_transit_blocks == 2
    pace.complete()
    kv.begin(0.0)
    kv.check_integrity()
    stats = kv.tier_stats()
    assert stats.num_device_in_transit_blocks == stats.num_host_in_transit_blocks == 0
    assert stats.num_device_cached_blocks == stats.num_host_cached_blocks == 0
    assert runner.transport.num_under_way == 0


def test_a_block_wanted_while_its_prefetch_is_failing_is_computed():
    is_broken: list[bool] = []
    runner, kv = make(
        4, 8, WhenTold(lambda transfer: "planned" if is_broken else None), inclusive=True
    )
    put(runner, kv, [1, 1, 2, 2])
    kv.discard(compute(runner, kv, [5, 6, 7, 5, 6, 7, 5, 6]))
    is_broken.append(True)
    kv.ahead.prefetch([1, 1, 2, 2, 0])
    wanted = kv.allocate([1, 1, 2, 2, 0])
    assert wanted.num_reused_tokens == 0
    kv.check_integrity()
    kv.discard(wanted)
    kv.check_integrity()


@pytest.mark.parametrize("tiered", [False, True])
def test_a_partly_matching_block_that_cannot_be_read_is_given_up(tiered):
    """Else the request would find it again in each step, fail and start again, for ever."""
    broken = []
    pace = FailsSometimes(
        lambda transfer: (
            "planned" if broken and transfer.direction is CopyDirection.ONBOARD else None
        )
    )
    runner = ScriptedRunner(pseudo_random(VOCAB), VOCAB, pace=pace)
    batcher = InflightBatcher(
        runner, executor_config(num_blocks=8, num_host_blocks=16, kv_tiering=tiered)
    )

    def steps_until_final(request_id, tokens):
        batcher.enqueue(request_id, request(tokens, max_tokens=2))
        for step in range(1, 50):
            for response in batcher.step(float(step)).responses:
                if response.request_id == request_id and response.result.is_final:
                    return step
        return None

    assert steps_until_final(1, range(1, 8)) is not None
    assert steps_until_final(2, range(20, 50)) is not None  # pushes it out
    broken.append(True)
    assert steps_until_final(3, [1, 2, 60, 61, 62]) is not None
    batcher.check_integrity()


def test_a_copy_that_failed_is_none_also_for_a_block_that_came_back_meanwhile():
    """Its device block is given away, and in the same step the block takes that of a twin."""
    fails = []
    runner, kv = make(3, 4, WhenTold(lambda transfer: "planned" if fails else None), inclusive=True)
    one, twin = kv.allocate([1, 2]), kv.allocate([1, 2])
    for sequence in (one, twin):
        runner._blocks[sequence.slots(1)[0]] = [(1, 1)] * SIZE
        kv.store_full_blocks(sequence, [1, 2], 2)
    kv.release(one, [1, 2], 2)
    other = kv.allocate([7, 7, 7])
    kv.release(twin, [1, 2], 2)
    fails.append(True)
    assert kv.run_moves(runner.copy_blocks) is None
    kv.take_damaged()
    kv.forget_lost()
    found = kv.ahead.locate([1, 2, 0])
    assert (found.num_device_blocks, found.num_copied_blocks) == (1, 0)
    kv.check_integrity()
    kv.discard(other)
