"""The KV cache's metrics: names, texts, and the numbers behind them.

Owns the tables for both tiers; metrics_export.py makes the metric objects. In a tier, used + cached
+ in transit + free = total: used by running requests, cached for whoever comes back, on their way
from the other tier. (The device pool's `free` counts what can be had, as TensorRT-LLM's does.)
"""

from __future__ import annotations

from tokenflow.runtime import RuntimeGauges

KV_GAUGES = (
    ("tokenflow_kv_blocks", "KV blocks of the engine's device pool; free ones include cached ones",
     "state", {"total": "num_total_blocks", "free": "num_free_blocks", "used": "num_used_blocks",
               "cached": "device_cached", "in_transit": "device_in_transit"}),
    ("tokenflow_kv_host_blocks", "KV blocks of the host memory behind it", "state",
     {"total": "host_total", "cached": "host_cached", "in_transit": "host_in_transit",
      "free": "host_free"}),
    ("tokenflow_kv_bytes", "Size of the KV pools", "tier",
     {"device": "device_bytes", "host": "host_bytes"}),
    ("tokenflow_kv_hidden_copy_share", "Share of the time of all copies between the tiers for "
     "which no step waited", None, {"": "hidden_copy_share"}),
    ("tokenflow_kv_mirrored", "1 if where KV is is known from the engine's events, 0 if it is "
     "estimated", None, {"": "kv_is_mirrored"}),
)  # fmt: skip
KV_COUNTERS = (
    ("tokenflow_kv_offloaded_blocks_total", "KV blocks copied to the host, by how the copy went; "
     "a failed one is rolled back", "copies",
     {"started": "num_offloads_started", "completed": "num_offloads_completed",
      "failed": "num_offloads_failed"}),
    ("tokenflow_kv_onboarded_blocks_total", "KV blocks brought back from the host, by how the copy "
     "went; what a failed one should have brought is computed again", "copies",
     {"started": "num_onboards_started", "completed": "num_onboards_completed",
      "failed": "num_onboards_failed"}),
    ("tokenflow_kv_copied_bytes_total", "Bytes of the completed copies", "direction",
     {"offload": "offloaded_bytes", "onboard": "onboarded_bytes"}),
    ("tokenflow_kv_copy_seconds_total", "Time of the copies, and for how long steps waited for "
     "them", "what",
     {"offload": "offload_s", "onboard": "onboard_s", "waited": "copy_wait_s"}),
    ("tokenflow_kv_host_evicted_blocks_total", "Blocks given up on the host because another one "
     "needed the room", None, {"": "num_host_evicted_blocks"}),
    ("tokenflow_kv_host_full_total", "Blocks that were not copied because the host had no room",
     None, {"": "num_host_full"}),
    ("tokenflow_kv_event_gaps_total", "How often KV events were missed and the mirror of the cache "
     "began anew", None, {"": "num_kv_event_gaps"}),
)  # fmt: skip


def kv_values(gauges: RuntimeGauges) -> dict[str, float]:
    """The numbers that are not fields of `gauges` or its counters; 0 where nothing is known."""
    values = {
        "num_used_blocks": float(gauges.num_total_blocks - gauges.num_free_blocks),
        "hidden_copy_share": gauges.counters.hidden_copy_share,
    }
    tiers = gauges.tiers
    block_bytes = tiers.block_bytes if tiers else 0
    values["offloaded_bytes"] = float(gauges.counters.num_offloads_completed * block_bytes)
    values["onboarded_bytes"] = float(gauges.counters.num_onboards_completed * block_bytes)
    values["device_bytes"] = float(gauges.num_total_blocks * block_bytes)
    host_total = tiers.num_host_blocks if tiers else 0
    host_cached = tiers.num_host_cached_blocks if tiers else 0
    host_in_transit = tiers.num_host_in_transit_blocks if tiers else 0
    values["host_bytes"] = float(host_total * block_bytes)
    values["host_total"] = float(host_total)
    values["host_cached"] = float(host_cached)
    values["host_in_transit"] = float(host_in_transit)
    values["host_free"] = float(host_total - host_cached - host_in_transit)
    values["device_cached"] = float(tiers.num_device_cached_blocks if tiers else 0)
    values["device_in_transit"] = float(tiers.num_device_in_transit_blocks if tiers else 0)
    return values
