"""Policies side by side on one set-up, in virtual time: tables, JSON, pictures.

`python -m perf.simulate --setup h200-a --policies fcfs-reserve,tokenflow [--json]`, or `--all` for
the eight set-ups of the paper's Table 1. The product itself runs (perf/virtual) on costs from first
principles (perf/lab/roofline.py); what a set-up is stands in perf/lab/setups.py, what a policy is
in perf/lab/policies.py, and how each figure is defined in perf/lab/measures.py. Every figure that
the tables show is in the JSON.

`--rate` and `--host-gb` change a set-up; `--trace-in` replaces its requests by those of a CSV file
(perf/lab/traces.py describes the columns), or by 200 of a file of BurstGPT's, as published;
`--trace-out` writes them to one. Same arguments, same
JSON, but for the wall times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.lab import documents, figures, runs, setups, summary, tables
from perf.lab.burstgpt import is_burstgpt, read_burstgpt
from perf.lab.measures import Record
from perf.lab.policies import ABLATION, HEADLINE, PolicyRow, policies
from perf.lab.runs import Cell, Changes, Run
from perf.lab.setups import Setup
from perf.lab.traces import read_trace, write_trace
from perf.virtual.values import SimRequest
from tokenflow.errors import TokenFlowError

DEFAULT_POLICIES = "fcfs-reserve,tokenflow"
GROUPS = {"headline": HEADLINE, "ablation": ABLATION}
_MAX_SEEDS = 1000
"""In one range."""
PART_OFF = "-no-"
"""In the name of a policy without one of its parts: between the whole one's name and the part's."""
ABLATION_PANELS = (
    ("virtual_s", "seconds to completion"),
    ("ttft_p99_s", "first token, P99, s"),
    ("effective_throughput", "effective throughput, tok/s"),
    ("share_stalled", "share of readers that stall"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 2 for arguments that say nothing that can be run."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        names = setups.TABLE_1 if parsed.all else parsed.setup
        asked = cells(parsed, names, [(row.name, ()) for row in _rows(parsed.policies)])
        if parsed.trace_out is not None:
            _write_work(parsed.trace_out, asked)
        prepare(parsed.output)
        if parsed.figures is not None:
            prepare(parsed.figures / "pictures")
        runs.check(asked)
    except (ValueError, OSError, TokenFlowError) as error:
        parser.error(str(error))
    if parsed.figures is not None:
        asked = [dataclasses.replace(cell, with_series=True) for cell in asked]
    done = runs.run_cells(asked, jobs=parsed.jobs, done=say)
    result = to_json([run.record for run in done])
    if parsed.output is not None:
        write(parsed.output, result)
    if parsed.figures is not None:
        draw(done, parsed.figures)
    if parsed.json:
        json.dump(result, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text(result))
    return 0


def prepare(path: Path | None) -> None:
    """Make sure, before the work, that its results can be written. Raises OSError.

    Leaves `path` as it is: an aborted run must not look like one without results."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        return
    beside = _beside(path.resolve())
    beside.touch()
    beside.unlink()


def write(path: Path, result: Record) -> None:
    """Write the JSON, all of it or nothing. Raises OSError, ValueError for what is no JSON."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    target = path.resolve()
    if target.exists() and not target.is_file():  # a device or a pipe
        target.write_text(text)
        return
    beside = _beside(target)
    try:
        beside.write_text(text)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A file of this process in the same folder, that no pattern of results matches."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def to_json(records: Sequence[Record]) -> Record:
    """What is written: of each set-up the summaries of the policies and the goals; and the runs,
    where there are several seeds: with one, a summary holds all figures of its run."""
    summaries = summary.summarise(records)
    parts = [
        {"summaries": list(cell.values()), "goals": summary.goals(cell)}
        for cell in summary.by_cell(summaries)
    ]
    several = len({record["seed"] for record in records}) > 1
    return {"cells": parts, "runs": list(records) if several else []}


def text(result: Record) -> str:
    """All tables, for a terminal."""
    return "\n\n\n".join(tables.terminal(*cell) for cell in documents.cells_of([result]))


def say(run: Run) -> None:
    """A line of progress on stderr."""
    virtual_s, wall_s = run.record["virtual_s"], run.record["wall_s"]
    print(f"{run.cell.name}: {virtual_s:,.0f} s in {wall_s:.1f} s", file=sys.stderr, flush=True)


def draw(done: Sequence[Run], folder: Path) -> None:
    """Write the pictures of each set-up: whole policies over time, with the first seed; and, where
    parts of one were left out, what each part is worth."""
    for cell in summary.by_cell(summary.summarise([run.record for run in done])):
        first = next(iter(cell.values()))
        over_time = {
            run.cell.label: run.series
            for run in done
            if run.series is not None
            and summary.cell_of(run.record) == summary.cell_of(first)
            and run.cell.seed == first["seeds"][0]
            and PART_OFF not in run.cell.policy
        }
        name, title = picture_name(first), tables.title(cell)
        if over_time:
            figures.draw_runs(title, over_time, folder / f"simulate_{name}.png")
        whole_ones = {policy.split(PART_OFF)[0] for policy in cell if PART_OFF in policy}
        parts = {p: s for p, s in cell.items() if p.split(PART_OFF)[0] in whole_ones}
        if parts:
            figures.draw_ablation(title, parts, ABLATION_PANELS, folder / f"ablation_{name}.png")


def picture_name(record: Record) -> str:
    """How a set-up's pictures are called, without ending."""
    rate = "" if record["read_rate"] is None else f"_{record['read_rate']:g}"
    setup = re.sub(r"[^\w.-]+", "_", record["setup"]).strip("_")
    return f"{setup}{rate}_{record['host_gb']:g}gb"


