"""The count of blocks that stands in for KV events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow.cache_estimate import CacheEstimate


def test_the_oldest_release_is_given_up_first() -> None:
    cache = CacheEstimate(10)
    cache.released(1, 4)
    cache.released(2, 4)
    assert cache.shrink(2) == []
    assert cache.shrink(5) == [1]
    assert (cache.num_blocks(1), cache.num_blocks(2)) == ((1, 0), (4, 0))
    assert cache.shrink(8) == [1, 2]
    assert (cache.num_blocks(1), cache.num_blocks(2)) == ((0, 0), (2, 0))


def test_the_device_gives_to_the_host_and_the_host_gives_up_what_came_first() -> None:
    cache = CacheEstimate(10, num_host_blocks=3)
    cache.released(1, 4)
    cache.released(2, 4)
    assert cache.shrink(4) == [1]
    assert cache.num_blocks(1) == (2, 2)
    assert cache.shrink(7) == [1, 2]
    assert (cache.num_blocks(1), cache.num_blocks(2)) == ((0, 2), (3, 1))
    cache.forget(1)
    assert cache.num_blocks(1) == (0, 0)
    assert cache.shrink(9) == [2]
    assert cache.num_blocks(2) == (1, 3)


def test_a_release_anew_is_the_youngest() -> None:
    cache = CacheEstimate(10)
    cache.released(1, 4)
    cache.released(2, 4)
    cache.released(1, 5)
    assert cache.shrink(5) == [2]
    cache.clear()
    assert (cache.num_blocks(1), cache.num_blocks(2)) == ((0, 0), (0, 0))


@given(
    st.integers(0, 8),
    st.lists(
        st.one_of(
            st.tuples(st.just("released"), st.integers(0, 5), st.integers(0, 6)),
            st.tuples(st.just("forget"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("shrink"), st.integers(0, 12), st.just(0)),
        )
    ),
)
def test_it_fits_the_pools_after_each_shrink_and_names_who_was_hit(
    num_host_blocks: int, steps: list[tuple[str, int, int]]
) -> None:
    cache = CacheEstimate(10, num_host_blocks)
    for name, a, b in steps:
        if name == "released":
            cache.released(a, b)
            assert cache.num_blocks(a) == (b, 0)
        elif name == "forget":
            cache.forget(a)
        else:
            before = {handle: cache.num_blocks(handle) for handle in range(6)}
            hit = cache.shrink(a)
            after = {handle: cache.num_blocks(handle) for handle in range(6)}
            assert sorted(hit) == [handle for handle in range(6) if before[handle] != after[handle]]
            assert sum(device for device, _ in after.values()) <= max(0, 10 - a)
            assert sum(host for _, host in after.values()) <= num_host_blocks
            for handle in range(6):
                assert sum(after[handle]) <= sum(before[handle])
                assert after[handle][0] <= before[handle][0]
