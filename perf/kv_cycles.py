"""Thousands of pauses and resumes on a small host tier: does it still find what it kept?

`python -m perf.kv_cycles [--cycles N] [--json]` runs the whole product above the server: the
runtime, and the scripted engine in a process of its own. Many streams, whose clients hold and
release them at random, share a device pool that holds a few and a host tier that holds ten; who is
not found in either is computed again. A cycle is one pause with its resume. Both ways to use the
host are run, one after the other. Every token is checked.

Prints, for each hundred cycles, the share of resumes that found their KV and the memory of both
processes; at the end, what is left. Ends with 1 when a token was wrong, a gauge was negative or
something is left, or when hit share or memory are not the same in both halves of what follows the
first 200 cycles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from perf.long_runs.held_streams import Heard, HeldStreams, Shape
from perf.long_runs.server_processes import (
    ENGINE,
    MeasurementError,
    descendants,
    process_cost,
)
from tokenflow.config import ServingConfig
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.runtime import Runtime, RuntimeGauges

SHAPE = Shape(num_streams=32, num_running=3, num_prompt_tokens=40, max_tokens=120, turn_tokens=6)
TOKENS_PER_BLOCK = 8
BLOCKS_PER_REQUEST = (SHAPE.num_prompt_tokens + SHAPE.max_tokens) // TOKENS_PER_BLOCK
NUM_HOST_REQUESTS = 10
PER_SAMPLE, WARM_UP_CYCLES = 100, 200
HIT_SHARE_TOLERANCE = 0.1
RSS_TOLERANCE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """After so many cycles. num_*: resumes since the sample before, by where the KV came from."""

    num_cycles: int
    num_from_device: int
    num_from_host: int
    num_recomputed: int
    runtime_rss: int
    engine_rss: int
    num_host_cached_blocks: int

    @property
    def hit_share(self) -> float:
        """Share of the resumes that found what they had left."""
        num = self.num_from_device + self.num_from_host + self.num_recomputed
        return (self.num_from_device + self.num_from_host) / num if num else 1.0


@dataclass(kw_only=True)
class Report:
    """A run. left: gauges that should be 0 and are not. faults: everything that was wrong."""

    kv_tiering: bool
    samples: list[Sample] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def cycles_config(*, kv_tiering: bool) -> ServingConfig:
    """A device pool of four requests and a host tier of ten."""
    return ServingConfig(
        engine="scripted",
        scripted_step_s=0.001,
        max_batch_size=SHAPE.num_running + 1,
        max_num_tokens=256,
        max_seq_len=256,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_tokens_in_paged_kv_cache=4 * BLOCKS_PER_REQUEST * TOKENS_PER_BLOCK,
        kv_cache_host_memory_bytes=(
            NUM_HOST_REQUESTS * BLOCKS_PER_REQUEST * TOKENS_PER_BLOCK * KV_BYTES_PER_TOKEN
        ),
        kv_tiering=kv_tiering,
        plan_interval_s=0.005,
        min_quantum_s=0.0,
        max_hold_s=3600.0,
    )


def run_cycles(num_cycles: int, *, kv_tiering: bool, seed: int = 20260) -> Report:
    """One run. Raises MeasurementError when streams stand still."""
    config = cycles_config(kv_tiering=kv_tiering)
    report = Report(kv_tiering=kv_tiering)
    executor = RemoteExecutor(config)
    runtime: Runtime | None = None
    try:
        heard = Heard()
        runtime = Runtime(executor, config, emit=heard.emit, tracer=heard)
        runtime.start()
        cycles = HeldStreams(runtime, heard, seed=seed, shape=SHAPE)
        before = runtime.gauges()
        for until in range(PER_SAMPLE, num_cycles + 1, PER_SAMPLE):
            cycles.run(until)
            now = runtime.gauges()
            report.samples.append(_sample(until, before, now))
            report.faults += _negative(now)
            before = now
        cycles.finish()
        report.left = _left(runtime)
        report.faults += heard.faults
    finally:
        if runtime is not None:
            runtime.shutdown(10.0)
        executor.shutdown()
    if report.left:
        report.faults.append(f"left: {report.left}")
    return report


def _sample(num_cycles: int, before: RuntimeGauges, now: RuntimeGauges) -> Sample:
    old, new = before.counters, now.counters
    return Sample(
        num_cycles=num_cycles,
        num_from_device=new.num_resumes_from_cache - old.num_resumes_from_cache,
        num_from_host=new.num_resumes_from_host - old.num_resumes_from_host,
        num_recomputed=new.num_resumes_recomputed - old.num_resumes_recomputed,
        runtime_rss=process_cost(os.getpid()).rss_bytes,
        engine_rss=process_cost(_engine_pid()).rss_bytes,
        num_host_cached_blocks=now.tiers.num_host_cached_blocks if now.tiers else 0,
    )


def _engine_pid() -> int:
    for pid in descendants(os.getpid()):
        if ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise MeasurementError("the engine's process is gone")


def _numbers(gauges: RuntimeGauges) -> dict[str, int]:
    """Gauges that count something somebody holds; 0 at rest."""
    numbers = {
        "num_waiting": gauges.num_waiting,
        "num_running": gauges.num_running,
        "num_paused": gauges.num_paused,
        "num_held": gauges.num_held,
        "num_used_blocks": gauges.num_total_blocks - gauges.num_free_blocks,
    }
    tiers = gauges.tiers
    if tiers is not None:
        numbers["num_device_used_blocks"] = tiers.num_device_used_blocks
        numbers["num_device_in_transit_blocks"] = tiers.num_device_in_transit_blocks
        numbers["num_host_in_transit_blocks"] = tiers.num_host_in_transit_blocks
        under_way = tiers.num_offloads_started + tiers.num_onboards_started
        under_way -= tiers.num_offloads_completed + tiers.num_onboards_completed
        under_way -= tiers.num_offloads_failed + tiers.num_onboards_failed
        numbers["num_copies_under_way"] = under_way
    return numbers


def _negative(gauges: RuntimeGauges) -> list[str]:
    numbers = _numbers(gauges)
    if gauges.tiers is not None:
        tiers = gauges.tiers
        numbers["num_host_free_blocks"] = (
            tiers.num_host_blocks - tiers.num_host_cached_blocks - tiers.num_host_in_transit_blocks
        )
        numbers["num_device_free_blocks"] = (
            tiers.num_device_blocks
            - tiers.num_device_used_blocks
            - tiers.num_device_cached_blocks
            - tiers.num_device_in_transit_blocks
        )
    return [f"{name} is {number}" for name, number in numbers.items() if number < 0]


def _left(runtime: Runtime) -> dict[str, int]:
    """What is still held when everybody has ended, given a few seconds to be seen."""
    deadline = time.monotonic() + 5.0
    while True:
        left = {name: value for name, value in _numbers(runtime.gauges()).items() if value}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def find_drift(samples: Sequence[Sample]) -> list[str]:
    """What is not flat behind the warm-up, its second half against the first: the hit share, which
    may at no time fall to half of its mean either, and the memory."""
    samples = samples[WARM_UP_CYCLES // PER_SAMPLE :]
    halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    drift = []
    shares = [_mean([sample.hit_share for sample in half]) for half in halves]
    if abs(shares[1] - shares[0]) > HIT_SHARE_TOLERANCE:
        drift.append(f"the hit share went from {shares[0]:.2f} to {shares[1]:.2f}")
    mean = _mean([sample.hit_share for sample in samples])
    drift += [
        f"the hit share was {sample.hit_share:.2f} before cycle {sample.num_cycles}"
        for sample in samples
        if sample.hit_share < mean / 2
    ]
    for name in ("runtime_rss", "engine_rss"):
        sizes = [_mean([getattr(sample, name) for sample in half]) for half in halves]
        if sizes[1] - sizes[0] > RSS_TOLERANCE_BYTES:
            drift.append(f"{name} went from {sizes[0] / 1e6:.1f} to {sizes[1] / 1e6:.1f} MB")
    return drift


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def format_report(report: Report) -> str:
    """What a person reads."""
    mode = "KvTiering" if report.kv_tiering else "TensorRT-LLM's rules"
    lines = [f"{mode}", "cycles  hit share  device  host  again  runtime, engine MB  host blocks"]
    lines += [
        f"{s.num_cycles:6}  {s.hit_share:9.2f}  {s.num_from_device:6}  {s.num_from_host:4}  "
        f"{s.num_recomputed:5}  {s.runtime_rss / 1e6:9.1f} {s.engine_rss / 1e6:8.1f}  "
        f"{s.num_host_cached_blocks:11}"
        for s in report.samples
    ]
    lines += [f"WRONG {fault}" for fault in report.faults] or ["flat, and nothing is left"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both ways of using the host."""
    parser = argparse.ArgumentParser(prog="python -m perf.kv_cycles", description=__doc__)
    parser.add_argument("--cycles", type=int, default=2000, help="of each way; hundreds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    options = parser.parse_args(argv)
    if options.cycles < 5 * PER_SAMPLE:
        parser.error(f"--cycles must be at least {5 * PER_SAMPLE}")
    reports = [run_cycles(options.cycles, kv_tiering=mode) for mode in (False, True)]
    for report in reports:
        report.faults += find_drift(report.samples)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    else:
        print("\n\n".join(map(format_report, reports)))
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
