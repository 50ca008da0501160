"""Two tiers by TensorRT-LLM's rules, and driven from above: which block goes where, and when."""

from datetime import timedelta

import pytest

from tests.inflight.paces import WhenTold
from tokenflow.executor.api import (
    KvCacheConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import script_by_name
from tokenflow.inflight.tiers import HostTier

SIZE = 4
A, B, C, D, E, F = ([n] * SIZE for n in range(1, 7))


def tokens(*groups):
    return [token for group in groups for token in group]


class Cache:
    """A KvCacheManager on the scripted runner's memory, with every copy checked there."""

    def __init__(self, num_blocks, num_host, *, inclusive=False, pace=None, **host):
        self.runner = ScriptedRunner(script_by_name("counting", 64), 64, pace=pace)
        self.runner.allocate_kv(num_blocks, SIZE, num_host)
        config = KvCacheConfig(max_tokens=num_blocks * SIZE, event_buffer_max_size=100)
        self.kv = KvCacheManager(
            config,
            SIZE,
            HostTier(
                num_blocks=num_host,
                transport=self.runner.transport,
                inclusive=inclusive,
                **host,
            ),
        )
        self.now = 0.0

    def at(self, now):
        """A boundary at this instant."""
        self.now = now
        self.kv.begin(now)

    def start(self, token_ids, retention=None):
        """A sequence whose tokens are all computed."""
        sequence = self.kv.allocate(token_ids, None, retention)
        assert sequence is not None
        assert self.kv.run_moves(self.runner.copy_blocks) is None
        for block in sequence.blocks[sequence.num_reused_tokens // SIZE :]:
            self.runner._blocks[block.slot] = [(7, 7)] * SIZE
        return sequence

    def put(self, token_ids, retention=None, *, ended=False):
        """Compute and release; returns the sequence."""
        sequence = self.start(token_ids, retention)
        self.kv.release(sequence, token_ids, len(token_ids), ended=ended)
        self.kv.check_integrity()
        return sequence

    def where(self, token_ids):
        """(blocks on the device, blocks on the host only, of the former with a copy)"""
        self.kv.begin(self.now)
        found = self.kv.ahead.locate([*token_ids, 0])
        return found.num_device_blocks, found.num_host_blocks, found.num_copied_blocks

    def events(self):
        self.kv.flush_events()
        return [event.data for event in self.kv.events.get_latest_events(0)]


def keep(priority, *, decode=35, duration_s=None, end=None):
    duration = None if duration_s is None else timedelta(seconds=duration_s)
    return KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(
                token_start=0, token_end=end, priority=priority, duration_ms=duration
            ),
        ),
        decode_retention_priority=decode,
    )


# -- TensorRT-LLM's rules ------------------------------------------------------------------------


def test_nothing_is_copied_before_the_room_is_wanted():
    cache = Cache(4, 4)
    cache.put(tokens(A, B))
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    assert cache.kv.tier_stats().num_offloads_started == 0
    cache.put(tokens(C, D, E))
    assert cache.where(tokens(A, B)) == (1, 1, 0), "the tail goes first"
    assert cache.kv.tier_stats().num_offloads_completed == 1


def test_an_onboard_gives_up_the_host_copy():
    cache = Cache(4, 4)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E, F))
    assert cache.where(tokens(A, B)) == (0, 2, 0)
    sequence = cache.start(tokens(A, B, [9]))
    assert sequence.num_onboarded_blocks == 2
    assert sequence.num_reused_tokens == 8
    stats = cache.kv.tier_stats()
    assert stats.num_onboards_completed == 2
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    assert stats.num_host_cached_blocks == 3, "the three blocks that made room"


def test_blocks_below_the_threshold_are_dropped_with_all_below_them():
    cache = Cache(4, 4, min_priority=30)
    cache.put(tokens(A, B), keep(29))
    cache.put(tokens(C, D, E, F))
    assert cache.where(tokens(A, B)) == (0, 0, 0)
    cache = Cache(3, 4, min_priority=30)
    cache.put(tokens(A, B), keep(29, end=SIZE))  # the second block has the default
    cache.put(tokens(C, D))
    assert cache.where(tokens(A, B)) == (1, 1, 0)
    cache.put(tokens(E, F, [9]))
    assert cache.where(tokens(A, B)) == (0, 0, 0)