def cells(
    parsed: argparse.Namespace, names: Sequence[str], variants: Sequence[tuple[str, Changes]]
) -> list[Cell]:
    """The cells that the arguments of `add_common` ask for: each (policy, changes) with each seed
    on each of the set-ups of these names. Raises ValueError that lists what there is, or OSError.
    """
    if not names:
        raise ValueError("--setup needs a name")
    chosen, path = _chosen(names, parsed.rate, parsed.host_gb), parsed.trace_in
    works = {
        (setup.name, seed): None if path is None else _read_work(path, setup, seed, parsed.rate)
        for setup in chosen
        for seed in parsed.seeds
    }
    return [
        Cell(
            setup=setup,
            policy=policy,
            seed=seed,
            work=works[setup.name, seed],
            source="" if path is None else path.name,
            changes=changes,
        )
        for setup in chosen
        for policy, changes in variants
        for seed in parsed.seeds
    ]


def _read_work(path: Path, setup: Setup, seed: int, rate: float | None) -> tuple[SimRequest, ...]:
    """The requests of a CSV file: of our own layout, or a sample of BurstGPT's with this seed, read
    by people as those of the set-up. Raises ValueError, OSError."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file, and would be read more than once")
    if is_burstgpt(path):
        return tuple(read_burstgpt(path, mix=setup.workload.mix, seed=seed))
    if rate is not None:
        raise ValueError("--rate cannot change the requests of --trace-in")
    work = tuple(read_trace(path))
    if not work:
        raise ValueError(f"{path} holds no request")
    return work


def _chosen(names: Sequence[str], rate: float | None, host_gb: float | None) -> list[Setup]:
    found = [setups.find(name) for name in names]
    if rate is not None:
        found = [setups.with_rate(setup, rate) for setup in found]
    if host_gb is not None:
        found = [setups.with_host(setup, host_gb) for setup in found]
    return found


def _rows(names: Sequence[str]) -> list[PolicyRow]:
    """The rows of these names, groups written out. Raises ValueError that lists what there is."""
    rows: dict[str, PolicyRow] = {}
    for name in names:
        for row in GROUPS.get(name) or policies([name]):
            rows[row.name] = row
    if not rows:
        raise ValueError("--policies needs a name")
    return list(rows.values())


def _write_work(path: Path, asked: Sequence[Cell]) -> None:
    if len({(cell.setup.name, cell.seed) for cell in asked}) != 1:
        raise ValueError("--trace-out takes one set-up and one seed")
    write_trace(path, asked[0].requests())


def comma_separated(value: str) -> list[str]:
    """Names between commas."""
    return list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))


def seeds(value: str) -> list[int]:
    """ "1", "1,2,5" or "1-5"."""
    found: list[int] = []
    for part in filter(None, map(str.strip, value.split(","))):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first) + 1
        if end - begin > _MAX_SEEDS:
            raise argparse.ArgumentTypeError(f"at most {_MAX_SEEDS} seeds, got {value!r}")
        found += range(begin, end)
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"seeds must be numbers, each once, got {value!r}")
    return found


def whole(value: str) -> int:
    """A whole number > 0."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be > 0, got {value!r}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--setup", type=comma_separated, help="one or more, between commas")
    which.add_argument("--all", action="store_true", help="the eight of the paper's Table 1")
    parser.add_argument(
        "--policies",
        type=comma_separated,
        default=DEFAULT_POLICIES,
        help=f"between commas, groups are {' and '.join(GROUPS)} (default {DEFAULT_POLICIES})",
    )
    add_common(parser)
    parser.add_argument("--trace-out", type=Path, help="CSV: write the requests there first")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write a picture per set-up")
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """What commands take that change set-ups and their requests."""
    parser.add_argument("--rate", type=float, help="tokens/s of all readers (6 or 20)")
    parser.add_argument("--host-gb", type=float, help="host memory, 10^9 bytes (0, 32 or 128)")
    parser.add_argument("--trace-in", type=Path, help="CSV: requests instead of the set-up's")
    add_runs(parser)


def add_runs(parser: argparse.ArgumentParser, output: Path | None = None) -> None:
    """What every command that runs cells takes. output: where the JSON is written by default."""
    parser.add_argument("--seeds", "--seed", type=seeds, default=[1], help="1 or 1,2,3 or 1-5")
    parser.add_argument("--jobs", type=whole, default=1, help="processes (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--output", type=Path, default=output, metavar="FILE", help="write the JSON there, too"
    )


def interruptible(run: Callable[[], int]) -> int:
    """The exit code of a command; 130, and one word, when it was interrupted."""
    try:
        return run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(interruptible(main))
