"""The KV cache's metrics add up, and say nothing where nothing is known."""

from __future__ import annotations

import dataclasses

import pytest

from tokenflow.answers import Counters
from tokenflow.config import ServingConfig
from tokenflow.executor.factory import start_engine
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.runtime import Runtime, RuntimeGauges
from triton_backend.kv_metrics import KV_COUNTERS, KV_GAUGES, kv_values

TIERS = KvTierStats(
    block_bytes=100,
    num_device_blocks=10,
    num_device_used_blocks=4,
    num_device_cached_blocks=3,
    num_device_in_transit_blocks=1,
    num_host_blocks=20,
    num_host_cached_blocks=7,
    num_host_in_transit_blocks=2,
)


def test_the_states_of_a_tier_are_the_tier() -> None:
    values = kv_values(RuntimeGauges(num_total_blocks=10, num_free_blocks=6, tiers=TIERS))
    assert values["num_used_blocks"] == 4
    assert values["device_cached"] + values["device_in_transit"] == 4
    host = [values[f"host_{state}"] for state in ("cached", "in_transit", "free")]
    assert host == [7, 2, 11]
    assert values["host_total"] == sum(host)
    assert (values["device_bytes"], values["host_bytes"]) == (1000, 2000)


CONFIG = ServingConfig(engine="scripted", tokens_per_block=8, max_tokens_in_paged_kv_cache=80)
BLOCK_BYTES = 8 * KV_BYTES_PER_TOKEN


@pytest.mark.parametrize("engine_process", [False, True])
@pytest.mark.parametrize(
    ("num_bytes", "num_blocks"), [(BLOCK_BYTES - 1, 0), (0, 0), (12 * BLOCK_BYTES + 5, 12)]
)
def test_the_size_of_the_host_tier_is_known_after_loading(
    num_bytes: int, num_blocks: int, engine_process: bool
) -> None:
    """Before any request came."""
    config = dataclasses.replace(
        CONFIG, kv_cache_host_memory_bytes=num_bytes, engine_process=engine_process
    )
    executor = start_engine(config)
    try:
        gauges = Runtime(executor, config, emit=lambda event: None).gauges()
    finally:
        executor.shutdown()
    values = kv_values(gauges)
    assert values["host_total"] == values["host_free"] == num_blocks
    assert values["host_bytes"] == num_blocks * BLOCK_BYTES
    assert values["device_bytes"] == 10 * BLOCK_BYTES
    assert values["num_used_blocks"] == values["device_cached"] == 0
    assert not any(values[f"{name}_bytes"] for name in ("offloaded", "onboarded"))


def test_bytes_and_shares_follow_the_counters() -> None:
    counters = Counters(
        num_offloads_completed=3,
        num_onboards_completed=2,
        offload_s=3.0,
        onboard_s=1.0,
        copy_wait_s=1.0,
    )
    values = kv_values(RuntimeGauges(tiers=TIERS, counters=counters))
    assert (values["offloaded_bytes"], values["onboarded_bytes"]) == (300, 200)
    assert values["hidden_copy_share"] == 0.75


def test_without_an_engine_everything_is_zero() -> None:
    assert not any(kv_values(RuntimeGauges()).values())


def test_every_number_has_a_source() -> None:
    gauges = RuntimeGauges()
    for _, _, _, fields in (*KV_GAUGES, *KV_COUNTERS):
        for field in fields.values():
            known = field in kv_values(gauges)
            assert known or hasattr(gauges, field) or hasattr(gauges.counters, field), field
