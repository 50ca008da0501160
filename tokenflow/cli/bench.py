"""`tokenflow demo` and `tokenflow burst-pa`: benchmarks of `perf`, with the model fetched first.

Owns their flags. Invariant: `perf` is imported when a command runs, not when it is declared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokenflow.cli.model import ensure_model


def add_parser(commands: Any) -> None:
    """Add `demo` and `burst-pa` to the subcommands."""
    demo = commands.add_parser(
        "demo",
        help="one burst on a real server, with and without pausing; table and picture",
        description="Plays one fixed workload on a real server, first come first served and with "
        "tokenflow, prints a table and writes demo.json and demo.png.",
    )
    _add_flags(demo)
    demo.set_defaults(run=run_demo)
    burst = commands.add_parser(
        "burst-pa",
        help="the same burst, sent by NVIDIA's perf_analyzer",
        description="Downloads perf_analyzer into a private folder, lets it send the demo's "
        "burst, and computes latencies from its export into burst_pa.json.",
    )
    _add_flags(burst)
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """What `perf.comparison` reads: runs, json, model, results, settings."""
    parser.add_argument(
        "--runs", type=_positive, default=1, metavar="N", help="runs of each policy"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, not as a table"
    )
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder (SmolLM2)")
    parser.add_argument(
        "--results",
        type=Path,
        default=None,
        metavar="DIR",
        help="where the results are written (default: perf/results, what README and docs show)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="server parameter, for both policies alike (repeatable)",
    )
