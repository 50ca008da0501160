"""KV events and statistics of both tiers, as TensorRT-LLM gives them, on every engine.

What a reader of the events knows must agree with what the statistics say, and the statistics with
their pitfalls: the pool sizes are both tiers together, and what is "used" includes the whole host.
"""

from __future__ import annotations

import time

import pytest

from tests.contract.client import WAIT_S, Client
from tests.contract.conftest import SLOW, skip_without_tiering
from tests.contract.engines import Engine
from tests.inflight.mirror import Mirror
from tokenflow.executor.api import FinishReason, OutputConfig
from tokenflow.executor.kv_api import DEVICE_LEVEL, HOST_LEVEL, KVCacheUpdatedData

NUM_DEVICE_BLOCKS, NUM_TOKENS = 40, 60
TIERS = {"kv_cache_host_memory_bytes": 2 << 20}
BOTH = OutputConfig(return_log_probs=True, return_perf_metrics=True)


class Reader:
    """Follows the events and the statistics of one executor from its beginning."""

    def __init__(self, client: Client) -> None:
        self._client = client
        manager = client.executor.get_kv_cache_event_manager()
        assert manager is not None
        self._manager = manager
        self.mirror = Mirror()
        self.moves = {HOST_LEVEL: 0, DEVICE_LEVEL: 0}

    @property
    def stats(self):
        return self._client.stats[-1]

    def read(self) -> None:
        events = self._manager.get_latest_events(0)
        self.mirror.replay(events)
        for event in events:
            if isinstance(event.data, KVCacheUpdatedData) and event.data.cache_level is not None:
                self.moves[event.data.cache_level.new_value] += 1

    def num_blocks(self, level: int) -> int:
        return sum(block.level == level for block in self.mirror.blocks.values())

    def agrees(self) -> bool:
        """Whether the last statistics of an idle engine say what the events say."""
        self._client.pump(0.01)
        self.read()
        if not self._client.stats or self.stats.kv_tier_stats is None:
            return False
        tiers = self.stats.kv_tier_stats
        copies = sum(block.has_host_copy for block in self.mirror.blocks.values())
        return (
            self.stats.num_active_requests,
            tiers.num_device_used_blocks,
            tiers.num_device_cached_blocks,
            tiers.num_host_cached_blocks,
            tiers.num_device_in_transit_blocks + tiers.num_host_in_transit_blocks,
        ) == (0, 0, self.num_blocks(DEVICE_LEVEL), self.num_blocks(HOST_LEVEL) + copies, 0)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.agrees():
            assert time.monotonic() < deadline, (self.stats, self.mirror.blocks)


def _prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 37 + i * (2 * seed + 1)) % 200 + 3 for i in range(num_tokens)]


@pytest.mark.parametrize("kv_tiering", [False, True], ids=["trtllm-rules", "kv-tiering"])
def test_events_and_statistics_tell_the_same_story(engine: Engine, fresh, kv_tiering: bool) -> None:
    skip_without_tiering(engine, kv_tiering)
    client = fresh(**TIERS, **SLOW, kv_tiering=kv_tiering)
    reader = Reader(client)
    tiering = client.executor.get_kv_tiering()
    prompt = _prompt(1, 30)
    reference = client.run(prompt, NUM_TOKENS, cache_salt_id=client.new_salt())

    first = client.enqueue(prompt, NUM_TOKENS)
    client.wait_tokens(first, 5)
    if tiering is not None:
        tiering.offload([*prompt, *client.outputs[first].token_ids], 100)
    client.executor.cancel_request(first)
    client.wait(first)
    for seed in range(5, 11):  # other traffic, twice the pool
        assert client.run(_prompt(seed, 110), 8).error is None
    reader.wait_until_idle()
    levels = reader.mirror.levels
    assert levels is not None
    num_host_blocks = levels[HOST_LEVEL]
    assert levels[DEVICE_LEVEL] == NUM_DEVICE_BLOCKS
    assert num_host_blocks > 2 * NUM_DEVICE_BLOCKS
    assert reader.num_blocks(HOST_LEVEL) > 0
    streamed = client.outputs[first].token_ids
    assert len(streamed) < NUM_TOKENS, "the cancel came too late for a pause"

    output = client.run([*prompt, *streamed], NUM_TOKENS - len(streamed), output_config=BOTH)
    assert output.reason is FinishReason.LENGTH
    metrics = output.final.result.request_perf_metrics
    assert metrics.num_onboarded_blocks > 0 or not engine.tells_partial_blocks
    assert metrics.num_reused_tokens >= 30 + len(streamed) - 2
    output.token_ids[:0] = streamed
    output.log_probs[:0] = client.outputs[first].log_probs
    assert engine.same(reference, output)

    reader.wait_until_idle()
    tiers, pool = reader.stats.kv_tier_stats, reader.stats.kv_cache_stats
    assert (tiers.num_device_blocks, tiers.num_host_blocks) == (NUM_DEVICE_BLOCKS, num_host_blocks)
    assert pool.max_num_blocks == NUM_DEVICE_BLOCKS + num_host_blocks
    assert pool.free_num_blocks == NUM_DEVICE_BLOCKS, "cached blocks count as free"
    assert pool.used_num_blocks == num_host_blocks, "although nothing is"
    if not kv_tiering:  # else a block that has a copy leaves the device without another
        assert tiers.num_offloads_completed == reader.moves[HOST_LEVEL] > 0
    assert tiers.num_onboards_completed >= metrics.num_onboarded_blocks
    assert reader.moves[DEVICE_LEVEL] > 0
    assert (tiers.num_offloads_failed, tiers.num_onboards_failed) == (0, 0)
    for stats in client.stats:
        figures = stats.kv_cache_stats
        assert figures.used_num_blocks == figures.max_num_blocks - figures.free_num_blocks
        assert figures.max_num_blocks == NUM_DEVICE_BLOCKS + num_host_blocks
        assert figures.free_num_blocks <= NUM_DEVICE_BLOCKS
