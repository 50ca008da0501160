"""The KV cache's metrics add up, and say nothing where nothing is known."""

from __future__ import annotations

from tokenflow.answers import Counters
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.runtime import RuntimeGauges
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
