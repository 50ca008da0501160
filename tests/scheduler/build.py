"""Snapshots by hand: one dict per session, defaults for the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.types import (
    ArrivalEstimate,
    CostEstimate,
    KvView,
    LengthEstimate,
    SessionColumns,
    SessionState,
    Snapshot,
)

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTIL = CapacitySchedulerPolicy.MAX_UTILIZATION
NOW = 1000.0

FLOATS = (
    "arrival_time",
    "wait_since_time",
    "running_since_time",
    "slack_s",
    "read_rate",
    "priority",
)
BOOLS = ("held", "has_reader", "started", "pausable")

COSTS = CostEstimate(
    prefill_tokens_per_s=2600.0,
    step_base_s=0.045,
    step_per_sequence_s=0.0013,
    step_per_context_token_s=2.6e-6,
    pause_s=0.06,
    resume_s=0.06,
    plan_interval_s=0.05,
)


def known_lengths(*ends: tuple[int, float]) -> LengthEstimate:
    """(tokens, share of the answers that have more), rising."""
    survival = np.ones(ends[-1][0] + 1)
    for num_tokens, share in ends:
        survival[num_tokens:] = share
    means = np.concatenate([[0.0], np.cumsum(survival[:-1])])
    return LengthEstimate(survival=survival, restricted_means=means)


LENGTHS = (None, known_lengths((120, 0.01)), known_lengths((3, 0.5), (130, 0.3)))
"""What may be known of answers' lengths: nothing; nearly all have 120 tokens; half have 3, a few
more 130."""


def waiting(**changes: Any) -> dict[str, Any]:
    """A newcomer that arrived 0.2 s ago."""
    return {"state": SessionState.WAITING, "wait_since_time": NOW - 0.2, **changes}


def running(slack_s: float, **changes: Any) -> dict[str, Any]:
    """A stream in the engine for 10 s."""
    base = {"state": SessionState.RUNNING, "slack_s": slack_s, "started": True}
    return {**base, "num_generated": 100, "num_blocks_held": 4, **changes}


def paused(slack_s: float, **changes: Any) -> dict[str, Any]:
    """A stream paused 5 s ago, its KV kept."""
    base = {"state": SessionState.PREEMPTED, "slack_s": slack_s, "started": True}
    return {
        **base,
        "num_generated": 100,
        "wait_since_time": NOW - 5,
        "num_resume_tokens": 1,
        **changes,
    }


def snapshot(
    rows: list[dict[str, Any]],
    *,
    max_batch_size: int = 4,
    num_total_blocks: int = 64,
    num_free_blocks: int | None = None,
    capacity_policy: CapacitySchedulerPolicy = NO_EVICT,
    costs: CostEstimate = COSTS,
    num_host_blocks: int = 0,
    has_tiering: bool = False,
    arrivals: ArrivalEstimate | None = None,
    lengths: LengthEstimate | None = None,
) -> Snapshot:
    """The snapshot of `rows`, in order of arrival; slot i + 10 for row i."""
    defaults: dict[str, Any] = {
        "state": SessionState.WAITING,
        "running_since_time": NOW - 10.0,
        "wait_since_time": NOW,
        "slack_s": math.nan,
        "read_rate": 4.0,
        "has_reader": True,
        "started": False,
        "pausable": True,
        "held": False,
        "priority": 0.5,
        "num_prompt_tokens": 32,
        "num_generated": 0,
        "max_tokens": 256,
        "num_blocks_held": 0,
        "num_blocks_needed": 4,
        "num_blocks_final": 4,
        "num_resume_tokens": 32,
        "num_pauses": 0,
        "num_host_blocks": 0,
        "num_copied_blocks": 0,
    }
    columns: dict[str, Any] = {}
    full = [
        {**defaults, "slot": i + 10, "arrival_time": row.get("wait_since_time", NOW - 20), **row}
        for i, row in enumerate(rows)
    ]
    for name in SessionColumns.__dataclass_fields__:
        kind: Any = float if name in FLOATS else bool if name in BOOLS else np.int64
        columns[name] = np.array([row[name] for row in full], dtype=kind)
    held = int(columns["num_blocks_held"].sum())
    free = max(0, num_total_blocks - held) if num_free_blocks is None else num_free_blocks
    return Snapshot(
        now=NOW,
        sessions=SessionColumns(**columns),
        kv=KvView(
            capacity_policy=capacity_policy,
            tokens_per_block=32,
            num_total_blocks=num_total_blocks,
            num_free_blocks=free,
            max_batch_size=max_batch_size,
            num_host_blocks=num_host_blocks,
            has_tiering=has_tiering,
        ),
        costs=costs,
        arrivals=arrivals or ArrivalEstimate(),
        lengths=lengths,
    )
