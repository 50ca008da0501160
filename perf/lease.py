"""Leases against cancels: what a pause costs, by how a request is enqueued.

`python -m perf.lease [--json]`. The same workloads in virtual time (perf/virtual: the real planner,
coordinator, batcher and KV bookkeeping; deterministic) under

- *cancel*: a request is enqueued with all it asks for, and a pause cancels it. Once where the
  engine reserves the full length (GUARANTEED_NO_EVICT), once where it takes blocks as they are
  needed (MAX_UTILIZATION);
- *lease n*: a request is enqueued with at most n tokens under GUARANTEED_NO_EVICT, so that its
  reservation is small, and at the end of the lease it goes on or leaves its place. A reader about
  to run dry may still need a cancel in between.

Columns: tokens that resumes computed again; lost steps (slots that computed nothing for one step
between two steps of the same stream, which is what the renewal of a lease costs, and tokens that a
cancel threw away); raw throughput; time to first token of newcomers; readers with a visible stall
and the longest stall; blocks held of the engine's budget for each block in use; share of the slots
in use; pauses, and those against a reader's slack or by the engine itself. The figures are written
to perf/results/lease.json too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimStep
from perf.virtual.workloads import demo, long_outputs
from tokenflow.metrics import (
    percentile,
    raw_throughput,
    share_with_visible_stall,
    stalls,
    ttft_s,
)
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan

RESULTS = Path(__file__).parent / "results" / "lease.json"
LEASES = (64, 128, 256, 512, 1024)

Row = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and the engine it meets."""

    name: str
    requests: tuple[SimRequest, ...]
    engine: SimEngine


CASES = (
    Case("slots are short", tuple(demo()), SimEngine()),
    Case("blocks are short", tuple(demo()), SimEngine(num_total_blocks=64, max_batch_size=16)),
    Case("long outputs", tuple(long_outputs()), SimEngine(num_total_blocks=200)),
)


def modes(engine: SimEngine, leases: Sequence[int] = LEASES) -> list[tuple[str, SimEngine]]:
    """The ways of enqueueing, each as a name and `engine` set up for it."""
    reserve = replace(engine, capacity_policy="guaranteed_no_evict")
    return [
        ("cancel, all reserved", reserve),
        ("cancel, as needed", replace(engine, capacity_policy="max_utilization")),
        *((f"lease {n}", replace(reserve, lease_tokens=n)) for n in leases),
    ]


class StepLog:
    """Sums over the steps of a run; `note` is the simulation's observer."""

    def __init__(self) -> None:
        self._busy_s = self._slots_s = self._held_s = self._used_s = 0.0
        self._earlier: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self.num_missed = 0

    def note(self, step: SimStep) -> None:
        """One step. Missed: a stream computed in the step before the last and in this one, but not
        in the last."""
        before, last = self._earlier
        now = frozenset(step.handles)
        self.num_missed += len((before & now) - last)
        self._earlier = (last, now)
        self._busy_s += step.step_s
        self._slots_s += step.step_s * len(step.handles)
        self._held_s += step.step_s * step.num_held_blocks
        self._used_s += step.step_s * step.num_used_blocks

    def occupancy(self, max_batch_size: int) -> float:
        """Share of the slots in use, by time."""
        return self._slots_s / (self._busy_s * max_batch_size)

    @property
    def held_per_used(self) -> float:
        """Blocks held of the engine's budget for each block in use, by time."""
        return self._held_s / self._used_s


def measure(case: Case, mode: str, engine: SimEngine) -> Row:
    """One row: a run to the end of all requests."""
    policy, log = TokenflowPolicy(), StepLog()
    result = Simulation(
        case.requests, lambda snapshot: plan(snapshot, policy), engine, observe=log.note
    ).run()
    streams = result.streams()
    first_s = [ttft_s(stream) for stream in result.streams("newcomer")]
    longest_s = max((stall.duration_s for s in streams for stall in stalls(s)), default=0.0)
    return {
        "case": case.name,
        "mode": mode,
        "num_recomputed_tokens": result.num_recomputed_tokens,
        "num_lost_steps": log.num_missed + result.num_thrown_away,
        "throughput": round(raw_throughput(streams), 2),
        "ttft_p50_s": round(percentile(first_s, 50), 3),
        "ttft_p99_s": round(percentile(first_s, 99), 3),
        "share_stalled": round(share_with_visible_stall(streams), 4),
        "longest_stall_s": round(longest_s, 3),
        "held_per_used_block": round(log.held_per_used, 2),
        "occupancy": round(log.occupancy(engine.max_batch_size), 3),
        "num_pauses": result.num_pauses,
        "num_forced_pauses": result.num_forced,
        "num_internal_pauses": result.num_internal_pauses,
        "num_lease_ends": result.num_lease_ends,
    }


def run(cases: Sequence[Case] = CASES, leases: Sequence[int] = LEASES) -> list[Row]:
    """All rows, case by case."""
    return [measure(case, *mode) for case in cases for mode in modes(case.engine, leases)]


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    lines: list[str] = []
    case = None
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            lines.append(
                f"{case:<22}  again   lost  tokens/s  P50 TTFT  P99 TTFT  stalled  longest  "
                "held/used  slots  pauses  forced"
            )
        num_against = int(row["num_forced_pauses"]) + int(row["num_internal_pauses"])
        lines.append(
            f"  {row['mode']:<20}{row['num_recomputed_tokens']:>7,} {row['num_lost_steps']:>6}  "
            f"{row['throughput']:>8}  {row['ttft_p50_s']:>6} s  {row['ttft_p99_s']:>6} s  "
            f"{row['share_stalled']:>7.1%}  {row['longest_stall_s']:>5} s  "
            f"{row['held_per_used_block']:>9}  {row['occupancy']:>5.0%}  {row['num_pauses']:>6}  "
            f"{num_against:>6}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, cases: Sequence[Case] = CASES) -> int:
    """Run, print and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m perf.lease", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file (default {RESULTS})")
    args = parser.parse_args(argv)
    rows = run(cases)
    text = json.dumps({"rows": rows}, indent=2)
    args.output.write_text(text + "\n")
    print(text if args.json else format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