def test_the_lowest_priority_goes_first_then_what_was_used_longest_ago():
    cache = Cache(4, 0)
    cache.put(A, keep(80))
    cache.put(B)
    cache.put(C)
    cache.put(D, keep(10))
    cache.put(E)
    assert [cache.where(x)[0] for x in (A, B, C, D, E)] == [1, 1, 1, 0, 1]
    cache.put(F)
    assert [cache.where(x)[0] for x in (A, B, C, E, F)] == [1, 0, 1, 1, 1]


def test_a_reused_block_gets_the_new_requests_priority_if_it_names_one():
    cache = Cache(2, 0)
    cache.put(A, keep(80))
    cache.put(A)
    cache.put(B)
    cache.put(C)
    assert cache.where(A) == (1, 0, 0), "it kept its own"
    cache.put([*A, 9], keep(20, end=1))
    cache.put(B)  # in the place of what hung below it
    cache.put(C)
    assert cache.where(A) == (0, 0, 0)


def test_a_duration_begins_at_the_release_and_ends_in_the_default():
    cache = Cache(2, 0)
    cache.at(100.0)
    sequence = cache.start(A, keep(80, duration_s=10))
    cache.at(200.0)
    cache.kv.release(sequence, A, 4)
    cache.put(B)
    cache.at(209.0)
    cache.put(C)
    assert cache.where(A) == (1, 0, 0)
    cache.at(210.0)
    cache.put(D)
    assert cache.where(A) == (0, 0, 0)


def test_the_host_gives_up_its_own_oldest_leaf():
    cache = Cache(1, 2)
    for group in (A, B, C, D):
        cache.put(group)
    assert [cache.where(x) for x in (A, B, C, D)] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (1, 0, 0),
    ]
    assert cache.kv.tier_stats().num_host_evicted_blocks == 1


def test_a_partial_match_on_the_host_leaves_the_block_there():
    cache = Cache(2, 4)
    cache.put(tokens(A))
    cache.put(tokens(B, C))
    assert cache.where(A) == (0, 1, 0)
    sequence = cache.start([1, 1, 9, 9, 9])
    assert sequence.num_reused_tokens == 2
    assert sequence.num_onboarded_blocks == 1
    assert cache.where(A) == (0, 1, 0)
    cache.kv.check_integrity()


def test_the_tail_of_a_paused_stream_comes_back_without_a_copy_of_its_own():
    cache = Cache(3, 4)
    history = tokens(A, [2, 2])
    cache.put(history)
    cache.put(tokens(C, D, E))
    assert cache.where(history) == (0, 2, 0)
    sequence = cache.start([*history, 8])
    assert sequence.num_reused_tokens == 6
    assert cache.kv.tier_stats().num_onboards_completed == 2
    cache.kv.check_integrity()


def test_the_same_kv_computed_again_takes_the_place_of_the_host_copy():
    cache = Cache(3, 4)
    first = cache.start(tokens(A, B))  # computes it while it is not yet stored by the other one
    cache.kv.store_full_blocks(first, tokens(A, B), 0)
    cache.put(tokens(A))
    cache.kv.release(first, tokens(A, B), 8)
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    cache.kv.check_integrity()


# -- driven from above ---------------------------------------------------------------------------


def test_a_block_with_a_copy_is_given_away_without_another():
    cache = Cache(4, 4, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D))
    cache.kv.ahead.offload(tokens(C, D, [0]), 8)
    assert cache.where(tokens(C, D)) == (2, 0, 2)
    cache.put(tokens(E, F))
    assert cache.where(tokens(C, D)) == (0, 2, 0), "although it was used last"
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    assert cache.kv.tier_stats().num_offloads_completed == 2


def test_the_copy_is_kept_after_an_onboard():
    cache = Cache(4, 6, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E, F))
    cache.start(tokens(A, B, [9]))
    assert cache.where(tokens(A, B)) == (2, 0, 2)


def test_the_oldest_blocks_are_copied_first_and_no_more_than_asked_for():
    cache = Cache(4, 4, inclusive=True)
    stream = cache.start(tokens(A, B, C, [9]))
    cache.kv.store_full_blocks(stream, tokens(A, B, C, [9]), 12)
    cache.kv.ahead.offload(tokens(A, B, C, [9]), 2)
    assert cache.where(tokens(A, B, C)) == (3, 0, 2)
    cache.kv.ahead.offload(tokens(A, B, C, [9]), 2)
    assert cache.where(tokens(A, B, C)) == (3, 0, 3)
    cache.kv.check_integrity()


