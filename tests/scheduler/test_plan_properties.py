"""plan() on arbitrary snapshots: budgets, who may be paused, purity."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.build import COSTS, LENGTHS, MAX_UTIL, NO_EVICT, NOW, snapshot
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import ArrivalEstimate, SessionState, Snapshot

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
    num_resume_tokens = draw(st.integers(1, num_prompt + num_generated))
    kept = (num_prompt + num_generated - num_resume_tokens) // 32
    on_host = draw(st.integers(0, kept)) if state in (S.PREEMPTED, S.RESUMING) else 0
    copied = draw(st.integers(0, (num_prompt + num_generated - 1) // 32))
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
        "num_resume_tokens": num_resume_tokens,
        "num_host_blocks": on_host,
        "num_copied_blocks": copied if state in (S.RUNNING, S.PAUSING) else 0,
        "num_pauses": draw(st.integers(0, 5)),
    }


ARRIVALS = (
    ArrivalEstimate(),
    ArrivalEstimate(short_rate=16.0, long_rate=0.5, blocks_per_arrival=2.5, burst=True),
    ArrivalEstimate(short_rate=90.0, long_rate=0.5, blocks_per_arrival=6.0, burst=True),
)


@st.composite
def snapshots(draw, policies=(NO_EVICT, MAX_UTIL), tiers=(0, 1, 2)) -> Snapshot:
    """Consistent ones: what is in the engine fits its slots and its pool.

    tiers: 0 no host tier, 1 one by TensorRT-LLM's rules, 2 one with KvTiering.
    """
    tier = draw(st.sampled_from(tiers))
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
        offload_block_s=draw(st.sampled_from([0.0, 0.001, 0.02])) if tier else 0.0,
        onboard_block_s=draw(st.sampled_from([0.0, 0.001, 0.02])) if tier else 0.0,
        copy_wait_share=draw(st.sampled_from([0.0, 1.0])),
    )
    kept = [row if tier else {**row, "num_host_blocks": 0, "num_copied_blocks": 0} for row in kept]
    return snapshot(
        kept,
        max_batch_size=batch,
        num_total_blocks=total,
        capacity_policy=capacity_policy,
        costs=costs,
        num_host_blocks=draw(st.sampled_from([8, 200])) if tier else 0,
        has_tiering=tier == 2,
        arrivals=draw(st.sampled_from(ARRIVALS)),
        lengths=draw(st.sampled_from(LENGTHS)),
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
    ahead = (*decision.prefetch, *(slot for slot, _ in decision.offload))
    assert set(decision.why) == {*named, *ahead}
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
        if decision.why[slot] in ("for waiting", "for balance"):
            assert s.has_reader[i] or s.num_pauses[i] < POLICY.max_machine_pauses
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
    assert not decision.prefetch
    if snap.kv.capacity_policy is NO_EVICT:
        assert not decision.pause
        assert bool(decision) == bool(decision.offload)


@settings(max_examples=50)
@given(snap=snapshots())
def test_an_empty_engine_starts_somebody(snap: Snapshot) -> None:
    """Whatever waits and is not held, an idle engine takes on if it fits alone."""
    s = snap.sessions
    if np.isin(s.state, IN_ENGINE).any():
        return
    fits = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= snap.kv.num_total_blocks
    decision = plan(snap, POLICY)
    assert bool(decision) == bool(len(s) and (fits & ~s.held).any())


@given(snap=snapshots())
def test_copies_ahead_of_need_are_asked_of_those_who_have_the_blocks(snap: Snapshot) -> None:
    decision, s = plan(snap, POLICY), snap.sessions
    if not snap.kv.has_tiering:
        assert (decision.offload, decision.prefetch, decision.recompute) == ((), (), ())
        return
    assert set(decision.recompute) <= set(decision.resume)
    assert all(s.num_host_blocks[i] > 0 for i in rows_of(snap, decision.recompute))
    assert not set(decision.prefetch) & set(decision.resume)
    for i in rows_of(snap, decision.prefetch):
        assert s.state[i] == S.PREEMPTED
        assert s.num_host_blocks[i] > 0
        assert not s.held[i]
    rows = rows_of(snap, tuple(slot for slot, _ in decision.offload))
    assert len(set(rows)) == len(rows)
    for i, (_, num_blocks) in zip(rows, decision.offload, strict=True):
        assert s.state[i] == S.RUNNING
        full = (s.num_prompt_tokens[i] + s.num_generated[i] - 1) // snap.kv.tokens_per_block
        assert 1 <= num_blocks <= full - s.num_copied_blocks[i]
    slack = [s.slack_s[i] for i in rows]
    assert slack == sorted(slack, reverse=True)


@given(snap=snapshots(tiers=(2,)))
def test_copies_ahead_of_need_stay_within_the_link_and_the_free_room(snap: Snapshot) -> None:
    decision, s, costs = plan(snap, POLICY), snap.sessions, snap.costs
    seconds = sum(num_blocks for _, num_blocks in decision.offload) * costs.offload_block_s
    assert seconds <= max(POLICY.write_through_share * costs.plan_interval_s, costs.offload_block_s)
    assert sum(num_blocks for _, num_blocks in decision.offload) <= 8 or costs.offload_block_s > 0
    if decision.prefetch:
        placed = rows_of(snap, (*decision.resume, *decision.admit))
        pause = rows_of(snap, decision.pause)
        wanted = int(s.num_host_blocks[rows_of(snap, decision.prefetch)].sum())
        assert within_budget(snap, pause, placed)
        assert wanted <= free_after(snap, pause, placed)


@settings(max_examples=300)
@given(snap=snapshots(tiers=(2,)))
def test_copies_ahead_of_need_leave_the_host_to_the_paused(snap: Snapshot) -> None:
    """All KV of streams that are out after the plan, and the copies of those in the engine."""
    decision, s = plan(snap, POLICY), snap.sessions
    if not decision.offload:
        return
    num_kept = 0
    for i in range(len(s)):
        if s.state[i] in (S.PREEMPTED, S.PAUSING) or s.slot[i] in decision.pause:
            num_kept += -(-int(s.num_prompt_tokens[i] + s.num_generated[i]) // 32)
        elif s.state[i] == S.RESUMING:
            num_kept += int(s.num_host_blocks[i])
        else:
            num_kept += int(s.num_copied_blocks[i])
    num_asked = sum(num_blocks for _, num_blocks in decision.offload)
    assert num_kept + num_asked <= snap.kv.num_host_blocks


def free_after(snap: Snapshot, pause: list[int], placed: list[int]) -> int:
    """Free blocks of the engine after a decision, told apart from the planner's sums."""
    s, kv = snap.sessions, snap.kv
    inside = staying(snap)
    inside[pause], inside[placed] = False, True
    column = s.num_blocks_needed if kv.capacity_policy is NO_EVICT else s.num_blocks_held
    held = int(column[inside].sum())
    if kv.capacity_policy is MAX_UTIL:
        held += int(s.num_blocks_needed[placed].sum())
    return kv.num_total_blocks - held


@given(snap=snapshots())
def test_each_part_can_be_left_out(snap: Snapshot) -> None:
    """The switches of the ablation change nothing but their own part."""
    full = plan(snap, POLICY)
    assert not plan(snap, dataclasses.replace(POLICY, write_through=False)).offload
    assert not plan(snap, dataclasses.replace(POLICY, prefetch=False)).prefetch
    bare = plan(snap, dataclasses.replace(POLICY, write_through=False, prefetch=False))
    for name in ("pause", "resume", "admit", "forced", "recompute"):
        assert getattr(bare, name) == getattr(full, name)
    calm = dataclasses.replace(snap, arrivals=ArrivalEstimate())
    off = dataclasses.replace(POLICY, anticipate=False, write_through=False)
    assert plan(snap, off) == plan(calm, off)
