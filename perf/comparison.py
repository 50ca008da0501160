"""Both policies on a real server, under the same workload: shared by the demo and burst-pa.

Owns a run from the start of its server to its numbers, the alternation of several runs, and the
content and the publishing of the result files. How the workload is played is passed in. The flags
are those of `tokenflow demo` and `tokenflow burst-pa` (tokenflow/cli/bench.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.analysis import (
    BenchmarkError,
    Run,
    ratios,
    require_complete,
    summarise,
    under_client_ids,
    visible_stalls,
)
from perf.client import WorkloadRecord
from perf.harness import make_config, serving, warm_up
from perf.report import RESULTS, format_table, stale_documents
from perf.trace_view import BatchCheck, capacity, check_batch, read_trace
from perf.workloads import (
    DEMO_ENGINE,
    DEMO_SEED,
    ClientRequest,
    FileTokenizer,
    demo_workload,
    total_read_rate,
)
from tokenflow import metrics
from triton_backend.launcher import TritonServer

# Names in results -> the product's policies.
POLICIES = {"fcfs": "fcfs-reserve", "tokenflow": "tokenflow"}
_SET_BY_RUNS = ("scheduling_policy", "trace_path")

# Plays the requests against a server; gets the run's folder and a label for its progress bar.
Player = Callable[[TritonServer, list[ClientRequest], Path, str], WorkloadRecord]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run with its raw record, for the picture."""

    run: Run
    record: WorkloadRecord
    batch: BatchCheck


def run_policy(
    name: str,
    requests: list[ClientRequest],
    player: Player,
    *,
    model_path: Path,
    settings: Mapping[str, str],
    folder: Path,
    label: str,
) -> Played:
    """Start a server with the policy `name`, play the workload once, and read the outcome.

    Raises BenchmarkError for a failed request, or for a baseline that was idle while one waited.
    """
    folder.mkdir(parents=True)
    trace_path = folder / "trace.jsonl"
    config = make_config(model_path, POLICIES[name], trace_path, settings)
    with serving(config, folder, label) as server:
        warm_up(server, FileTokenizer(model_path), folder, config.max_batch_size)
        record = player(server, requests, folder, label)
    require_complete(record.clients)
    trace = read_trace(
        trace_path, tokens_per_block=config.tokens_per_block, since_time=record.start_time
    )
    trace = under_client_ids(trace, record.clients)
    num_blocks = config.max_tokens_in_paged_kv_cache // config.tokens_per_block
    batch = check_batch(trace, max_batch_size=config.max_batch_size, num_blocks=num_blocks)
    if name == "fcfs" and batch.idle_times:
        raise BenchmarkError(
            f"the baseline had a free slot in {len(batch.idle_times)} iterations in which "
            "somebody waited who would have fitted"
        )
    run = Run(
        policy=name,
        clients=record.clients,
        visible_stalls=visible_stalls(record.clients, trace, record.lags),
        num_pauses=trace.num_pauses,
        load=total_read_rate(requests) / capacity(trace, config.max_batch_size),
    )
    return Played(run=run, record=record, batch=batch)


