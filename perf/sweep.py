"""Parameters of the scheduler, swept over seeds: what each is worth, with intervals.

`python -m perf.sweep --setup h200-a --param conservativeness=1,1.5,2,5,20 --seeds 1-5`. One
parameter at a time is changed, the others keep what the policy has; with `--grid` all combinations
are run. A parameter is any field of `tokenflow.policies.TokenflowPolicy`, or of the engine:
plan_interval_s, lease_tokens, max_num_tokens, max_batch_size, learn_output_lengths,
capacity_policy. The first row of each set-up is the policy as it is; ratios are to that row, paired
by seed.

All figures are written to perf/results/sweep_NAME.json (`--name`, else the parameters' names).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.lab import runs, summary, tables
from perf.lab.measures import Record
from perf.lab.runs import ENGINE_PARAMETERS, VARIED, Cell, Changes
from perf.simulate import (
    add_common,
    cells,
    comma_separated,
    interruptible,
    prepare,
    say,
    write,
)
from perf.virtual.values import SimEngine
from tokenflow.errors import TokenFlowError
from tokenflow.policies import TokenflowPolicy

RESULTS = Path(__file__).parent / "results"
_POLICY_FIELDS = tuple(field.name for field in dataclasses.fields(TokenflowPolicy))
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_DEFAULTS: dict[str, Any] = {
    **{name: getattr(SimEngine(), name) for name in (*ENGINE_PARAMETERS, "capacity_policy")},
    **dataclasses.asdict(TokenflowPolicy()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 2 for arguments that say nothing that can be run."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        variants = [(parsed.policy, one) for one in changes_of(parsed.param, grid=parsed.grid)]
        asked = cells(parsed, parsed.setup, variants)
        if parsed.name and Path(parsed.name).name != parsed.name:
            raise ValueError(f"--name is part of a file's name, got {parsed.name!r}")
        path = parsed.output or RESULTS / f"sweep_{parsed.name or _name(parsed.param)}.json"
        prepare(path)
        runs.check(asked)
    except (ValueError, OSError, TokenFlowError) as error:
        parser.error(str(error))
    result = sweep(asked, jobs=parsed.jobs)
    write(path, result)
    if parsed.json:
        json.dump(result, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text(result))
        print(f"\nwritten to {path}")
    return 0


def sweep(asked: Sequence[Cell], *, jobs: int = 1) -> Record:
    """Run all; what is written: the runs, and summaries with intervals and ratios."""
    records = [run.record for run in runs.run_cells(asked, jobs=jobs, done=say)]
    return {"summaries": summary.summarise(records, asked[0].policy), "runs": records}


def text(result: Mapping[str, Any]) -> str:
    """A table for each set-up, for a terminal: a row for each variant."""
    parts = [
        f"{tables.title(cell)}\n{tables.load_line(cell)}\n\n{tables.format_table(tables.variant_rows(cell))}"
        for cell in summary.by_cell(result["summaries"])
    ]
    return "\n\n\n".join(parts)


def changes_of(params: Sequence[str], *, grid: bool = False) -> list[Changes]:
    """No change, and then each value of each "name=value,value", or with `grid` all combinations.

    Raises ValueError for a name that is no parameter (it lists them), or a value it cannot have.
    """
    swept = [_parsed(param) for param in params]
    names = [name for name, _ in swept]
    if len(set(names)) < len(names):
        raise ValueError(f"each parameter once, got {', '.join(names)}")
    if grid:
        pairs = [[(name, value) for value in values] for name, values in swept]
        variants: list[Changes] = list(itertools.product(*pairs))
    else:
        variants = [((name, value),) for name, values in swept for value in values]
    for variant in variants:
        fields = {name: value for name, value in variant if name in _POLICY_FIELDS}
        dataclasses.replace(TokenflowPolicy(), **fields)  # refuses what cannot be, before any run
    return [(), *variants]


def _parsed(param: str) -> tuple[str, list[Any]]:
    name, _, values = param.partition("=")
    if name not in _DEFAULTS:
        raise ValueError(f"no parameter named {name!r}; there are {', '.join(_DEFAULTS)}")
    found = list(dict.fromkeys(_value(name, value) for value in comma_separated(values)))
    if not found:
        raise ValueError(f"{name} needs values: {name}=value,value")
    return name, found


def _value(name: str, value: str) -> Any:
    kind = type(_DEFAULTS[name])
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        return kind(value)
    except (KeyError, ValueError):
        what = _KINDS.get(kind) or f"one of {', '.join(one.value for one in kind)}"
        raise ValueError(f"{name} cannot be {value!r}; it must be {what}") from None


def _name(params: Sequence[str]) -> str:
    return "_".join(param.partition("=")[0] for param in params)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--setup", type=comma_separated, required=True)
    parser.add_argument("--policy", choices=VARIED, default=VARIED[0], help="what is varied")
    parser.add_argument("--param", action="append", required=True, metavar="NAME=VALUE,VALUE")
    parser.add_argument("--grid", action="store_true", help="all combinations")
    parser.add_argument("--name", help="of the file of results")
    add_common(parser)
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main))
