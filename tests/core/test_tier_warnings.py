"""What goes wrong with the tiers is said, once in a while, with counts; on the real engine core."""

from __future__ import annotations

import dataclasses
import logging

import msgspec
import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.inflight.paces import FailsSometimes
from tokenflow.answers import Counters
from tokenflow.config import ServingConfig
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN, ScriptedRunner
from tokenflow.inflight.scripts import Script
from tokenflow.tier_totals import TierTotals
from tokenflow.tier_warnings import WARNING_PERIOD_S
from tokenflow.types import Decision, SessionState, Snapshot

BLOCK_BYTES = 4 * KV_BYTES_PER_TOKEN
FULL = dataclasses.replace(
    CONFIG, max_queue_size=64, max_batch_size=4, kv_cache_host_memory_bytes=8 * BLOCK_BYTES
)
TIERS = KvTierStats(
    block_bytes=100,
    num_device_blocks=10,
    num_device_used_blocks=0,
    num_device_cached_blocks=0,
    num_device_in_transit_blocks=0,
    num_host_blocks=20,
    num_host_cached_blocks=0,
    num_host_in_transit_blocks=0,
)


def changed(tiers: KvTierStats, **changes: object) -> KvTierStats:
    return msgspec.structs.replace(tiers, **changes)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Its `messages` are what was said so far."""
    caplog.set_level(logging.WARNING, logger="tokenflow")
    return caplog


# -- rules ---------------------------------------------------------------------------------------


def test_failed_copies_are_counted_until_the_next_warning(log: pytest.LogCaptureFixture) -> None:
    totals, tiers, now = TierTotals(Counters()), TIERS, 100.0

    def fail(num_offloads: int, num_onboards: int, error: str, now: float) -> None:
        nonlocal tiers
        tiers = changed(
            tiers,
            num_offloads_failed=tiers.num_offloads_failed + num_offloads,
            num_onboards_failed=tiers.num_onboards_failed + num_onboards,
            last_copy_error=error,
        )
        totals.observe(tiers, now)

    totals.observe(tiers, now)
    assert not log.messages
    fail(2, 0, "no such page", now)
    for i in range(1, 1000):
        fail(1, 3, "out of luck", now + i * (WARNING_PERIOD_S / 1000))
    assert len(log.messages) == 1
    fail(0, 1, "", now + WARNING_PERIOD_S)
    first, second = log.messages
    assert "2 to the host, 0 back" in first
    assert "no such page" in first
    assert "999 to the host, 2998 back" in second
    assert "reason unknown" in second
    totals.observe(tiers, now + 10 * WARNING_PERIOD_S)
    assert len(log.messages) == 2, "nothing new, nothing to say"


@pytest.mark.parametrize("changes", [{"num_host_evicted_blocks": 1}, {"num_host_full": 1}])
def test_lost_kv_is_a_matter_of_room_only_where_room_was_short(
    log: pytest.LogCaptureFixture, changes: dict[str, int]
) -> None:
    totals = TierTotals(Counters())
    totals.pushed_out(30, 1.0)
    totals.observe(TIERS, 1.0)
    totals.pushed_out(30, 1.0)
    assert not log.messages, "there is no tier, or it was never short"
    totals.observe(changed(TIERS, **changes), 2.0)
    for i in range(100):
        totals.pushed_out(30, 2.0 + 0.1 * i)
    assert len(log.messages) == 1
    totals.pushed_out(7, 2.0 + WARNING_PERIOD_S)
    assert "100 of them computed 2977 tokens again" in log.messages[1]
    assert "of its 20 blocks" in log.messages[1]
    totals.lost()
    totals.pushed_out(30, 1000.0)
    assert len(log.messages) == 2, "the next engine starts empty"


# -- on the engine core --------------------------------------------------------------------------


def paused_one_by_one(h: Harness, num_streams: int, num_tokens: int) -> list[int]:
    """So many streams, each paused at `num_tokens` tokens in all, which nobody resumes."""
    assert isinstance(h.planner, ChosenPlanner)
    h.planner.hold_paused = True
    handles = []
    for n in range(num_streams):
        handle = h.submit(tuple((n + i * (n + 2)) % 97 for i in range(20)), 20)
        handles.append(handle)
        session = h.coordinator.table.get(handle)
        assert session is not None
        while session.num_tokens < num_tokens:
            h.step()
        h.pause(handle)
        while session.state is not SessionState.PREEMPTED:
            h.step()
    h.planner.hold_paused = False
    return handles


@pytest.mark.parametrize("kv_tiering", [False, True], ids=["rules", "tiering"])
def test_a_host_tier_that_is_too_small_costs_one_warning(
    log: pytest.LogCaptureFixture, kv_tiering: bool
) -> None:
    """8 host blocks, 20 streams of 6 blocks or more, and a pool for 6 of them."""
    h = Harness(dataclasses.replace(FULL, kv_tiering=kv_tiering), ChosenPlanner(4))
    handles = paused_one_by_one(h, 20, 24)
    h.run_to_empty()
    assert all(h.end_of(handle) for handle in handles)
    counters = h.coordinator.counters
    assert counters.num_resumes == 20
    assert counters.num_resumes_recomputed >= 10
    assert len(log.messages) == 1, log.messages
    assert "kv_cache_host_memory_bytes" in log.messages[0]
    assert h.now < WARNING_PERIOD_S


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(FULL, kv_cache_host_memory_bytes=0),
        dataclasses.replace(FULL, kv_cache_host_memory_bytes=400 * BLOCK_BYTES),
    ],
    ids=["none", "large"],
)
def test_no_warning_without_a_tier_or_with_a_large_one(
    log: pytest.LogCaptureFixture, config: ServingConfig
) -> None:
    h = Harness(config, ChosenPlanner(4))
    paused_one_by_one(h, 20, 24)
    h.run_to_empty()
    has_tier = config.kv_cache_host_memory_bytes > 0
    assert (h.coordinator.counters.num_resumes_recomputed == 0) is has_tier
    assert not log.messages


class _Recomputes(ChosenPlanner):
    """Has all that is resumed computed again."""

    def __call__(self, snapshot: Snapshot) -> Decision:
        decision = super().__call__(snapshot)
        return dataclasses.replace(decision, recompute=decision.resume)


def test_what_is_computed_by_choice_is_not_lost(log: pytest.LogCaptureFixture) -> None:
    h = Harness(dataclasses.replace(FULL, kv_tiering=True), _Recomputes(4))
    paused_one_by_one(h, 20, 24)
    h.run_to_empty()
    counters = h.coordinator.counters
    assert counters.num_resumes_recomputed >= 10
    assert counters.num_host_evicted_blocks + counters.num_host_full > 0
    assert not log.messages


def test_what_goes_with_an_engine_is_not_pushed_out(log: pytest.LogCaptureFixture) -> None:
    h = Harness(FULL, ChosenPlanner(4))
    paused_one_by_one(h, 3, 24)
    h.lose_engine()
    h.start_engine()
    assert isinstance(h.planner, ChosenPlanner)
    h.planner.hold_paused = True
    for first in (2, 5, 9, 14, 20, 27, 35, 44):  # the new one's tier overflows
        h.submit(tuple((first * (i + 1)) % 97 for i in range(20)), 20)
    while len(h.coordinator.table) > 3:
        h.step()
    h.planner.hold_paused = False
    h.run_to_empty()
    counters = h.coordinator.counters
    assert counters.num_resumes_recomputed == 3
    assert counters.num_host_evicted_blocks > 0
    assert not [text for text in log.messages if "host tier" in text]


class _OnboardsFail(ScriptedRunner):
    def __init__(self, script: Script, vocab_size: int) -> None:
        onboard = CopyDirection.ONBOARD
        super().__init__(
            script,
            vocab_size,
            pace=FailsSometimes(lambda t: "planned" if t.direction is onboard else None),
        )


def test_copies_that_fail_cost_one_warning_with_the_reason(log: pytest.LogCaptureFixture) -> None:
    large = dataclasses.replace(FULL, kv_cache_host_memory_bytes=400 * BLOCK_BYTES)
    h = Harness(large, ChosenPlanner(4), runner_type=_OnboardsFail)
    handles = paused_one_by_one(h, 20, 24)
    h.run_to_empty()
    assert all(h.end_of(handle) for handle in handles)
    counters = h.coordinator.counters
    assert counters.num_onboards_failed > 1
    failures = [text for text in log.messages if "copies of KV blocks failed" in text]
    assert len(failures) == 1
    assert "planned" in failures[0]
    assert not [text for text in log.messages if "host tier" in text], "it was not short of room"
