"""The demo: one burst on a real server, first come first served against tokenflow.

`python -m perf.demo [--runs N] [--json]`. For each policy a real Triton server is started with the
same engine settings and plays the same fixed workload in real text over gRPC. Prints a table and
writes demo.json and demo.png to perf/results. Ends with 1 when a request failed or when the
baseline left a slot empty while somebody could have had it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.client import WorkloadRecord
from perf.comparison import add_arguments, collect, find_model, parse_settings, run_interleaved
from perf.harness import play
from perf.report import format_table
from perf.workloads import ClientRequest, FileTokenizer, demo_workload, describe_load
from tokenflow.errors import TokenFlowError
from triton_backend.launcher import TritonServer

WORKLOAD_TIMEOUT_S = 240.0


def play_demo(
    server: TritonServer, requests: list[ClientRequest], folder: Path, label: str
) -> WorkloadRecord:
    """Our own clients, in a process of their own."""
    return play(server, requests, folder, timeout_s=WORKLOAD_TIMEOUT_S, label=label)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo as its flags say. Raises TokenFlowError."""
    from perf.plots import draw_demo

    settings = parse_settings(arguments.settings)
    model_path = find_model(arguments)
    requests = demo_workload(FileTokenizer(model_path))
    played = run_interleaved(arguments.runs, requests, play_demo, model_path, settings)
    result = collect(played, requests, settings)
    arguments.results.mkdir(parents=True, exist_ok=True)
    json_path, picture = arguments.results / "demo.json", arguments.results / "demo.png"
    json_path.write_text(json.dumps(result, indent=1) + "\n")
    draw_demo({name: runs[0].record for name, runs in played.items()}, result, picture)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"\n{format_table(result)}")
    load = result["fcfs"]["load"]
    print(f"\nΣR/Γ {'not measurable' if load is None else describe_load(load)}")
    print(f"written: {json_path}\n         {picture}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.demo", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except TokenFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
