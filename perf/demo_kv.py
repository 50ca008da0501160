"""The demo of both KV tiers: one burst that finds the KV pool full, on a real server.

`python -m perf.demo_kv [--runs N] [--json]`, which `make demo-kv` runs. Readers of long texts fill
the device pool, then short questions come; slots are left over all the time. The same workload is
played by the same clients, in turn, on a server that

- serves in order of arrival and reserves each request's whole length (the baseline);
- serves in order of arrival and takes blocks as they are needed, the engine itself pausing whom it
  has no block for;
- runs tokenflow, with host memory by TensorRT-LLM's rules (the default);
- runs tokenflow, with host memory that it drives itself (kv_tiering).

All have the same pool, slots and host memory. Writes perf/results/demo_kv.json; the flags are those
of `tokenflow demo`. Raises BenchmarkError when a request failed, when the baseline left room unused
that the next in line would have fitted into, or when it was not the pool that was short.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perf.analysis import BenchmarkError, Run, require_complete, summarise, visible_stalls
from perf.comparison import find_model, parse_settings
from perf.demo import play_demo
from perf.demo_kv_checks import (
    check_baseline,
    fullest_capacity,
    num_pool_blocks,
    peak_pool_share,
)
from perf.demo_kv_table import PAUSE_CAUSES, format_table
from perf.harness import make_config, serving, warm_up
from perf.long_runs.server_processes import read_metrics
from perf.report import RESULTS
from perf.trace_view import read_trace
from perf.workloads import (
    DEMO_SEED,
    KV_DEMO_ENGINE,
    ClientRequest,
    FileTokenizer,
    kv_demo_workload,
    total_read_rate,
)
from tokenflow.config import parse_parameters
from tokenflow.errors import TokenFlowError

_METRICS_SETTLE_S = 1.0
_FULL_SHARE = 0.9
"""A pool that was never so full was not what was short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of serving: its name in results, its words, and what it sets."""

    name: str
    title: str
    settings: Mapping[str, str]


VARIANTS = (
    Variant(
        name="fcfs",
        title="first come, first served: all reserved",
        settings={
            "scheduling_policy": "fcfs-reserve",
            "batch_scheduler_policy": "guaranteed_no_evict",
        },
    ),
    Variant(
        name="fcfs_as_needed",
        title="first come, first served: as needed",
        settings={
            "scheduling_policy": "fcfs-reserve",
            "batch_scheduler_policy": "max_utilization",
        },
    ),
    Variant(
        name="tokenflow",
        title="tokenflow: TensorRT-LLM's rules",
        settings={"scheduling_policy": "tokenflow"},
    ),
    Variant(
        name="tokenflow_tiering",
        title="tokenflow: KvTiering",
        settings={"scheduling_policy": "tokenflow", "kv_tiering": "true"},
    ),
)
BASELINE = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFigures:
    """What the KV cache did during a run. Counts are the server's own."""

    num_internal_pauses: int
    num_offloaded_blocks: int
    num_onboarded_blocks: int
    num_recomputed_tokens: int
    copy_wait_s: float
    peak_pool_share: float
    peak_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRun:
    """A run of one variant."""

    variant: Variant
    run: Run
    kv: KvFigures


_COUNTED = {
    "num_internal_pauses": ("tokenflow_pauses_total", 'kind="internal"'),
    "num_offloaded_blocks": ("tokenflow_kv_offloaded_blocks_total", 'copies="completed"'),
    "num_onboarded_blocks": ("tokenflow_kv_onboarded_blocks_total", 'copies="completed"'),
    "num_recomputed_tokens": ("tokenflow_recomputed_tokens_total", ""),
    "copy_wait_s": ("tokenflow_kv_copy_seconds_total", 'what="waited"'),
}