def run_interleaved(
    num_runs: int,
    requests: list[ClientRequest],
    player: Player,
    model_path: Path,
    settings: Mapping[str, str],
) -> dict[str, list[Played]]:
    """`num_runs` of each policy, alternating which comes first, so that drift hits both alike."""
    played: dict[str, list[Played]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory(prefix="tokenflow-perf-") as scratch:
        for index in range(num_runs):
            for name in list(POLICIES)[:: 1 if index % 2 == 0 else -1]:
                label = name if num_runs == 1 else f"{name}, run {index + 1}/{num_runs}"
                played[name].append(
                    run_policy(
                        name,
                        requests,
                        player,
                        model_path=model_path,
                        settings=settings,
                        folder=Path(scratch) / f"{name}-{index}",
                        label=label,
                    )
                )
    return played


def collect(
    played: Mapping[str, Sequence[Played]], requests: Sequence[ClientRequest], settings: Any
) -> dict[str, Any]:
    """The content of a result file: a summary per policy, `ratio`, and every run's values."""
    result: dict[str, Any] = {
        name: summarise([one.run for one in runs]) for name, runs in played.items()
    }
    result["ratio"] = ratios(result["tokenflow"], result["fcfs"])
    result["runs"] = [_run_values(one) for runs in played.values() for one in runs]
    result["settings"] = dict(settings)
    result["workload"] = {
        "seed": DEMO_SEED,
        "requests": [
            {
                "request_id": r.request_id,
                "num_prompt_tokens": r.num_prompt_tokens,
                "max_tokens": r.max_tokens,
                "read_rate": r.read_rate,
                "send_offset_s": round(r.send_offset_s, 4),
            }
            for r in requests
        ],
    }
    result["machine"] = {
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
    }
    return result


def _run_values(played: Played) -> dict[str, Any]:
    run, record = played.run, played.record
    return {
        "policy": run.policy,
        **summarise([run]),
        "burst_ttft_s": [round(value, 4) for value in run.burst_ttfts_s],
        "end_to_end_s": {
            client.request_id: round(metrics.end_to_end_s(stream), 4)
            for client, stream in zip(run.clients, run.streams, strict=True)
        },
        "stalls": [
            {
                "request_id": one.request_id,
                "duration_s": round(one.stall.duration_s, 4),
                "at_s": round(one.stall.wanted_time - record.start_time, 3),
                "cause": one.cause.value,
            }
            for one in run.visible_stalls
        ],
        "iterations_with_waiting": {
            "batch_full": played.batch.num_full,
            "no_room": played.batch.num_no_room,
            "idle_slot": len(played.batch.idle_times),
        },
        "client_cpu_s": None if record.cpu_s is None else round(record.cpu_s, 3),
        "client_worst_lag_s": round(max((late for _, late in record.lags), default=0.0), 3),
    }


def parse_settings(pairs: Sequence[str], base: Mapping[str, str] = DEMO_ENGINE) -> dict[str, str]:
    """Engine settings (`base`: those of the demo) with `NAME=VALUE` pairs laid over them. Raises
    BenchmarkError for what is no such pair, and for what every run sets by itself."""
    settings = dict(base)
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise BenchmarkError(f"--set wants NAME=VALUE, got {pair!r}")
        if name in _SET_BY_RUNS:
            raise BenchmarkError(f"--set {name}: each run has its own")
        settings[name] = value
    return settings


def find_model(model_path: Path | None) -> Path:
    """The checkpoint folder to use. Raises BenchmarkError when it is not there yet."""
    from build_engines.fetch import default_model_path

    model_path = model_path or default_model_path()
    for name in ("config.json", "tokenizer.json"):
        if not (model_path / name).exists():
            raise BenchmarkError(f"no {name} at {model_path}; run: tokenflow model fetch")
    return model_path


def compare(
    arguments: argparse.Namespace, player: Player
) -> tuple[dict[str, list[Played]], dict[str, Any]]:
    """Play the demo's workload as the flags say; every run, and the content of a result file."""
    settings = parse_settings(arguments.settings)
    model_path = find_model(arguments.model)
    requests = demo_workload(FileTokenizer(model_path))
    played = run_interleaved(arguments.runs, requests, player, model_path, settings)
    return played, collect(played, requests, settings)


def results_folder(arguments: argparse.Namespace) -> Path:
    """Where the results go, created if it is missing."""
    folder: Path = arguments.results or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(
    name: str, result: Mapping[str, Any], arguments: argparse.Namespace, remarks: Sequence[str]
) -> None:
    """Write `name`.json and print the table with `remarks` under it, or the JSON.

    Says so on stderr when the documents now show other figures than the files they are made from.
    """
    folder = results_folder(arguments)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print("\n".join(["", format_table(result), "", *remarks, f"written: {path}"]))
    stale = [document.name for document in stale_documents()] if folder.resolve() == RESULTS else []
    if stale:
        print(
            f"\nnote: {', '.join(stale)} still show the figures before this run; `make docs` puts "
            "this run's in,\n      `git checkout perf/results` brings the former results back",
            file=sys.stderr,
        )
