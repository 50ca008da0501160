"""What one plan costs: microseconds of snapshot + plan, by number of sessions.

`python -m perf.plan_cost [--json]`. Three snapshots per size, on the real session table:
- *quiet*: everybody runs;
- *busy*: a full batch runs, a third is paused and the rest waits, on an engine that is loaded to
  its limit: everything is weighed and little decided, the usual plan under pressure;
- *burst*: the same on an engine fast enough for all, where a whole batch is exchanged at once.
The batch is an eighth of the sessions, between 8 and 256. Best of several repetitions: the figure
is the work, not the neighbours. The goals are for quiet and busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.session import SessionTable
from tokenflow.types import (
    CostEstimate,
    Decision,
    GenerateRequest,
    KvView,
    SessionState,
    Snapshot,
)

SIZES = (64, 256, 1_000, 10_000)
GOALS_US = {256: 200.0, 10_000: 5_000.0}
_NOW = 100.0
_TOKENS_PER_BLOCK = 32
_MAX_TOKENS = 256
_STEP_BASE_S = {"quiet": 0.06, "busy": 0.06, "burst": 0.002}


def batch_size(num_sessions: int) -> int:
    """Slots of the engine that `num_sessions` share."""
    return max(8, min(256, num_sessions // 8))


def fill_table(num_sessions: int, kind: str) -> SessionTable:
    """A session table in the middle of its work at `_NOW`."""
    table = SessionTable(
        capacity_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        tokens_per_block=_TOKENS_PER_BLOCK,
        default_read_rate=6.0,
        max_seq_len=2048,
    )
    num_running = num_sessions if kind == "quiet" else batch_size(num_sessions)
    num_paused = 0 if kind == "quiet" else num_sessions // 3
    for i in range(num_sessions):
        arrival = _NOW - 60.0 * (num_sessions - i) / num_sessions
        request = GenerateRequest(
            request_id=str(i),
            input_token_ids=tuple(range(40 + i % 60)),
            max_tokens=_MAX_TOKENS,
            arrival_time=arrival,
            read_rate=3.0 + i % 5,
        )
        session = table.add(i, request, arrival)
        if i >= num_running + num_paused:
            continue
        table.enter_engine(session, i, arrival)
        table.transition(session, SessionState.RUNNING, arrival)
        table.deliver(session, list(range(30 + i % 100)), _NOW - 0.05 * (i % 60))
        if i >= num_running:
            table.transition(session, SessionState.PAUSING, _NOW - 1.0)
            table.transition(session, SessionState.PREEMPTED, _NOW - 0.9)
    return table


def snapshot_of(table: SessionTable, kind: str) -> Snapshot:
    """What the runtime builds before each plan."""
    sessions = table.columns(_NOW)
    num_blocks = 2 * int(sessions.num_blocks_held.sum())
    return Snapshot(
        now=_NOW,
        sessions=sessions,
        kv=KvView(
            capacity_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            tokens_per_block=_TOKENS_PER_BLOCK,
            num_total_blocks=num_blocks,
            num_free_blocks=num_blocks // 2,
            max_batch_size=batch_size(len(table)),
        ),
        costs=CostEstimate(
            prefill_tokens_per_s=100_000.0,
            step_base_s=_STEP_BASE_S[kind],
            step_per_sequence_s=1e-6,
            step_per_context_token_s=1e-9,
            pause_s=2 * _STEP_BASE_S[kind],
            resume_s=2 * _STEP_BASE_S[kind],
            plan_interval_s=0.05,
        ),
    )


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Best time of `call` in µs, tried for about `seconds`, at least five times."""
    best, end, num_tries = float("inf"), time.perf_counter() + seconds, 0
    while num_tries < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        num_tries += 1
    return best * 1e6


def measure(num_sessions: int, kind: str, seconds: float) -> dict[str, float | int | str]:
    """One row of the table."""
    table, policy = fill_table(num_sessions, kind), TokenflowPolicy()
    snapshot = snapshot_of(table, kind)
    decision: Decision = plan(snapshot, policy)
    snapshot_us = microseconds(lambda: snapshot_of(table, kind), seconds)
    plan_us = microseconds(lambda: plan(snapshot, policy), seconds)
    return {
        "num_sessions": num_sessions,
        "kind": kind,
        "num_decided": len(decision.pause) + len(decision.resume) + len(decision.admit),
        "snapshot_us": round(snapshot_us, 1),
        "plan_us": round(plan_us, 1),
        "total_us": round(snapshot_us + plan_us, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes and print; the exit status does not depend on the goals."""
    parser = argparse.ArgumentParser(prog="python -m perf.plan_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure (default 0.5)")
    args = parser.parse_args(argv)
    rows = [measure(n, kind, args.seconds) for n in SIZES for kind in _STEP_BASE_S]
    if args.json:
        json.dump({"rows": rows, "goals_us": GOALS_US}, sys.stdout, indent=2)
        print()
        return 0
    print(f"{'sessions':>8} {'':>6} {'decided':>8} {'snapshot':>9} {'plan':>9} {'total µs':>9}")
    for row in rows:
        goal = None if row["kind"] == "burst" else GOALS_US.get(int(row["num_sessions"]))
        note = "" if goal is None else f"  (goal {goal:,.0f})"
        print(
            f"{row['num_sessions']:>8,} {row['kind']:>6} {row['num_decided']:>8} "
            f"{row['snapshot_us']:>9,.1f} {row['plan_us']:>9,.1f} {row['total_us']:>9,.1f}{note}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
