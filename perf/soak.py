"""The long run: thousands of requests of every kind through a real server, and what it keeps.

`python -m perf.soak` sends 20,000 requests to the scripted engine, lets the server run empty after
each thousand and measures what is left then: memory, threads and descriptors of its processes,
shared memory, its own gauges. Prints the table, writes perf/results/soak.json, and ends with 1 when
an answer was wrong, something was left or something grows.

What counts as flat: resident memory whose mean over the last third of the rounds lies less than 2 %
or 2 MB per 10,000 requests above that over the second third; threads, descriptors and shared memory
no more in the last third than in the second, but for two.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf.harness import serving
from perf.long_runs.known_answers import write_number_tokenizer
from perf.long_runs.server_processes import (
    ENGINE,
    STUB,
    find_process,
    gauges_of,
    log_faults,
    process_cost,
    read_metrics,
    shm_bytes,
    shm_files,
    wait_empty,
)
from perf.long_runs.soak_load import Kind, Load
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer

RESULTS = Path(__file__).resolve().parent / "results"
_EMPTY_TIMEOUT_S = 20.0
_MB = 1e6


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """A run: requests in all, rounds between which the server runs empty, clients at once."""

    num_requests: int = 20_000
    num_rounds: int = 20
    num_workers: int = 24
    seed: int = 20260


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may grow from the second to the last third of the rounds.

    rss_share and rss_bytes: of resident memory, whichever is more; rss_bytes per 10,000 requests.
    count: threads, descriptors, files.
    """

    rss_share: float = 0.02
    rss_bytes: float = 2 * _MB
    count: int = 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What an empty server keeps. server, stub, engine: its processes, in this order of columns."""

    num_requests: int
    time_s: float
    server_rss: int
    stub_rss: int
    engine_rss: int
    stub_threads: int
    engine_threads: int
    stub_fds: int
    engine_fds: int
    shm_bytes: int
    shm_files: int
    num_active: int
    num_held: int
    num_used_blocks: int


_RSS = ("server_rss", "stub_rss", "engine_rss")
_COUNTS = ("stub_threads", "engine_threads", "stub_fds", "engine_fds", "shm_files")
_LEFT = ("num_active", "num_held", "num_used_blocks")


@dataclass(kw_only=True)
class SoakReport:
    """What came of a run. faults: everything that was wrong."""

    samples: list[Sample]
    num_of_kind: dict[str, int]
    num_cut_short: dict[str, int]
    num_tokens: int
    metrics: dict[str, float]
    faults: list[str]


def soak_config(folder: Path, **changes: Any) -> ServingConfig:
    """A server with few slots, short quanta and a pool that does not hold what it has seen."""
    settings: dict[str, Any] = {
        "engine": "scripted",
        "tokenizer_dir": str(write_number_tokenizer(folder / "tokenizer")),
        "scripted_step_s": 0.002,
        "max_batch_size": 6,
        "max_seq_len": 256,
        "max_tokens_in_paged_kv_cache": 2048,
        "plan_interval_s": 0.01,
        "min_quantum_s": 0.01,
        "slack_margin_s": 0.02,
        "cancellation_check_period_ms": 50,
        "stats_check_period_ms": 50,
    }
    return ServingConfig(**{**settings, **changes})


def run_soak(
    server: TritonServer, plan: SoakPlan, on_done: Callable[[], object] = lambda: None
) -> SoakReport:
    """Play a run on a started server; blocks. on_done: called after each request."""
    load = Load(server.grpc_url, server.http_url, num_workers=plan.num_workers, seed=plan.seed)
    samples: list[Sample] = []
    num_done = 0
    start = time.monotonic()
    for number in range(plan.num_rounds):
        goal = plan.num_requests * (number + 1) // plan.num_rounds
        asyncio.run(load.run(goal - num_done, on_done))
        num_done = goal
        samples.append(take_sample(server, num_done, time.monotonic() - start))
    faults = [*load.faults]
    for sample in samples:
        left = {name: getattr(sample, name) for name in _LEFT if getattr(sample, name)}
        if left:
            faults.append(f"left after {sample.num_requests} requests: {left}")
    values = read_metrics(server)
    if not gauges_of(values).healthy:
        faults.append("the server is unhealthy")
    faults += log_faults(server)
    for kind in (Kind.STOP, Kind.TIMEOUT):
        if load.num_cut_short[kind] < load.num_done[kind] // 10:
            faults.append(f"{kind.value[1]}, yet few were cut short: {load.num_cut_short[kind]}")
    return SoakReport(
        samples=samples,
        num_of_kind={kind.value[1]: load.num_done[kind] for kind in Kind},
        num_cut_short={kind.value[1]: count for kind, count in load.num_cut_short.items() if count},
        num_tokens=load.num_tokens,
        metrics={
            f"{name.removeprefix('tokenflow_')} {label}".strip(): value
            for (name, label), value in values.items()
            if name.startswith("tokenflow_") and name.endswith("_total")
        },
        faults=faults,
    )


def take_sample(server: TritonServer, num_requests: int, time_s: float) -> Sample:
    """Wait until the server is empty and measure it."""
    gauges = wait_empty(server, _EMPTY_TIMEOUT_S)
    costs = {
        "server": process_cost(server.pid or 0),
        "stub": process_cost(find_process(server, STUB)),
        "engine": process_cost(find_process(server, ENGINE)),
    }
    return Sample(
        num_requests=num_requests,
        time_s=round(time_s, 1),
        server_rss=costs["server"].rss_bytes,
        stub_rss=costs["stub"].rss_bytes,
        engine_rss=costs["engine"].rss_bytes,
        stub_threads=costs["stub"].num_threads,
        engine_threads=costs["engine"].num_threads,
        stub_fds=costs["stub"].num_fds,
        engine_fds=costs["engine"].num_fds,
        shm_bytes=shm_bytes(server.shm_prefix),
        shm_files=len(shm_files(server.shm_prefix)),
        num_active=gauges.num_active,
        num_held=gauges.num_held,
        num_used_blocks=gauges.num_used_blocks,
    )


def find_growth(samples: Sequence[Sample], limits: Limits) -> list[str]:
    """What grew by more than `limits` allow between the second and the last third of the rounds.

    samples: three or more.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    num_requests = last[-1].num_requests - middle[-1].num_requests
    grown = []
    for name in _RSS:
        before = statistics.fmean(getattr(sample, name) for sample in middle)
        after = statistics.fmean(getattr(sample, name) for sample in last)
        allowed = max(limits.rss_share * before, limits.rss_bytes * num_requests / 10_000)
        if after - before > allowed:
            grown.append(f"{name}: {before / _MB:.1f} -> {after / _MB:.1f} MB")
    for name in _COUNTS:
        before = max(getattr(sample, name) for sample in middle)
        after = max(getattr(sample, name) for sample in last)
        if after - before > limits.count:
            grown.append(f"{name}: {before:g} -> {after:g}")
    shm_before = max(sample.shm_bytes for sample in middle)
    shm_after = max(sample.shm_bytes for sample in last)
    if shm_after > shm_before:
        grown.append(f"shm_bytes: {shm_before} -> {shm_after}")
    return grown


