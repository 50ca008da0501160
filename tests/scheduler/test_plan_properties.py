"""plan() on arbitrary snapshots: budgets, who may be paused, purity."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.build import COSTS, MAX_UTIL, NO_EVICT, NOW, snapshot
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, SessionState, Snapshot

S = SessionState
IN_ENGINE = (S.PREFILLING, S.RUNNING, S.PAUSING, S.RESUMING, S.CANCELLING)
POLICY = TokenflowPolicy()


@st.composite
def sessions(draw, capacity_policy):
    state = draw(st.sampled_from([s for s in S if s is not S.FINISHED]))
    has_reader = draw(st.booleans() | st.just(True))
    started = state in (S.RUNNING, S.PAUSING, S.PREEMPTED, S.RESUMING)
    slack = draw(st.floats(0, 2) | st.floats(0, 40)) if has_reader else np.inf
    num_prompt = draw(st.integers(1, 200))
    max_tokens = draw(st.integers(2, 300))
    num_generated = draw(st.integers(1, max_tokens - 1)) if started else 0
    final = -(-(num_prompt + max_tokens - 1) // 32)
    now_blocks = -(-(num_prompt + num_generated) // 32)
    needed = final if capacity_policy is NO_EVICT else now_blocks
    return {
        "state": state,
        "wait_since_time": NOW - draw(st.floats(0, 20)),
        "running_since_time": NOW - draw(st.floats(0, 3)),
        "slack_s": slack if started else np.nan,
        "read_rate": draw(st.sampled_from([1.0, 4.0, 6.0, 25.0])),
        "has_reader": has_reader,
        "started": started,
        "pausable": draw(st.booleans() | st.just(True)),
        "held": state in (S.WAITING, S.PREEMPTED) and draw(st.sampled_from([False, False, True])),
        "priority": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "num_prompt_tokens": num_prompt,
        "num_generated": num_generated,
        "max_tokens": max_tokens,
        "num_blocks_held": needed if state in IN_ENGINE else 0,
        "num_blocks_needed": needed,
        "num_blocks_final": final,
        "num_resume_tokens": draw(st.integers(1, num_prompt + num_generated)),
        "num_pauses": draw(st.integers(0, 5)),
    }


@st.composite
def snapshots(draw, policies=(NO_EVICT, MAX_UTIL)) -> Snapshot:
    """Consistent ones: what is in the engine fits its slots and its pool."""
    capacity_policy = draw(st.sampled_from(policies))
    rows = draw(st.lists(sessions(capacity_policy), max_size=14))
    batch = draw(st.integers(1, 6))
    total = draw(st.integers(4, 80))
    slots, blocks = batch, total
    kept = []
    for row in rows:
        if row["state"] in IN_ENGINE:
            if slots < 1 or blocks < row["num_blocks_needed"]:
                continue
            slots, blocks = slots - 1, blocks - row["num_blocks_needed"]
        kept.append(row)
    speed = draw(st.sampled_from([0.2, 1.0, 5.0]))
    costs = dataclasses.replace(
        COSTS,
        step_base_s=COSTS.step_base_s / speed,
        pause_s=COSTS.pause_s / speed,
        resume_s=COSTS.resume_s / speed,
    )
    return snapshot(
        kept,
        max_batch_size=batch,
        num_total_blocks=total,
        capacity_policy=capacity_policy,
        costs=costs,
    )


def rows_of(snap: Snapshot, slots: tuple[int, ...]) -> list[int]:
    return [int(np.flatnonzero(snap.sessions.slot == slot)[0]) for slot in slots]


def staying(snap: Snapshot) -> np.ndarray:
    s = snap.sessions
    ending = (s.state == S.RUNNING) & (s.num_generated >= s.max_tokens - 1)
    return np.isin(s.state, [S.RUNNING, S.PREFILLING, S.RESUMING]) & ~ending


def within_budget(snap: Snapshot, pause: list[int], placed: list[int]) -> bool:
    """The engine's own sums, told apart from the planner's."""
    s, kv = snap.sessions, snap.kv
    inside = staying(snap)
    slots = int(inside.sum()) - len(pause) + len(placed)
    if kv.capacity_policy is NO_EVICT:
        after = inside.copy()
        after[pause], after[placed] = False, True
        fits = int(s.num_blocks_needed[after].sum()) <= kv.num_total_blocks
    else:
        leaving = np.isin(s.state, IN_ENGINE) & ~inside
        free = kv.num_free_blocks + int(s.num_blocks_held[leaving].sum())
        free += int(s.num_blocks_held[pause].sum())
        fits = int(s.num_blocks_needed[placed].sum()) <= free
    return slots <= kv.max_batch_size and fits


@given(snap=snapshots())
def test_never_exceeds_slots_or_blocks(snap: Snapshot) -> None:
    decision = plan(snap, POLICY)
    placed = rows_of(snap, (*decision.resume, *decision.admit))
    if placed:
        assert within_budget(snap, rows_of(snap, decision.pause), placed)


@given(snap=snapshots())
def test_decisions_name_the_right_states_once(snap: Snapshot) -> None:
    decision, s = plan(snap, POLICY), snap.sessions
    named = (*decision.pause, *decision.resume, *decision.admit)
    assert len(set(named)) == len(named)
    assert set(decision.why) == set(named)
    assert all(s.state[i] == S.RUNNING for i in rows_of(snap, decision.pause))
    assert all(s.state[i] == S.PREEMPTED for i in rows_of(snap, decision.resume))
    assert all(s.state[i] == S.WAITING for i in rows_of(snap, decision.admit))
    assert set(decision.forced) <= set(decision.pause)
    for i in rows_of(snap, (*decision.resume, *decision.admit)):
        assert s.num_blocks_needed[i] <= snap.kv.num_total_blocks


@given(snap=snapshots())
def test_never_pauses_against_the_rules(snap: Snapshot) -> None:
    decision, s, costs = plan(snap, POLICY), snap.sessions, snap.costs
    round_trip = costs.pause_s + costs.resume_s + costs.plan_interval_s
    least = POLICY.conservativeness * round_trip + POLICY.slack_margin_s
    for slot, i in zip(decision.pause, rows_of(snap, decision.pause), strict=True):
        assert s.pausable[i]
        assert s.started[i]
        if slot in decision.forced:
            assert snap.kv.capacity_policy is MAX_UTIL
            continue
        assert s.slack_s[i] >= least
        assert s.has_reader[i] or s.num_pauses[i] < POLICY.max_machine_pauses
        if decision.why[slot] in ("for waiting", "for balance"):
            assert snap.now - s.running_since_time[i] >= POLICY.min_quantum_s


@given(snap=snapshots((NO_EVICT,)))
def test_no_more_victims_than_needed(snap: Snapshot) -> None:
    decision = plan(snap, POLICY)
    pause = rows_of(snap, decision.pause)
    placed = rows_of(snap, (*decision.resume, *decision.admit))
    for i in pause:
        assert not within_budget(snap, [j for j in pause if j != i], placed)


@given(snap=snapshots())
def test_fixed_kinds_stay_within_half(snap: Snapshot) -> None:
    decision, s = plan(snap, POLICY), snap.sessions
    admitted = [i for i in rows_of(snap, decision.admit) if not s.pausable[i]]
    inside = [i for i in np.flatnonzero(staying(snap)) if not s.pausable[i]]
    fixed = [*inside, *admitted]
    if admitted and len(fixed) > 1:
        assert 2 * len(fixed) <= snap.kv.max_batch_size
        assert 2 * int(s.num_blocks_final[fixed].sum()) <= snap.kv.num_total_blocks


@given(snap=snapshots(), fcfs=st.booleans())
def test_same_snapshot_same_decision_and_nothing_is_written(snap: Snapshot, fcfs: bool) -> None:
    policy = FcfsReservePolicy() if fcfs else POLICY
    names = list(type(snap.sessions).__dataclass_fields__)
    before = {name: getattr(snap.sessions, name).copy() for name in names}
    for name in names:
        getattr(snap.sessions, name).flags.writeable = False
    first = plan(snap, policy)
    assert plan(snap, policy) == first
    for name in names:
        np.testing.assert_array_equal(getattr(snap.sessions, name), before[name])


@given(snap=snapshots())
def test_quiet_unless_somebody_waits_or_the_pool_runs_out(snap: Snapshot) -> None:
    s = snap.sessions
    if np.isin(s.state, [S.WAITING, S.PREEMPTED]).any():
        return
    decision = plan(snap, POLICY)
    assert not decision.resume
    assert not decision.admit
    if snap.kv.capacity_policy is NO_EVICT:
        assert decision == Decision()


@settings(max_examples=50)
@given(snap=snapshots())
def test_an_empty_engine_starts_somebody(snap: Snapshot) -> None:
    """Whatever waits, an idle engine takes on work that fits alone."""
    s = snap.sessions
    if np.isin(s.state, IN_ENGINE).any():
        return
    fits = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= snap.kv.num_total_blocks
    decision = plan(snap, POLICY)
    assert bool(decision) == bool(len(s) and fits.any())
