"""Two tiers by TensorRT-LLM's rules: which block goes where, and when."""

from tests.inflight.paces import WhenTold
from tests.inflight.tier_cache import SIZE, A, B, C, Cache, D, E, F, keep, tokens


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
    first = cache.start(tokens(A, B))
    cache.put(A)  # nothing is stored yet: computed once more
    cache.put(C)
    assert cache.where(A) == (0, 1, 0)
    cache.kv.release(first, tokens(A, B), 8)
    assert cache.where(tokens(A, B)) == (2, 0, 0)
    stats = cache.kv.tier_stats()
    assert (stats.num_onboards_started, stats.num_host_cached_blocks) == (0, 0)
    cache.kv.check_integrity()


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
