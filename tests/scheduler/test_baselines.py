"""Baselines on arbitrary snapshots: budgets, who may be paused, purity."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from tests.scheduler.baselines import PLANNERS
from tests.scheduler.test_plan_properties import (
    IN_ENGINE,
    rows_of,
    snapshots,
    staying,
    within_budget,
)
from tokenflow.types import ArrivalEstimate, SessionState, Snapshot

S = SessionState
NUM_EXAMPLES = 25

every_baseline = pytest.mark.parametrize("name", PLANNERS)


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots())
def test_never_exceeds_slots_or_blocks(name: str, snap: Snapshot) -> None:
    decision = PLANNERS[name]()(snap)
    placed = rows_of(snap, (*decision.resume, *decision.admit))
    if placed:
        assert within_budget(snap, rows_of(snap, decision.pause), placed)


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots())
def test_decisions_name_the_right_rows_once(name: str, snap: Snapshot) -> None:
    decision, s = PLANNERS[name]()(snap), snap.sessions
    named = (*decision.pause, *decision.resume, *decision.admit)
    assert len(set(named)) == len(named)
    assert set(decision.why) == {*named, *(slot for slot, _ in decision.offload)}
    assert set(decision.forced) <= set(decision.pause)
    assert set(decision.recompute) <= set(decision.resume)
    for i in rows_of(snap, decision.pause):
        assert s.state[i] == S.RUNNING
        assert s.started[i]
        assert s.pausable[i]
    assert all(s.state[i] == S.PREEMPTED for i in rows_of(snap, decision.resume))
    assert all(s.state[i] == S.WAITING for i in rows_of(snap, decision.admit))
    for i in rows_of(snap, (*decision.resume, *decision.admit)):
        assert not s.held[i]
        assert s.num_blocks_final[i] <= snap.kv.num_total_blocks


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots())
def test_same_snapshot_same_decision_and_nothing_is_written(name: str, snap: Snapshot) -> None:
    names = list(type(snap.sessions).__dataclass_fields__)
    before = {field: getattr(snap.sessions, field).copy() for field in names}
    for field in names:
        getattr(snap.sessions, field).flags.writeable = False
    assert PLANNERS[name]()(snap) == PLANNERS[name]()(snap)
    for field in names:
        np.testing.assert_array_equal(getattr(snap.sessions, field), before[field])


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots())
def test_an_idle_engine_starts_somebody(name: str, snap: Snapshot) -> None:
    """The same without what is in the engine: whoever is left and not held, somebody starts."""
    s = snap.sessions
    kept = ~np.isin(s.state, IN_ENGINE)
    columns = {f: getattr(s, f)[kept] for f in type(s).__dataclass_fields__}
    idle = dataclasses.replace(
        snap,
        sessions=type(s)(**columns),
        kv=dataclasses.replace(snap.kv, num_free_blocks=snap.kv.num_total_blocks),
    )
    s = idle.sessions
    fits = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= idle.kv.num_total_blocks
    decision = PLANNERS[name]()(idle)
    assert bool(decision.admit or decision.resume) == bool((fits & ~s.held).any())


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots())
def test_nobody_is_paused_when_nobody_waits_and_the_pool_has_room(
    name: str, snap: Snapshot
) -> None:
    s = snap.sessions
    num_final = int(s.num_blocks_final[staying(snap)].sum())
    leaving = np.isin(s.state, IN_ENGINE) & ~staying(snap)
    room = snap.kv.num_total_blocks - int(s.num_blocks_held[leaving].sum())
    waits = np.isin(s.state, [S.WAITING, S.PREEMPTED]) & ~s.held
    if not waits.any() and num_final <= room:
        assert not PLANNERS[name]()(snap).pause


@pytest.mark.parametrize("name", ["paper", "guide"])
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots(tiers=(2,)))
def test_copies_ahead_of_need_fit_blocks_link_and_host(name: str, snap: Snapshot) -> None:
    burst = ArrivalEstimate(short_rate=9.0, long_rate=0.5, blocks_per_arrival=2.0, burst=True)
    snap = dataclasses.replace(snap, arrivals=burst)
    decision, s, costs = PLANNERS[name]()(snap), snap.sessions, snap.costs
    rows = rows_of(snap, tuple(slot for slot, _ in decision.offload))
    assert len(set(rows)) == len(rows)
    assert not {slot for slot, _ in decision.offload} & set(decision.pause)
    for i, (_, num_blocks) in zip(rows, decision.offload, strict=True):
        assert s.state[i] == S.RUNNING
        full = (s.num_prompt_tokens[i] + s.num_generated[i] - 1) // snap.kv.tokens_per_block
        assert 1 <= num_blocks <= full - s.num_copied_blocks[i]
    assert [s.slack_s[i] for i in rows] == sorted((s.slack_s[i] for i in rows), reverse=True)
    num_asked = sum(num_blocks for _, num_blocks in decision.offload)
    assert num_asked * costs.offload_block_s <= max(costs.plan_interval_s, costs.offload_block_s)
    assert num_asked + int(s.num_copied_blocks.sum()) <= snap.kv.num_host_blocks or not num_asked


@every_baseline
@settings(max_examples=NUM_EXAMPLES)
@given(snap=snapshots(tiers=(0, 1)))
def test_without_tiering_nothing_is_asked_of_the_tiers(name: str, snap: Snapshot) -> None:
    decision = PLANNERS[name]()(snap)
    assert (decision.offload, decision.prefetch, decision.recompute) == ((), (), ())
