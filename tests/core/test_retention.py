"""What the blocks of a request are worth."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import CONFIG, Harness
from tokenflow.config import OFFLOAD_MIN_PRIORITY
from tokenflow.executor.api import KvCacheRetentionConfig, Request, SamplingConfig
from tokenflow.retention import (
    ENDING_PRIORITY,
    SHARED_PRIORITY,
    PromptBeginnings,
    retention_config,
)


def _priority_at(config: KvCacheRetentionConfig, position: int) -> int:
    """Of a prompt token; each has exactly one."""
    (found,) = (
        entry.priority
        for entry in config.token_range_retention_configs
        if entry.token_start <= position and (entry.token_end is None or position < entry.token_end)
    )
    return found


@given(st.integers(0, 100), st.integers(0, 200), st.integers(1, 500), st.booleans())
def test_paused_kv_is_worth_a_copy_and_yields_to_shared_beginnings(
    num_shared: int, position: int, num_left: int, is_pausable: bool
) -> None:
    config = retention_config(num_shared, num_left, is_pausable=is_pausable)
    priority = _priority_at(config, position)
    if position < num_shared:
        assert priority == SHARED_PRIORITY
    else:
        assert OFFLOAD_MIN_PRIORITY <= priority <= 35 < SHARED_PRIORITY
    decode = config.decode_retention_priority
    assert (decode < OFFLOAD_MIN_PRIORITY) == (not is_pausable)
    if is_pausable:
        assert decode == _priority_at(config, num_shared)
    else:
        assert decode == ENDING_PRIORITY


def test_the_more_is_left_the_longer_it_is_kept() -> None:
    decode = [
        retention_config(0, num_left, is_pausable=True).decode_retention_priority
        for num_left in range(1, 200)
    ]
    assert decode == sorted(decode)
    assert (decode[0], decode[-1]) == (OFFLOAD_MIN_PRIORITY, 35)
    assert len(set(decode)) == 6


def test_a_shared_beginning_is_worth_more_for_a_while() -> None:
    first = retention_config(8, 10, is_pausable=True).token_range_retention_configs[0]
    assert first.duration_ms is not None
    assert timedelta(0) < first.duration_ms <= timedelta(minutes=10)


def test_only_what_earlier_prompts_began_with_is_shared() -> None:
    beginnings = PromptBeginnings(4)
    assert beginnings.observe((1, 2, 3, 4, 5, 6, 7, 8, 9), None) == 0
    assert beginnings.observe((1, 2, 3, 4, 5, 6, 7, 8, 9), None) == 8
    assert beginnings.observe((1, 2, 3, 4, 5, 6, 0, 8), None) == 4
    assert beginnings.observe((1, 2, 3, 4), 1) == 0, "another salt is another cache"
    assert beginnings.observe((1, 2, 3), None) == 0
    assert beginnings.observe((0, 0, 0, 0, 5, 6, 7, 8), None) == 0, "same block elsewhere"
    assert beginnings.observe((3, 3, 3, 3, 3, 3, 3, 3), None) == 0, "not shared with itself"


def test_the_longest_unseen_beginnings_are_forgotten() -> None:
    beginnings = PromptBeginnings(2, max_blocks=3)
    beginnings.observe((1, 1), None)
    beginnings.observe((2, 2, 2, 2), None)
    assert beginnings.observe((1, 1), None) == 2
    beginnings.observe((3, 3), None)
    assert beginnings.observe((1, 1), None) == 2
    assert beginnings.observe((2, 2, 2, 2), None) == 0


def test_who_comes_later_shares_too() -> None:
    beginnings = PromptBeginnings(4)
    first, second = (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 0, 8)
    beginnings.observe(first, None)
    assert beginnings.num_shared(first, None) == 0, "not with itself, however often it is asked"
    assert beginnings.num_shared(first, None) == 0
    beginnings.observe(second, None)
    assert beginnings.num_shared(first, None) == beginnings.num_shared(second, None) == 4
    assert beginnings.num_shared(first, 1) == 0, "another salt is another cache"
    beginnings.observe(first, None)
    assert beginnings.num_shared(first, None) == 8
    assert beginnings.num_shared(second, None) == 4


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_what_is_shared_by_the_definition(prompts: list[list[int]]) -> None:
    beginnings = PromptBeginnings(2)
    for number, prompt in enumerate(prompts):
        told = beginnings.observe(prompt, None)
        assert told == max((_num_common(prompt, p) for p in prompts[:number]), default=0)
    for number, prompt in enumerate(prompts):
        others = (p for i, p in enumerate(prompts) if i != number)
        shared = max((_num_common(prompt, p) for p in others), default=0)
        assert beginnings.num_shared(prompt, None) == shared


def _num_common(a: list[int], b: list[int]) -> int:
    """Leading tokens in whole blocks of 2 that both begin with."""
    return max(end for end in range(0, len(a) + 1, 2) if a[:end] == b[:end])


def test_asking_keeps_a_beginning_in_mind() -> None:
    beginnings = PromptBeginnings(2, max_blocks=2)
    for prompt in ((1, 1), (1, 1), (2, 2)):
        beginnings.observe(prompt, None)
    assert beginnings.num_shared((1, 1), None) == 2
    beginnings.observe((3, 3), None)
    assert beginnings.num_shared((1, 1), None) == 2


def _requests(h: Harness) -> list[Request]:
    return list(h.executor.requests.values())


def test_every_enqueue_says_so_and_a_resume_keeps_the_beginning() -> None:
    h = Harness()
    prompt = (1, 2, 3, 4, 5)
    h.submit(prompt, 3)
    h.run_to_empty()
    handle = h.submit(prompt, 40)
    h.step()
    h.step()
    h.pause(handle)
    for _ in range(3):
        h.step()
    h.run_to_empty()
    first, second, resumed = _requests(h)
    assert first.kv_cache_retention_config == retention_config(0, 3, is_pausable=True)
    assert second.kv_cache_retention_config == retention_config(4, 40, is_pausable=True)
    num_left = 45 - len(resumed.input_token_ids)
    assert num_left < 40
    assert resumed.kv_cache_retention_config == retention_config(4, num_left, is_pausable=True)


def test_a_resume_knows_who_came_with_the_same_beginning() -> None:
    """The first user of a common prompt does not make it its own again, and it stays shared when
    those who shared it are forgotten."""
    h = Harness()
    prompt = (1, 2, 3, 4, 5)
    first = h.submit(prompt, 40)
    for _ in range(3):
        h.step()
    h.submit(prompt, 3)
    for _ in range(2):
        h.pause(first)
        for _ in range(6):
            h.step()
    h.run_to_empty()
    h.expect_whole(first, prompt, 40)
    configs = [r.kv_cache_retention_config for r in _requests(h) if r.client_id == first]
    shared = [_priority_at(c, 0) == SHARED_PRIORITY for c in configs if c is not None]
    assert shared == [False, True, True]


def test_the_baseline_says_what_a_stock_deployment_does() -> None:
    host = dataclasses.replace(CONFIG, kv_cache_host_memory_bytes=1 << 20)
    for policy, is_stock in (("fcfs-reserve", True), ("tokenflow", False)):
        h = Harness(dataclasses.replace(host, scheduling_policy=policy))
        h.submit()
        h.run_to_empty()
        assert [r.kv_cache_retention_config is None for r in _requests(h)] == [is_stock]


def test_output_that_nobody_can_resume_is_not_worth_a_copy() -> None:
    h = Harness()
    h.submit(sampling_config=SamplingConfig(top_p_decay=0.5))
    h.run_to_empty()
    (request,) = _requests(h)
    assert request.kv_cache_retention_config == retention_config(0, 10, is_pausable=False)


def test_an_engine_with_neither_host_tier_nor_events_is_told_nothing() -> None:
    h = Harness(dataclasses.replace(CONFIG, kv_event_buffer_max_size=0))
    h.submit()
    h.run_to_empty()
    assert [r.kv_cache_retention_config for r in _requests(h)] == [None]


def test_a_lease_that_is_not_the_last_is_worth_more_than_what_ended() -> None:
    config = retention_config(0, 100, is_pausable=True, has_lease=True)
    assert config.decode_retention_priority > 35
    assert config.token_range_retention_configs[0].priority == config.decode_retention_priority