def run_variant(
    variant: Variant,
    requests: list[ClientRequest],
    *,
    model_path: Path,
    settings: Mapping[str, str],
    folder: Path,
    label: str,
) -> KvRun:
    """Start a server, play the workload once, and read the outcome. Raises BenchmarkError."""
    folder.mkdir(parents=True)
    trace_path = folder / "trace.jsonl"
    own = {**settings, **variant.settings}
    config = make_config(model_path, own.pop("scheduling_policy"), trace_path, own)
    with serving(config, folder, label) as server:
        warm_up(server, FileTokenizer(model_path), folder, config.max_batch_size)
        before = read_metrics(server)
        record = play_demo(server, requests, folder, label)
        time.sleep(_METRICS_SETTLE_S)
        after = read_metrics(server)
    require_complete(record.clients)
    trace = read_trace(
        trace_path, tokens_per_block=config.tokens_per_block, since_time=record.start_time
    )
    if variant.name == BASELINE:
        check_baseline(trace, num_pool_blocks(config), config.max_batch_size)
    counted = {name: after[key] - before[key] for name, key in _COUNTED.items()}
    return KvRun(
        variant=variant,
        run=Run(
            policy=variant.name,
            clients=record.clients,
            visible_stalls=visible_stalls(record.clients, trace, record.lags),
            num_pauses=trace.num_pauses,
            load=total_read_rate(requests) / fullest_capacity(trace),
        ),
        kv=KvFigures(
            num_internal_pauses=int(counted["num_internal_pauses"]),
            num_offloaded_blocks=int(counted["num_offloaded_blocks"]),
            num_onboarded_blocks=int(counted["num_onboarded_blocks"]),
            num_recomputed_tokens=int(counted["num_recomputed_tokens"]),
            copy_wait_s=counted["copy_wait_s"],
            peak_pool_share=peak_pool_share(trace, num_pool_blocks(config)),
            peak_slots=max(step.num_scheduled for step in trace.iterations),
        ),
    )


def run_interleaved(
    num_runs: int,
    requests: list[ClientRequest],
    model_path: Path,
    settings: Mapping[str, str],
    variants: Sequence[Variant] = VARIANTS,
) -> list[KvRun]:
    """`num_runs` of each variant; every other round backwards, so that drift hits all alike."""
    done = []
    with tempfile.TemporaryDirectory(prefix="tokenflow-perf-") as scratch:
        for index in range(num_runs):
            for variant in variants[:: 1 if index % 2 == 0 else -1]:
                label = variant.title
                if num_runs > 1:
                    label += f", run {index + 1}/{num_runs}"
                done.append(
                    run_variant(
                        variant,
                        requests,
                        model_path=model_path,
                        settings=settings,
                        folder=Path(scratch) / f"{variant.name}-{index}",
                        label=label,
                    )
                )
    return done


def collect(
    runs: Sequence[KvRun], settings: Mapping[str, str], variants: Sequence[Variant] = VARIANTS
) -> dict[str, Any]:
    """The content of demo_kv.json. Raises BenchmarkError when tokenflow did not fill the pool or
    ran out of slots: then the pool was not what was short."""
    config = parse_parameters(dict(settings))
    result: dict[str, Any] = {
        "names": [variant.name for variant in variants],
        "baseline": BASELINE,
        "runs": [],
        "settings": dict(settings),
        "seed": DEMO_SEED,
        "machine": {
            "python": platform.python_version(),
            "num_cores": len(os.sched_getaffinity(0)),
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    for variant in variants:
        own = [one for one in runs if one.variant.name == variant.name]
        result[variant.name] = {
            "title": variant.title,
            "num_blocks": num_pool_blocks(config),
            "max_batch_size": config.max_batch_size,
            **_summary(own),
        }
    for name in result["names"]:
        values, baseline = result[name], result[BASELINE]
        values["ttft_p99_ratio"] = values["ttft_p99_s"] / baseline["ttft_p99_s"]
        values["raw_ratio"] = values["raw_throughput"] / baseline["raw_throughput"]
        if values["peak_slots"] >= config.max_batch_size:
            raise BenchmarkError(f"{name} had no slot left: it is not the pool that was short")
        if name.startswith("tokenflow") and values["peak_pool_share"] < _FULL_SHARE:
            raise BenchmarkError(f"{name} never filled the pool: {values['peak_pool_share']:.2f}")
    for one in runs:
        result["runs"].append({"name": one.variant.name, **_summary([one])})
    return result


def _summary(runs: Sequence[KvRun]) -> dict[str, Any]:
    """Counts over all runs are totals, peaks the highest."""
    values = summarise([one.run for one in runs])
    figures = [asdict(one.kv) for one in runs]
    for name in figures[0]:
        combine = max if name.startswith("peak") else sum
        values[name] = combine(figure[name] for figure in figures)
    values["stalls_by_pause"] = sum(values["stalls_by_cause"][cause] for cause in PAUSE_CAUSES)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write the figures; 1 when something stood in the way."""
    parser = argparse.ArgumentParser(prog="python -m perf.demo_kv", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs of each variant")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder (SmolLM2)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of demo_kv.json")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="server parameter, for all alike (repeatable)",
    )
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    try:
        settings = parse_settings(options.settings, KV_DEMO_ENGINE)
        model_path = find_model(options.model)
        requests = kv_demo_workload(FileTokenizer(model_path))
        result = collect(run_interleaved(options.runs, requests, model_path, settings), settings)
    except TokenFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = json.dumps(result, indent=1)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "demo_kv.json"
    path.write_text(text + "\n")
    print(text if options.json else f"\n{format_table(result)}\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
