"""Two tiers driven from above: copies ahead of need, what they cost whom, and what fails."""

from tests.inflight.paces import WhenTold
from tests.inflight.tier_cache import SIZE, A, B, C, Cache, D, E, F, keep, tokens


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
