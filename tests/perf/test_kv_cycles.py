"""The pause and resume cycles, short, and the eyes that look at a long run."""

from __future__ import annotations

import os

import pytest

from perf.kv_cycles import PER_SAMPLE, Sample, find_drift, format_report, run_cycles
from perf.long_runs.server_processes import descendants


@pytest.mark.parametrize("kv_tiering", [False, True], ids=["trtllm-rules", "kv-tiering"])
def test_cycles_on_a_host_tier_that_is_too_small(kv_tiering: bool) -> None:
    before = descendants(os.getpid())
    report = run_cycles(2 * PER_SAMPLE, kv_tiering=kv_tiering)
    assert report.faults == [], format_report(report)
    assert report.left == {}
    last = report.samples[-1]
    assert last.num_from_host > last.num_from_device > 0
    assert last.num_recomputed > 0, "the host held everybody"
    assert last.num_host_cached_blocks > 190, "the host was never full"
    assert descendants(os.getpid()) == before


def sample(number: int, share: float, megabytes: float) -> Sample:
    return Sample(
        num_cycles=number * PER_SAMPLE,
        num_from_device=0,
        num_from_host=round(100 * share),
        num_recomputed=round(100 * (1 - share)),
        runtime_rss=50_000_000,
        engine_rss=int(megabytes * 1e6),
        num_host_cached_blocks=200,
    )


@pytest.mark.parametrize(
    ("shares", "megabytes", "found"),
    [
        ([0.7] * 20, [30.0] * 20, []),
        ([1.0, 0.9, *[0.7] * 18], [20.0, 25.0, *[30.0] * 18], []),
        ([0.7] * 11 + [0.5] * 9, [30.0] * 20, ["the hit share went from 0.70 to 0.50"]),
        ([0.7] * 19 + [0.0], [30.0] * 20, ["the hit share was 0.00 before cycle 2000"]),
        ([0.7] * 20, [30.0 + 0.2 * i for i in range(20)], ["engine_rss went from 31.2 to 33.0 MB"]),
    ],
)
def test_drift_is_found(shares: list[float], megabytes: list[float], found: list[str]) -> None:
    samples = [sample(i + 1, *both) for i, both in enumerate(zip(shares, megabytes, strict=True))]
    assert find_drift(samples) == found