def format_table(samples: Sequence[Sample]) -> str:
    """One line per sample; memory in MB."""
    lines = [
        "requests    s   server    stub  engine MB  threads    fds  /dev/shm MB  files  left",
    ]
    lines += [
        f"{s.num_requests:8} {s.time_s:4.0f} {s.server_rss / _MB:8.1f} {s.stub_rss / _MB:7.1f} "
        f"{s.engine_rss / _MB:7.1f}    {s.stub_threads:4}+{s.engine_threads} "
        f"{s.stub_fds:4}+{s.engine_fds}  {s.shm_bytes / _MB:11.2f}  {s.shm_files:5}  "
        f"{s.num_active}/{s.num_held}/{s.num_used_blocks}"
        for s in samples
    ]
    return "\n".join(lines)


def format_report(report: SoakReport, growth: Sequence[str]) -> str:
    """What a person reads."""
    kinds = ", ".join(f"{count} {name}" for name, count in report.num_of_kind.items())
    lines = [format_table(report.samples), f"requests: {kinds}; {report.num_tokens} tokens"]
    lines.append(f"cut short as asked: {report.num_cut_short}")
    lines += [f"{name}: {value:g}" for name, value in sorted(report.metrics.items())]
    lines += [f"WRONG {fault}" for fault in report.faults[:50]]
    lines += [f"GROWS {text}" for text in growth] or ["flat"]
    return "\n".join(lines)


def as_json(report: SoakReport, growth: Sequence[str], plan: SoakPlan) -> dict[str, Any]:
    """The content of soak.json."""
    return {
        "plan": dataclasses.asdict(plan),
        "samples": [dataclasses.asdict(sample) for sample in report.samples],
        "num_of_kind": report.num_of_kind,
        "num_cut_short": report.num_cut_short,
        "num_tokens": report.num_tokens,
        "metrics": report.metrics,
        "faults": report.faults,
        "growth": list(growth),
        "machine": {
            "python": platform.python_version(),
            "num_cores": len(os.sched_getaffinity(0)),
            "date": time.strftime("%Y-%m-%d"),
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("nvidia-pytriton", "tritonclient", "grpcio", "numpy", "tokenizers")
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=SoakPlan.num_requests)
    parser.add_argument("--rounds", type=int, default=SoakPlan.num_rounds, help="at least 3")
    parser.add_argument("--seed", type=int, default=SoakPlan.seed)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of soak.json")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error("--rounds must be at least 3")
    plan = SoakPlan(num_requests=options.requests, num_rounds=options.rounds, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="tokenflow-soak-") as name:
        folder = Path(name)
        bar = tqdm(total=plan.num_requests, unit=" requests", file=sys.stderr, mininterval=5.0)
        with bar, serving(soak_config(folder), folder / "server", "soak") as server:
            report = run_soak(server, plan, bar.update)
    growth = find_growth(report.samples, Limits())
    print(format_report(report, growth))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "soak.json"
    path.write_text(json.dumps(as_json(report, growth, plan), indent=1) + "\n")
    print(f"written: {path}")
    return 1 if report.faults or growth else 0


if __name__ == "__main__":
    sys.exit(main())
