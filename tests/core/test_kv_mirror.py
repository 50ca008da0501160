"""The mirror of an engine's KV cache against a naive model, with gaps at random places."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.naive_cache import SIZE, NaiveCache, location
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KvLocation,
)
from tokenflow.kv_mirror import KvMirror

WAYS = ((0,) * 6, (0, 0, 0, 1, 1, 1))
"""Few, so that what is stored, moved and watched meets."""
TOKENS = st.builds(lambda way, length: way[:length], st.sampled_from(WAYS), st.integers(1, 6))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 1), TOKENS),
        st.tuples(st.just("remove"), st.integers(0, 1 << 16), st.just(())),
        st.tuples(st.just("move"), st.integers(0, 1 << 16), st.just(())),
        st.tuples(st.just("copy"), st.integers(0, 1 << 16), st.just(())),
        st.tuples(st.just("watch"), st.integers(1, 5), TOKENS),
        st.tuples(st.just("unwatch"), st.integers(1, 5), st.just(())),
        st.tuples(st.just("hear"), st.just(0), st.just(())),
    ),
    min_size=25,
    max_size=60,
)


def _do(cache: NaiveCache, name: str, number: int, tokens: tuple[int, ...]) -> None:
    if name == "store":
        cache.store(number, tokens)
    elif cache.blocks and name in ("remove", "move", "copy"):
        key = sorted(cache.blocks)[number % len(cache.blocks)]
        getattr(cache, name)(key)


@settings(max_examples=600, deadline=None)
@given(STEPS)
def test_mirror_says_what_the_cache_holds_and_names_whose_kv_moved(
    steps: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    watched: dict[int, tuple[tuple[int, ...], KvLocation]] = {}

    def hear() -> None:
        mirror.apply(cache.drain())
        changed = set(mirror.changed())
        assert changed <= set(watched)
        for handle, (tokens, known) in list(watched.items()):
            assert mirror.locate(tokens) == cache.locate(tokens)
            if handle in changed:
                watched[handle] = (tokens, mirror.watch(handle, tokens))
            else:
                assert mirror.locate(tokens) == known, "nobody was told"
        assert mirror.changed() == []

    for name, number, tokens in steps:
        if name == "watch":
            watched[number] = (tokens, mirror.watch(number, tokens))
        elif name == "unwatch":
            mirror.unwatch(number)
            watched.pop(number, None)
        elif name == "hear":
            hear()
        else:
            _do(cache, name, number, tokens)
    hear()
    assert mirror.is_complete
    assert mirror.num_gaps == 0
    levels = [level for level, _ in cache.blocks.values()]
    assert mirror.num_device_blocks == levels.count(0)
    assert mirror.num_host_blocks == levels.count(1)
    assert mirror.num_copied_blocks == sum(copied for _, copied in cache.blocks.values())
    assert mirror.num_watched == len(watched)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 1 << 16), st.integers(1, 3))
def test_after_a_gap_it_claims_nothing_that_is_not_there(
    steps: list[tuple[str, int, tuple[int, ...]]], place: int, num_missing: int
) -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    for name, number, tokens in steps:
        _do(cache, name, 0 if name == "store" else number, tokens)
    cut = place % len(cache.events)
    lost = cache.events[cut : cut + num_missing]
    mirror.watch(1, (0, 1))
    mirror.apply(cache.events[:cut])
    mirror.apply(cache.events[cut + num_missing :])
    was_noticed = cut + num_missing < len(cache.events)
    assert mirror.is_complete == (not was_noticed and cut > 0)
    assert (mirror.num_gaps == 1) == was_noticed
    if was_noticed:
        assert 1 in mirror.changed()
        assert mirror.num_watched == 0
    for _, tokens in list(cache.blocks):
        if was_noticed:
            assert mirror.locate(tokens).num_tokens <= cache.locate(tokens).num_tokens
    assert lost


@settings(max_examples=200, deadline=None)
@given(STEPS, STEPS, st.integers(0, 1 << 16), st.booleans(), st.booleans())
def test_a_mirror_that_is_told_anew_knows_all_again_and_names_everybody(
    steps: list[tuple[str, int, tuple[int, ...]]],
    more: list[tuple[str, int, tuple[int, ...]]],
    cut: int,
    at_once: bool,
    has_noticed: bool,
) -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    for name, number, tokens in steps:
        _do(cache, name, number, tokens)
    events = cache.drain()
    cut = 1 + cut % len(events)
    mirror.apply(events[:cut])
    for handle, tokens in enumerate(WAYS):
        mirror.watch(handle, tokens)
    mirror.changed()
    cache.say(KVCacheRemovedData([0]))
    cache.drain()  # missed, with the rest of `events`
    if has_noticed:
        cache.store(0, (3,))
        mirror.apply(cache.drain())
        assert not mirror.is_complete
        assert mirror.num_gaps == 1
    if not at_once:
        assert set(mirror.changed()) == (set(range(len(WAYS))) if has_noticed else set())
        for handle, tokens in enumerate(WAYS):
            mirror.watch(handle, tokens)
    cache.tell_anew()
    for name, number, tokens in more:
        _do(cache, name, number, tokens)
    mirror.apply(cache.drain())
    assert mirror.is_complete
    assert mirror.num_gaps == 1, "Created alone is none"
    assert set(mirror.changed()) == set(range(len(WAYS)))
    assert mirror.num_watched == 0
    assert len(mirror) == len(cache.blocks)
    for _, tokens in cache.blocks:
        assert mirror.locate((*tokens, 9)) == cache.locate((*tokens, 9))


def test_a_move_of_an_inner_block_is_told_to_those_below() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    cache.store(0, (1, 2, 3, 4, 5))
    mirror.apply(cache.drain())
    assert mirror.watch(7, (1, 2, 3, 4, 5)) == location(5, 3)
    cache.copy((0, (1, 2)))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert mirror.watch(7, (1, 2, 3, 4, 5)) == location(5, 3, copied=1)
    cache.move((0, (1, 2)))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert mirror.watch(7, (1, 2, 3, 4, 5)) == location(5, 0, host=1)


def test_of_two_salts_the_less_favourable_counts_until_it_is_gone() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    for salt in (0, 1):
        cache.store(salt, (1, 2, 3))
    cache.move((1, (1, 2, 3)))
    mirror.apply(cache.drain())
    assert mirror.watch(7, (1, 2, 3)) == location(3, 1, host=1)
    cache.move((0, (1, 2, 3)))
    cache.move((1, (1, 2, 3)))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert mirror.watch(7, (1, 2, 3)) == location(3, 1, host=1)
    cache.remove((0, (1, 2)))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert mirror.watch(7, (1, 2, 3)) == location(3, 2)


def test_a_session_is_known_again_once_it_is_stored_again() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    cache.store(0, (1, 2, 3, 4, 5))
    mirror.apply(cache.drain())
    assert mirror.watch(7, (1, 2, 3, 4, 5, 6)) == location(5, 3)
    cache.store(0, (9,))
    cache.drain()  # missed
    cache.store(0, (1, 2, 3, 4, 5, 6))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert not mirror.is_complete
    assert mirror.watch(7, (1, 2, 3, 4, 5, 6)) == location(0, 0)  # below what was missed
    cache.remove((0, (1, 2)))
    cache.store(0, (1, 2, 3, 4, 5, 6))
    mirror.apply(cache.drain())
    assert mirror.changed() == [7]
    assert mirror.watch(7, (1, 2, 3, 4, 5, 6, 7)) == location(6, 3)


def test_new_pools_hold_nothing_and_everything_is_known_of_them() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    cache.store(0, (1, 2, 3))
    mirror.apply(cache.drain())
    mirror.watch(3, (1, 2, 3))
    cache.create()
    mirror.apply(cache.drain())
    assert mirror.changed() == [3]
    assert len(mirror) == 0
    assert mirror.is_complete
    assert mirror.num_gaps == 0


def test_a_stream_that_was_joined_late_is_incomplete() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.store(0, (1, 2, 3))
    mirror.apply(cache.drain())
    assert not mirror.is_complete
    assert mirror.num_gaps == 1
    assert mirror.locate((1, 2, 3, 4)) == location(3, 2)


def test_events_of_a_further_window_repeat_what_is_known() -> None:
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    cache.say(KVCacheCreatedData([4, 0]))
    cache.store(0, (1, 2))
    cache.say(KVCacheRemovedData([hash((0, (1, 2)))]))
    events = cache.drain()
    other = [KVCacheEvent(e.event_id, e.data, window_size=512) for e in events]
    mirror.apply([events[0], other[1], events[2], other[3]])
    assert mirror.is_complete
    assert mirror.num_blocks_per_level == [8, 8]
    assert mirror.locate((1, 2)) == location(2, 1)


@pytest.mark.parametrize("num_sessions", [4000])
def test_nothing_is_looked_through_when_nothing_moved(num_sessions: int) -> None:
    """Counted in calls, not in seconds: an event on one of thousands names that one only."""
    rng = random.Random(1)
    cache, mirror = NaiveCache(), KvMirror(SIZE)
    cache.create()
    prompts = [(1, 1, 1, *(rng.randrange(1000) for _ in range(4))) for _ in range(num_sessions)]
    for prompt in prompts:
        cache.store(0, prompt)
    mirror.apply(cache.drain())
    for handle, prompt in enumerate(prompts):
        mirror.watch(handle, prompt)
    assert mirror.changed() == []
    key = (0, prompts[7])
    cache.move(key)
    mirror.apply(cache.drain())
    expected = [h for h, prompt in enumerate(prompts) if prompt == prompts[7]]
    assert mirror.changed() == expected
