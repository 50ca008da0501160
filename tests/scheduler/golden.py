"""Golden decisions as JSON: encoding, and which moments of which scenario are kept.

Run `python -m tests.scheduler.golden` to write the files anew, deliberately, after a change of the
rules; the diff shows which decisions changed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine
from perf.virtual.workloads import crowd, demo, long_outputs, machines, sustained
from tests.scheduler.build import BOOLS, FLOATS
from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import (
    ArrivalEstimate,
    CostEstimate,
    Decision,
    KvView,
    SessionColumns,
    Snapshot,
)

FOLDER = Path(__file__).parent / "golden"
POLICY = TokenflowPolicy()
_POOL_BOUND = SimEngine(capacity_policy="max_utilization", num_total_blocks=48, max_batch_size=16)
_TIERED = SimEngine(
    capacity_policy="max_utilization",
    num_total_blocks=64,
    num_host_blocks=200,
    copy_bytes_per_s=2e8,  # 5 ms a block; computing one takes 12 ms
    kv_tiering=True,
)
_FAST = demo(num_newcomers=10, rate=8.0)
_QUICK = SimEngine(
    max_batch_size=12,
    num_total_blocks=800,
    step_base_s=0.004,
    step_per_sequence_s=1e-4,
    prefill_tokens_per_s=20_000.0,
)
SCENARIOS = {
    "demo": (demo(), SimEngine()),
    "machines": (machines(demo(), 2), SimEngine()),
    "pool_bound": (demo(), _POOL_BOUND),
    "overload": (sustained(1.5, num=30), SimEngine()),
    "tiers_by_rules": (
        _FAST,
        dataclasses.replace(_TIERED, num_total_blocks=44, kv_tiering=False),
    ),
    "tiers_told": (_FAST, _TIERED),
    "crowd": (crowd(long_outputs(num_newcomers=16)), _QUICK),
}
_PER_REASON = 3

_TIER_COLUMNS = ("num_host_blocks", "num_copied_blocks")
_ESTIMATES = {"kv": KvView, "costs": CostEstimate, "arrivals": ArrivalEstimate}


def encode_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON values; NaN is null and infinity "inf", floats of columns are rounded to 1e-6.
    What has its default, such as everything about a host tier where there is none, is left out."""
    columns = {
        name: [_number(v) for v in getattr(snapshot.sessions, name).tolist()]
        for name in SessionColumns.__dataclass_fields__
        if name not in _TIER_COLUMNS or getattr(snapshot.sessions, name).any()
    }
    data: dict[str, Any] = {"now": _number(snapshot.now), "sessions": columns}
    for name in _ESTIMATES:
        part = getattr(snapshot, name)
        values = {
            f.name: getattr(part, f.name)
            for f in dataclasses.fields(part)
            if getattr(part, f.name) != f.default
        }
        if values:
            data[name] = values
    return data


def decode_snapshot(data: dict[str, Any]) -> Snapshot:
    """The inverse, up to rounding."""
    num_rows = len(data["sessions"]["slot"])
    columns: dict[str, Any] = {name: np.zeros(num_rows, dtype=np.int64) for name in _TIER_COLUMNS}
    for name, values in data["sessions"].items():
        kind: Any = float if name in FLOATS else bool if name in BOOLS else np.int64
        plain = [np.nan if v is None else np.inf if v == "inf" else v for v in values]
        columns[name] = np.array(plain, dtype=kind)
    kv = dict(data["kv"])
    kv["capacity_policy"] = CapacitySchedulerPolicy(kv["capacity_policy"])
    return Snapshot(
        now=data["now"],
        sessions=SessionColumns(**columns),
        kv=KvView(**kv),
        costs=CostEstimate(**data["costs"]),
        arrivals=ArrivalEstimate(**data.get("arrivals", {})),
    )


def encode_decision(decision: Decision) -> dict[str, Any]:
    """Plain JSON values."""
    data: dict[str, Any] = {
        "pause": list(decision.pause),
        "resume": list(decision.resume),
        "admit": list(decision.admit),
        "forced": list(decision.forced),
    }
    ahead = {
        "recompute": list(decision.recompute),
        "prefetch": list(decision.prefetch),
        "offload": [list(entry) for entry in decision.offload],
    }
    data |= {name: named for name, named in ahead.items() if named}
    data["why"] = {str(slot): why for slot, why in sorted(decision.why.items())}
    return data


def record(name: str) -> list[dict[str, Any]]:
    """The first few moments of a scenario for each set of reasons, and one empty decision; what is
    computed although it could be loaded is a reason too."""
    requests, engine = SCENARIOS[name]
    limit = 1 if engine.kv_tiering else _PER_REASON  # copies go with any other reason
    seen: dict[tuple[str, ...], int] = {}
    kept: list[dict[str, Any]] = []

    def keep(snapshot: Snapshot) -> Decision:
        decision = plan(snapshot, POLICY)
        reasons = (*sorted(set(decision.why.values())), *["recompute"][: len(decision.recompute)])
        seen[reasons] = seen.get(reasons, 0) + 1
        if seen[reasons] > (limit if reasons else 1):
            return decision
        data = encode_snapshot(snapshot)
        decoded = plan(decode_snapshot(data), POLICY)
        kept.append({"snapshot": data, "decision": encode_decision(decoded)})
        return decision

    Simulation(requests, keep, engine).run()
    return kept


def _number(value: Any) -> Any:
    if not isinstance(value, float):
        return int(value)
    if np.isnan(value):
        return None
    return "inf" if value == np.inf else round(value, 6)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SCENARIOS:
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in record(name))
        (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
