"""What each rule of the scheduler is worth: the default policy against the same without it.

`python -m perf.rules --setups 4090-b,machines:20 --seeds 1-3`. Each rule of the default policy
(perf/lab/rules.py) is turned off, or replaced by another source's form, and the product is run in
virtual time on the same requests; a rule whose removal costs nothing anywhere has no place in the
policy. A set-up is NAME, NAME:RATE or NAME:RATE:HOST_GB. The verdict's terms stand in
perf/lab/rule_outcomes.py.

All figures are written to perf/results/rules.json, or to the file of `--output`; where `--rules`
names some, only to the latter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.lab import rule_outcomes, rule_setups, rule_tables, rules, runs
from perf.lab.rules import VARIANTS
from perf.simulate import add_runs, comma_separated, interruptible, prepare, say, write
from tokenflow.errors import TokenFlowError

RESULTS = Path(__file__).parent / "results" / "rules.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 2 for arguments that say nothing that can be run."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        variants = VARIANTS if parsed.rules is None else rules.find(parsed.rules)
        chosen = [rule_setups.setup_of(text) for text in parsed.setups]
        asked = rules.cells(chosen, variants, parsed.seeds)
        output = parsed.output or (RESULTS if parsed.rules is None else None)
        prepare(output)
        runs.check(asked)
    except (ValueError, OSError, TokenFlowError) as error:
        parser.error(str(error))
    records = [run.record for run in runs.run_cells(asked, jobs=parsed.jobs, done=say)]
    result = rule_outcomes.outcomes(records, variants)
    if output is not None:
        write(output, result)
    if parsed.json:
        json.dump(result, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(rule_tables.terminal([result]))
        if output is not None:
            print(f"\nwritten to {output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--setups", type=comma_separated, default=list(rule_setups.DEFAULT_SETUPS), metavar="A,B,C"
    )
    parser.add_argument("--rules", type=comma_separated, metavar="NAME,NAME", help="only these")
    add_runs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(interruptible(main))
