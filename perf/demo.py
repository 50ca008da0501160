"""The demo: one burst on a real server, first come first served against tokenflow.

What `tokenflow demo` runs. For each policy a real Triton server is started with the same engine
settings and plays the same fixed workload in real text over gRPC. Prints a table and writes
demo.json and demo.png. Raises BenchmarkError when a request failed or when the baseline left a slot
empty while somebody could have had it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perf.client import WorkloadRecord
from perf.comparison import compare, publish, results_folder
from perf.harness import play
from perf.workloads import ClientRequest, describe_load
from triton_backend.launcher import TritonServer

WORKLOAD_TIMEOUT_S = 240.0


def play_demo(
    server: TritonServer, requests: list[ClientRequest], folder: Path, label: str
) -> WorkloadRecord:
    """Our own clients, in a process of their own."""
    return play(server, requests, folder, timeout_s=WORKLOAD_TIMEOUT_S, label=label)


def _load_text(load: float | None) -> str:
    return "not measurable" if load is None else describe_load(load)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo as its flags say. Raises TokenFlowError."""
    from perf.plots import draw_demo

    played, result = compare(arguments, play_demo)
    picture = results_folder(arguments) / "demo.png"
    draw_demo({name: runs[0].record for name, runs in played.items()}, result, picture)
    loads = [f"ΣR/Γ under {name}: {_load_text(result[name]['load'])}" for name in played]
    publish("demo", result, arguments, [*loads, f"picture: {picture}"])
    return 0