def test_a_copy_ahead_of_need_takes_no_room_from_another_copy():
    cache = Cache(4, 2, inclusive=True)
    streams = [cache.start(tokens(x, [9])) for x in (A, B)]
    for stream, group in zip(streams, (A, B), strict=True):
        cache.kv.store_full_blocks(stream, tokens(group, [9]), 4)
    cache.kv.ahead.offload(tokens(A, [9]), 4)
    cache.kv.ahead.offload(tokens(B, [9]), 4)
    assert cache.where(A)[2] + cache.where(B)[2] == 2
    third = Cache(6, 1, inclusive=True)
    for group in (A, B):
        stream = third.start(tokens(group, [9]))
        third.kv.store_full_blocks(stream, tokens(group, [9]), 4)
        third.kv.ahead.offload(tokens(group, [9]), 4)
    assert third.where(A) == (1, 0, 1)
    assert third.where(B) == (1, 0, 0)
    assert third.kv.tier_stats().num_host_full == 1


def test_prefetch_takes_free_room_and_rooms_with_copies_only():
    cache = Cache(4, 6, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E, F))
    assert cache.where(tokens(A, B)) == (0, 2, 0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    assert cache.where(tokens(A, B)) == (0, 2, 0), "it would push out what has no copy"
    cache.kv.ahead.offload(tokens(C, D, E, F, [0]), 4)
    cache.at(1.0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    assert cache.where(tokens(A, B)) == (2, 0, 2)
    assert cache.where(tokens(C, D, E, F)) == (2, 2, 2)
    assert cache.start(tokens(A, B, [9])).num_onboarded_blocks == 0
    cache.kv.check_integrity()


def test_what_was_brought_back_stays_until_it_is_used():
    cache = Cache(4, 8, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D))
    cache.put(tokens(E, F))
    cache.kv.ahead.offload(tokens(C, D, [0]), 2)
    cache.at(1.0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    assert cache.where(tokens(A, B)) == (2, 0, 2)
    cache.put([21] * SIZE)
    assert cache.where(tokens(A, B)) == (2, 0, 2), "not even for what has no copy"
    assert cache.where(tokens(E, F)) == (1, 1, 0)
    cache.put([*A, *B, 9])
    cache.put(tokens([22] * SIZE, [23] * SIZE, [24] * SIZE))
    assert cache.where(tokens(A, B))[1] > 0, "once used, it is like any other"


def test_what_was_brought_back_in_vain_does_not_stay_for_ever():
    cache = Cache(4, 8, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D))
    cache.put(tokens(E, F))
    cache.kv.ahead.offload(tokens(C, D, [0]), 2)
    cache.at(1.0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    cache.at(12.0)
    cache.put([21] * SIZE)
    assert cache.where(tokens(A, B)) == (1, 1, 1)
    cache.kv.check_integrity()


def test_a_dropped_prefix_is_computed_again():
    cache = Cache(4, 6, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E))
    assert cache.where(tokens(A, B)) == (1, 1, 0)
    cache.kv.ahead.drop_host(tokens(A, B, [0]))
    assert cache.where(tokens(A, B)) == (1, 0, 0)
    assert cache.start(tokens(A, B, [9])).num_reused_tokens == 4


def test_what_an_ended_request_left_goes_before_what_was_cut_short():
    cache = Cache(2, 1, inclusive=True)
    cache.put(A)
    cache.put(B, ended=True)
    cache.put(C)
    assert cache.where(A) == (1, 0, 0)
    assert cache.where(B) == (0, 1, 0), "there was room for it"
    cache.put(D, ended=True)
    assert cache.where(A) == (0, 1, 0), "which it gives up again"
    cache.put(E)
    assert cache.where(A) == (0, 1, 0)
    assert cache.where(D) == (0, 0, 0), "it is worth no more than free room"


def test_what_ended_is_worth_a_copy_if_it_was_given_more_than_the_default():
    cache = Cache(2, 1, inclusive=True)
    cache.put(A, keep(70))
    cache.put(B, keep(60), ended=True)
    cache.put(C)
    assert cache.where(B) == (0, 1, 0)


def test_prefetch_takes_the_room_of_what_has_ended():
    cache = Cache(4, 6, inclusive=True)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E, F), ended=True)
    assert cache.where(tokens(A, B)) == (0, 2, 0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    assert cache.where(tokens(A, B)) == (2, 0, 2)
    assert cache.where(tokens(C, D, E, F)) == (2, 0, 0)


def test_bytes_on_their_way_are_bounded():
    pace = WhenTold()
    cache = Cache(4, 4, inclusive=True, pace=pace, max_blocks_in_flight=4)
    cache.put(tokens(A, B, C, D))
    cache.kv.ahead.offload(tokens(A, B, C, D, [0]), 8)
    assert cache.kv.tier_stats().num_host_in_transit_blocks == 3
    cache.kv.ahead.offload(tokens(A, B, C, D, [0]), 8)
    assert cache.kv.tier_stats().num_host_in_transit_blocks == 3
    pace.complete_all()
    cache.at(1.0)
    cache.kv.ahead.offload(tokens(A, B, C, D, [0]), 8)
    assert cache.kv.tier_stats().num_host_in_transit_blocks == 1


def test_a_rush_to_the_host_leaves_room_for_who_comes_back():
    pace = WhenTold()
    cache = Cache(6, 8, inclusive=True, pace=pace, max_blocks_in_flight=4)
    cache.put(tokens(A))
    cache.put(tokens(B, C, D, E, F, [0] * SIZE))
    cache.kv.ahead.offload(tokens(B, C, D, E, F, [0]), 8)
    assert cache.kv.tier_stats().num_host_in_transit_blocks == 3
    pace.complete_all()
    cache.at(1.0)
    cache.kv.ahead.offload(tokens(B, C, D, E, F, [0] * SIZE, [0]), 8)
    cache.kv.ahead.prefetch(tokens(A, [0]))
    assert cache.kv.tier_stats().num_device_in_transit_blocks == 0, "there is no room for it"
    pace.complete_all()
    cache.at(2.0)
    cache.kv.ahead.prefetch(tokens(A, [0]))
    assert cache.kv.tier_stats().num_device_in_transit_blocks == 1


def test_a_block_is_not_found_with_a_copy_before_it_is_complete_nor_after_it_failed():
    pace = WhenTold()
    cache = Cache(2, 4, inclusive=True, pace=pace)
    cache.put(tokens(A, B))
    cache.kv.ahead.offload(tokens(A, B, [0]), 8)
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    pace.fail()
    cache.at(1.0)
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    assert cache.kv.tier_stats().num_offloads_failed == 2
    assert cache.kv.tier_stats().num_host_cached_blocks == 0
    cache.kv.check_integrity()


def test_a_prefetch_that_fails_is_computed_again():
    pace = WhenTold()
    cache = Cache(4, 4, inclusive=True, pace=pace)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D))
    cache.put(tokens(E, F))
    cache.kv.ahead.offload(tokens(E, F, [0]), 2)
    pace.complete_all()
    cache.at(1.0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    pace.fail()
    cache.at(2.0)
    assert cache.where(tokens(A, B)) == (0, 0, 0)
    cache.kv.check_integrity()


def test_who_needs_a_block_on_its_way_waits_for_it():
    pace = WhenTold()
    cache = Cache(4, 8, inclusive=True, pace=pace)
    cache.put(tokens(A, B))
    cache.put(tokens(C, D, E, F))
    cache.kv.ahead.offload(tokens(C, D, E, F, [0]), 8)
    pace.complete_all()
    cache.at(1.0)
    cache.kv.ahead.prefetch(tokens(A, B, [0]))
    assert cache.kv.tier_stats().num_device_in_transit_blocks == 2
    before = pace.num_waits
    sequence = cache.start(tokens(A, B, [9]))
    assert pace.num_waits > before
    assert sequence.num_reused_tokens == 8


# -- events and statistics -----------------------------------------------------------------------


def test_events_tell_the_life_of_a_block():
    cache = Cache(2, 2)
    assert cache.events() == [KVCacheCreatedData([2, 2])]
    cache.put(tokens(A, B))
    (stored,) = cache.events()
    assert isinstance(stored, KVCacheStoredData)
    assert stored.parent_hash is None
    assert [block.tokens for block in stored.blocks] == [A, B]
    first, second = (block.block_hash for block in stored.blocks)
    cache.put(C)
    moved, new = cache.events()
    assert isinstance(moved, KVCacheUpdatedData)
    assert (moved.block_hash, moved.cache_level.old_value, moved.cache_level.new_value) == (
        second,
        0,
        1,
    )
    assert new.blocks[0].tokens == C
    cache.put(tokens(D, E))
    cache.put(tokens(F, [9] * SIZE))
    removed = [data for data in cache.events() if isinstance(data, KVCacheRemovedData)]
    gone = [block for data in removed for block in data.block_hashes]
    assert gone[0] == second
    assert first in gone


def test_consecutive_removals_are_one_event_and_lost_events_leave_a_gap():
    cache = Cache(4, 0)
    cache.events()
    cache.put(tokens(A, B, C, D))
    cache.events()
    cache.put(tokens(E, F))
    removed, stored = cache.events()
    assert len(removed.block_hashes) == 2
    assert len(stored.blocks) == 2
    small = KvCacheManager(KvCacheConfig(max_tokens=2 * SIZE, event_buffer_max_size=2), SIZE)
    for group in (A, B, C, D):
        sequence = small.allocate(group)
        small.release(sequence, group, SIZE)
        small.flush_events()
    ids = [event.event_id for event in small.events.get_latest_events(0)]
    assert len(ids) == 2
    assert ids[0] > 0


def test_equal_histories_have_equal_names_and_salts_have_their_own():
    cache = Cache(8, 0)
    cache.put(tokens(A, B))
    other = Cache(8, 0)
    other.put(tokens(A, B))
    names = [[b.block_hash for b in c.kv.stored_blocks()] for c in (cache, other)]
    assert names[0] == names[1]
    salted = cache.kv.allocate(A, 5)
    cache.kv.release(salted, A, SIZE)
    assert len({block.block_hash for block in cache.kv.stored_blocks()}) == 3


def test_statistics_count_as_tensorrt_llm_counts():
    cache = Cache(4, 6)
    stream = cache.start(tokens(A, B, [9]))
    stats = cache.kv.stats()
    assert (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks) == (10, 1, 9)
    cache.kv.release(stream, tokens(A, B, [9]), 9)
    stats = cache.kv.stats()
    assert (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks) == (10, 4, 6)


@pytest.mark.parametrize("inclusive", [False, True])
def test_a_tier_adds_up(inclusive):
    cache = Cache(4, 3, inclusive=inclusive)
    for group in (A, B, C, D, E, F):
        cache.put(tokens(group, [group[0] + 20]))
    stats = cache.kv.tier_stats()
    assert stats.num_device_used_blocks == 0
    assert stats.num_device_cached_blocks == 4
    assert stats.num_host_cached_blocks == 3
    assert stats.num_host_in_transit_blocks == stats.num_device_in_transit_blocks == 0


def test_a_copy_ahead_of_need_takes_nothing_that_a_paused_stream_comes_back_for():
    cache = Cache(4, 2, inclusive=True)
    cache.put(tokens(A, B))  # paused
    cache.put(tokens(C, D, E))
    assert cache.where(tokens(A, B)) == (1, 1, 0)
    cache.put(tokens(F, [20] * SIZE, [21] * SIZE))
    cache.kv.ahead.drop_host(tokens(C, D, E, [0]))
    before = [cache.where(x) for x in (tokens(A, B), tokens(C, D, E))]
    cache.kv.ahead.offload(tokens(F, [20] * SIZE, [21] * SIZE, [0]), 8)
    assert [cache.where(x) for x in (tokens(A, B), tokens(C, D, E))] == before
    cache.at(100.0)
    cache.kv.ahead.offload(tokens(F, [20] * SIZE, [21] * SIZE, [0]), 8)
    assert cache.where(tokens(F, [20] * SIZE, [21] * SIZE))[2] > 0, "nobody comes back that late"


def test_a_copy_ahead_of_need_leaves_out_what_is_only_somebody_elses():
    cache = Cache(6, 6, inclusive=True)
    cache.put([1, 1, 1, 1, 2, 2, 2, 9])
    cache.kv.ahead.offload([1, 1, 1, 1, 2, 2, 2, 8, 0], 8)
    assert cache.where([1, 1, 1, 1, 2, 2, 2, 9]) == (2, 0, 1)


def test_a_resume_on_a_full_device_and_a_full_host_waits_once():
    """Each block has to give its place to a victim, whose place is the next one's: the transfers
    depend on each other, and are begun without waiting in between."""
    pace = WhenTold()
    cache = Cache(8, 8, pace=pace)
    cache.put(list(range(100, 132)))
    cache.put(list(range(200, 232)))
    assert cache.where(list(range(100, 132))) == (0, 8, 0)
    sequence = cache.kv.allocate([*range(100, 132)])
    assert sequence.num_onboarded_blocks == 8
    started = []
    begin = cache.runner.transport.start

    class Counting:
        def start(self, direction, copies):
            started.append(pace.num_waits)
            return begin(direction, copies)

    moves = cache.kv._tiers._moves
    num_waits = pace.num_waits
    moves.run(cache.runner.copy_blocks, Counting())
    assert len(set(started)) == 1
    assert started[0] == num_waits
