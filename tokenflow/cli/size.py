"""`tokenflow size`: how many readers a GPU keeps supplied.

Owns its flags. Invariant: `perf` is imported when the command runs, not when it is declared; it
judges the values.
"""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Searches, in virtual time on a cost model, the largest load under which the P99 of the first token
keeps to a target and readers see no stalls; says what KV and host memory that takes, and how much
of it other policies keep. Needs no GPU."""


def add_parser(commands: Any) -> None:
    """Add `size` to the subcommands."""
    parser = commands.add_parser(
        "size", help="how many readers a GPU keeps supplied", description=_DESCRIPTION
    )
    _add_machine(parser)
    _add_readers(parser)
    _add_limits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search and print."""
    from perf import size

    return size.run(arguments)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--gpu", required=True, metavar="NAME", help="h200, 4090, a6000")
    group.add_argument("--model", required=True, metavar="NAME", help="as llama3-8b")
    _number(group, "--tp", int, 1, "GPUs, by tensor parallelism")
    _number(group, "--memory-fraction", float, 0.9, "of each GPU's memory, for weights and KV")
    _number(group, "--host-gb", float, 32.0, "host memory for KV, 10^9 bytes")
    _number(group, "--max-batch-size", int, 256, "sequences in a step")
    _number(group, "--max-num-tokens", int, 2048, "tokens in a step")


def _add_readers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("readers")
    group.add_argument(
        "--rate", type=float, required=True, metavar="R", help="tokens/s that each reads"
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="KIND",
        help="poisson, gamma, onoff: how many per second; burst: how many at once "
        "(default: poisson)",
    )
    _number(group, "--cv", float, None, "gamma: coefficient of variation of the gaps (2)")
    _number(group, "--off-s", float, None, "onoff: seconds of a quiet time (20)")
    _number(group, "--on-s", float, None, "onoff: seconds of a busy time (10)")
    _number(group, "--peak", float, None, "onoff: arrivals of a busy time over the mean (2)")
    _number(group, "--prompt-tokens", float, 512, "mean length of prompts")
    _number(group, "--output-tokens", float, 512, "mean length of answers")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    _number(group, "--ttft-target", float, 1.5, "seconds, for the P99 of the first token")
    _number(group, "--max-stalled", float, 0.01, "share of readers that may see a stall")
    group.add_argument(
        "--policies",
        default="tokenflow,fcfs-reserve,fcfs-max-utilization",
        metavar="NAMES",
        help="between commas (default: %(default)s)",
    )
    group.add_argument(
        "--seeds", default="1-3", metavar="SEEDS", help="as 1 or 1,2,5 or 1-3 (default: 1-3)"
    )
    _number(group, "--requests", int, None, "measured of each seed where arrivals go on (200)")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _number(
    group: argparse._ArgumentGroup, flag: str, kind: type, default: float | None, words: str
) -> None:
    shown = words if default is None else f"{words} (default: {default:g})"
    group.add_argument(flag, type=kind, default=default, metavar="N", help=shown)
