"""The tiers of the embedded engine: hints, events and statistics, and settings that give none."""

from __future__ import annotations

import dataclasses
import logging

import msgspec
import pytest

from tests.remote.counting_engine import stats_of
from tests.remote.helpers import request, wait_until
from tests.remote.kv_events import hear
from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.executor.api import Executor, IterationStats
from tokenflow.executor.factory import create_executor, start_engine
from tokenflow.executor.host_kv import HostKv
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvTierStats,
)
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.inflight.scripts import expected, script_by_name
from tokenflow.kv_mirror import KvMirror

BLOCK_BYTES = 4 * KV_BYTES_PER_TOKEN
TIERED = ServingConfig(
    engine="scripted",
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=64,
    max_num_tokens=32,
    max_seq_len=48,
    max_batch_size=2,
    kv_cache_host_memory_bytes=8 * BLOCK_BYTES,
    kv_tiering=True,
)

SCRIPT = script_by_name("counting", 256)


@pytest.mark.parametrize("in_process", [False, True], ids=["its own process", "this process"])
def test_hints_move_blocks_of_the_embedded_engine(in_process: bool) -> None:
    executor = create_executor(TIERED) if in_process else start_engine(TIERED)
    try:
        if isinstance(executor, RemoteExecutor):
            assert executor.info.num_host_blocks == 8
            assert executor.info.block_bytes == BLOCK_BYTES
        first = hear(executor, 1)[0]
        assert first.data == KVCacheCreatedData([16, 8])
        whole = request(10)
        _finish(executor, executor.enqueue_request(whole))
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        stored = [e for e in hear(executor, 1) if isinstance(e.data, KVCacheStoredData)]
        all_tokens = [t for e in stored for block in e.data.blocks for t in block.tokens]
        assert all_tokens[:3] == [1, 2, 3]
        tiering.offload(all_tokens, 2)
        _finish(executor, executor.enqueue_request(request(1, first=9)))
        copied = [e for e in hear(executor, 2) if isinstance(e.data, KVCacheUpdatedData)]
        assert [e.data.has_host_copy for e in copied] == [True, True]
        assert tiering.locate(all_tokens).num_copied_blocks == 2
    finally:
        executor.shutdown()


def test_what_the_proxy_dropped_is_known_again() -> None:
    """The events of a long run that nobody took; then the mirror is the engine's tree again."""
    config = dataclasses.replace(TIERED, kv_event_buffer_max_size=60)
    executor = start_engine(config)
    try:
        manager, tiering = executor.get_kv_cache_event_manager(), executor.get_kv_tiering()
        assert manager is not None
        assert tiering is not None
        mirror = KvMirror(config.tokens_per_block)
        mirror.apply(hear(executor, 1))
        for i in range(40):
            _finish(executor, executor.enqueue_request(request(10, first=i)))
        mirror.apply(manager.get_latest_events(0))
        assert not mirror.is_complete

        def is_known() -> bool:
            _finish(executor, executor.enqueue_request(request(10)))
            mirror.apply(manager.get_latest_events(0))
            return mirror.is_complete

        wait_until(is_known)
        assert mirror.num_gaps == 1
        whole = [1, 2, 3, *expected(SCRIPT, [1, 2, 3], 10)[0]]
        assert tiering.locate(whole).num_tokens == mirror.locate(whole[:-1]).num_tokens == 12
    finally:
        executor.shutdown()


def test_at_idle_the_last_statistics_have_nothing_on_its_way() -> None:
    """Though the copies take longer than the engine's process looks after a hint."""
    executor = RemoteExecutor(TIERED, factory="tests.remote.engines:slow_copies")
    try:
        _finish(executor, executor.enqueue_request(request(10)))
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        tiering.offload([1, 2, 3, *expected(SCRIPT, [1, 2, 3], 10)[0]], 2)
        stats: list[IterationStats] = []

        def num_in_transit() -> int:
            stats.extend(executor.get_latest_iteration_stats())
            tiers = stats[-1].kv_tier_stats if stats else None
            return tiers.num_host_in_transit_blocks if tiers is not None else -1

        wait_until(lambda: num_in_transit() == 2)
        wait_until(lambda: num_in_transit() == 0)
        copied = [e for e in hear(executor, 2) if isinstance(e.data, KVCacheUpdatedData)]
        assert [e.data.has_host_copy for e in copied] == [True] * 2
    finally:
        executor.shutdown()


class IdleEngine:
    """Has nothing to say."""

    def get_kv_cache_event_manager(self) -> None:
        return None

    def get_kv_tiering(self) -> None:
        return None


def _stats(num_in_transit: int) -> IterationStats:
    tiers = KvTierStats(
        block_bytes=1,
        num_device_blocks=8,
        num_device_used_blocks=0,
        num_device_cached_blocks=0,
        num_device_in_transit_blocks=0,
        num_host_blocks=8,
        num_host_cached_blocks=0,
        num_host_in_transit_blocks=num_in_transit,
    )
    return msgspec.structs.replace(stats_of(1, 0), kv_tier_stats=tiers)


def test_an_idle_engine_is_looked_at_while_its_copies_run_and_not_longer() -> None:
    kv = HostKv(IdleEngine(), lambda located: None)
    assert not kv.expects_more([])
    assert kv.expects_more([_stats(0), _stats(2)])
    for _ in range(100):
        assert kv.expects_more([])
    assert not kv.expects_more([_stats(2), _stats(0)])
    assert not kv.expects_more([])


def _finish(executor: Executor, id: int) -> None:
    done = False
    while not done:
        done = any(r.request_id == id and r.result.is_final for r in executor.await_responses())


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"kv_cache_host_memory_bytes": BLOCK_BYTES - 1}, f"hold no KV block ({BLOCK_BYTES}"),
        (
            {"kv_cache_host_memory_bytes": 1 << 20, "kv_cache_onboard_blocks": False},
            "kv_cache_onboard_blocks is false",
        ),
        ({"kv_cache_host_memory_bytes": 0}, None),
        ({"kv_cache_host_memory_bytes": 3 * BLOCK_BYTES + 1}, None),
    ],
)
def test_a_host_tier_of_no_use_is_warned_of(
    fields: dict[str, int], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServingConfig(engine="scripted", tokens_per_block=4, **fields)
    with caplog.at_level(logging.WARNING, logger="tokenflow"):
        executor = create_executor(config)
    executor.shutdown()
    warnings = [r.getMessage() for r in caplog.records if "host tier" in r.getMessage()]
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert warning in warnings[0]
        assert "there is no host tier" in warnings[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a host tier"),
        ({"kv_cache_host_memory_bytes": 100}, "one KV block takes"),
        ({"kv_cache_host_memory_bytes": 1 << 20, "kv_event_buffer_max_size": 0}, "only events"),
    ],
)
def test_tiering_without_what_it_needs_is_refused(fields: dict[str, int], message: str) -> None:
    config = ServingConfig(engine="scripted", kv_tiering=True, **fields)
    with pytest.raises(ConfigError, match=message) as caught:
        create_executor(config)
    assert caught.value.key == "kv_tiering"
