"""What one plan costs the runtime thread: microseconds, by number of sessions.

`python -m perf.plan_cost [--json]`. A real Coordinator with the product's planner, on an executor
that only takes notes, is brought into the middle of its work, in three kinds per size:
- *quiet*: everybody is in the engine, nobody waits;
- *busy*: a full batch runs, a third is paused and the rest waits, on an engine that is loaded to
  its limit: everything is weighed and little decided, the usual plan under pressure;
- *burst*: the same on an engine fast enough for all, where a whole batch is exchanged at once.
In the last two the batch is an eighth of the sessions, between 8 and 256.

Columns: `Coordinator.snapshot`; `scheduler.plan` on it; the whole of `Coordinator.plan` with a
planner that plans but returns nothing to do, so that it can be repeated; and the same with its
decision applied, on a fresh coordinator each time. Each is the best of several tries: the figure is
the work, not the neighbours. The goals are for the whole plan, of every kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from perf.mid_work import NOW, STEP_BASE_S, build

SIZES = (64, 256, 1_000, 10_000)
GOALS_US = {256: 100.0, 10_000: 3_000.0}
_NUM_APPLIED = 3


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Best time of `call` in µs, tried for about `seconds`, at least five times."""
    best, end, num_tries = float("inf"), time.perf_counter() + seconds, 0
    while num_tries < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        num_tries += 1
    return best * 1e6


def measure(num_sessions: int, kind: str, seconds: float) -> dict[str, float | int | str | None]:
    """One row of the table; `goal_us` is None where there is no goal for the size."""
    coordinator, planner = build(num_sessions, kind)
    snapshot = coordinator.snapshot(NOW)
    snapshot_us = microseconds(lambda: coordinator.snapshot(NOW), seconds)
    plan_us = microseconds(lambda: planner.plan(snapshot), seconds)
    whole_us = microseconds(lambda: coordinator.plan(NOW), seconds)
    applied_us = min(_applied_us(num_sessions, kind) for _ in range(_NUM_APPLIED))
    decision, goal_us = planner.decision, GOALS_US.get(num_sessions)
    return {
        "num_sessions": num_sessions,
        "kind": kind,
        "num_decided": len(decision.pause) + len(decision.resume) + len(decision.admit),
        "snapshot_us": round(snapshot_us, 1),
        "plan_us": round(plan_us, 1),
        "whole_us": round(whole_us, 1),
        "applied_us": round(applied_us, 1),
        "goal_us": goal_us,
        "within_goal": None if goal_us is None else whole_us <= goal_us,
    }


def _applied_us(num_sessions: int, kind: str) -> float:
    coordinator, planner = build(num_sessions, kind)
    coordinator.plan(NOW)
    planner.apply = True
    start = time.perf_counter()
    coordinator.plan(NOW)
    return (time.perf_counter() - start) * 1e6


def format_row(row: dict[str, float | int | str | None]) -> str:
    """The row for a terminal, with its goal and whether it is met."""
    verdict = ""
    if row["goal_us"] is not None:
        verdict = f"  goal {row['goal_us']:,.0f}: {'OK' if row['within_goal'] else 'over'}"
    return (
        f"{row['num_sessions']:>8,} {row['kind']:>6} {row['num_decided']:>8} "
        f"{row['snapshot_us']:>9,.1f} {row['plan_us']:>9,.1f} {row['whole_us']:>9,.1f} "
        f"{row['applied_us']:>9,.1f}{verdict}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes and print; the exit status does not depend on the goals."""
    parser = argparse.ArgumentParser(prog="python -m perf.plan_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure (default 0.5)")
    args = parser.parse_args(argv)
    rows = [measure(n, kind, args.seconds) for n in SIZES for kind in STEP_BASE_S]
    if args.json:
        json.dump({"rows": rows, "goals_us": GOALS_US}, sys.stdout, indent=2)
        print()
        return 0
    print(
        f"{'sessions':>8} {'':>6} {'decided':>8} {'snapshot':>9} {'plan':>9} {'whole µs':>9} "
        f"{'applied':>9}"
    )
    for row in rows:
        print(format_row(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
