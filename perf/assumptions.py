"""How far the laboratory's figures depend on its cost model: one assumption changed at a time.

`python -m perf.assumptions --setup h200-burst-400`. Each of `--policies` is run under every one of
perf/lab/assumptions.py: a slower link, copies that take no time, more overhead in each step,
decoding without arithmetic (as in models that count memory traffic alone), lengths all alike.
Ratios are to `fcfs-reserve` under the same assumption, and so is the bound on raw throughput.

All figures are written to perf/results/assumptions.json, or to the file of `--output`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.lab import assumptions, runs, setups, summary, tables
from perf.lab.measures import Record
from perf.lab.policies import policies
from perf.lab.runs import Cell
from perf.lab.setups import Setup
from perf.simulate import add_runs, comma_separated, interruptible, prepare, say, write
from tokenflow.errors import TokenFlowError

RESULTS = Path(__file__).parent / "results" / "assumptions.json"
DEFAULT_POLICIES = "tokenflow,tokenflow-tiering"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 2 for arguments that say nothing that can be run."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        chosen = [one for name in parsed.setup for one in assumptions.assumed(setups.find(name))]
        if not parsed.setup or not parsed.policies:
            raise ValueError("--setup and --policies need a name")
        names = [row.name for row in policies([summary.BASELINE, *parsed.policies])]
        asked = [
            Cell(setup=setup, policy=name, seed=seed)
            for setup in chosen
            for name in dict.fromkeys(names)
            for seed in parsed.seeds
        ]
        prepare(parsed.output)
        runs.check(asked)
    except (ValueError, OSError, TokenFlowError) as error:
        parser.error(str(error))
    result = run(chosen, asked, jobs=parsed.jobs)
    write(parsed.output, result)
    if parsed.json:
        json.dump(result, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(f"{tables.format_table(assumptions.rows(result))}\n\nwritten to {parsed.output}")
    return 0


def run(chosen: Sequence[Setup], asked: Sequence[Cell], *, jobs: int = 1) -> Record:
    """Run all; what is written: summaries with ratios, and how fast each engine decodes."""
    records = [done.record for done in runs.run_cells(asked, jobs=jobs, done=say)]
    return {
        "summaries": summary.summarise(records),
        "decode_speeds": {setup.name: assumptions.decode_speeds(setup) for setup in chosen},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.assumptions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--setup", type=comma_separated, default=["h200-burst-400"])
    parser.add_argument("--policies", type=comma_separated, default=DEFAULT_POLICIES)
    add_runs(parser, RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main))
