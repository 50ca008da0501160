"""`tokenflow demo` and `tokenflow burst-pa`: benchmarks of `perf`, with the model fetched first."""

from __future__ import annotations

import argparse
from typing import Any

from tokenflow.cli.model import ensure_model


def add_parser(commands: Any) -> None:
    """Add `demo` and `burst-pa` to the subcommands."""
    from perf.comparison import add_arguments

    demo = commands.add_parser(
        "demo",
        help="one burst on a real server, with and without pausing; table and picture",
        description="Plays one fixed workload on a real server, first come first served and with "
        "tokenflow, prints a table and writes demo.json and demo.png.",
    )
    add_arguments(demo)
    demo.set_defaults(run=run_demo)
    burst = commands.add_parser(
        "burst-pa",
        help="the same burst, sent by NVIDIA's perf_analyzer",
        description="Downloads perf_analyzer into a private folder, lets it send the demo's "
        "burst, and computes latencies from its export into burst_pa.json.",
    )
    add_arguments(burst)
    burst.set_defaults(run=run_burst_pa)


def run_demo(arguments: argparse.Namespace) -> int:
    """Fetch the model if it is missing, then run the demo."""
    from perf import demo

    if arguments.model is None:
        ensure_model()
    return demo.run(arguments)


def run_burst_pa(arguments: argparse.Namespace) -> int:
    """Fetch the model if it is missing, then run the burst."""
    from perf import burst_pa

    if arguments.model is None:
        ensure_model()
    return burst_pa.run(arguments)
