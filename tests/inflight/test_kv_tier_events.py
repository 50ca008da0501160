"""What two tiers tell: events and statistics."""

import pytest

from tests.inflight.tier_cache import SIZE, A, B, C, Cache, D, E, F, tokens
from tokenflow.executor.api import KvCacheConfig
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.inflight.kv_cache import KvCacheManager


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
