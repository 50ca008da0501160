"""What is certain from the extremes alone is found stream by stream too, and is often found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.build import (
    LENGTHS,
    MAX_UTIL,
    NO_EVICT,
    known_lengths,
    paused,
    running,
    snapshot,
    waiting,
)
from tests.scheduler.test_fast_paths import costs_of, crowds
from tests.scheduler.test_plan_properties import snapshots
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.scheduler_forecast import back_in_time
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import due_rows, due_slack_s
from tokenflow.scheduler_sure import surely_back, surely_carried
from tokenflow.scheduler_view import View, view_of
from tokenflow.types import Snapshot

POLICY = TokenflowPolicy()


@st.composite
def fast(draw) -> Snapshot:
    """Lengths, rates and needs of all sizes, in a batch with some slots free, on an engine that is
    mostly fast enough; a pool that holds everybody, or does not."""
    sizes, slots = st.integers(1, 12), draw(st.integers(1, 8))
    rows = []
    for i in range(draw(st.integers(1, slots)) + draw(st.integers(0, 12))):
        num, longer, in_engine = draw(sizes), draw(st.integers(0, 8)), i < slots
        blocks = {"num_blocks_needed": num, "num_blocks_final": num + longer}
        length = {"max_tokens": draw(st.integers(101, 600)), "read_rate": draw(st.floats(1, 25))}
        if in_engine:
            slack_s = draw(st.floats(0.5, 30))
            rows.append(running(slack_s, num_blocks_held=num, **blocks, **length))
        elif draw(st.booleans()):
            recomputed = draw(st.sampled_from([1, 1, 1, 33, 200]))
            slack_s = draw(st.floats(1, 60))
            rows.append(paused(slack_s, num_resume_tokens=recomputed, **blocks, **length))
        else:
            rows.append(waiting(**blocks, **length))
    held = sum(row.get("num_blocks_held", 0) for row in rows)
    speeds = draw(st.sampled_from([5.0, 50.0, 500.0])), draw(st.sampled_from([0.2, 1, 99]))
    return snapshot(
        rows,
        max_batch_size=slots + draw(st.integers(0, 2)),
        num_total_blocks=held + draw(st.sampled_from([0, 4, 40, 400])),
        capacity_policy=draw(st.sampled_from([NO_EVICT, MAX_UTIL])),
        costs=costs_of(*speeds),
        lengths=draw(st.sampled_from(LENGTHS)),
    )


def one_by_one(view: View) -> Load:
    """The load of an engine of which nothing is said to be sure."""
    load = Load(view)
    load._is_sure = False
    return load


@given(snap=fast() | crowds() | snapshots(), by_expectation=st.booleans())
@settings(max_examples=250, deadline=None)
def test_a_load_that_is_surely_carried_is_carried_stream_by_stream(
    snap: Snapshot, by_expectation: bool
) -> None:
    view = view_of(snap, TokenflowPolicy(load_by_expectation=by_expectation))
    if len(view.waiting) and surely_carried(view):
        assert one_by_one(view).num_admitted(view.waiting) == len(view.waiting)


@given(fast() | crowds() | snapshots(), st.data())
@settings(max_examples=250, deadline=None)
def test_who_surely_comes_back_does_so_by_everybodys_own_deadline(
    snap: Snapshot, data: st.DataObject
) -> None:
    view = view_of(snap, POLICY)
    num_left = data.draw(st.integers(0, len(view.running)))
    out_rows, coming = view.running[num_left:], [*view.paused.tolist(), *view.waiting.tolist()]
    placed = coming[: data.draw(st.integers(0, len(coming)))]
    room = {"free_slots": data.draw(st.integers(0, 3)), "free_blocks": data.draw(st.integers(0, 9))}
    rows = out_rows, np.array(placed, dtype=np.int64)
    if surely_back(view, *rows, **room):
        assert back_in_time(view, *rows, **room)


@given(snapshots())
@settings(max_examples=250, deadline=None)
def test_who_is_due_is_found_stream_by_stream(snap: Snapshot) -> None:
    """Unless the engine has taken all it can, which is another rule."""
    view, s = view_of(snap, POLICY), snap.sessions
    limits_s = dict(zip(view.paused.tolist(), due_slack_s(view, view.paused).tolist(), strict=True))
    due = [
        row
        for row in view.paused.tolist()
        if not s.started[row]
        or s.slack_s[row] <= limits_s[row]
        or (
            not s.has_reader[row]
            and snap.now - s.wait_since_time[row] >= POLICY.max_machine_pause_s
        )
    ]
    assert sorted(due_rows(view)) == due


def crowd(speed: float, **changes) -> Snapshot:
    """Everybody in the engine far ahead, some paused, as many newcomers as slots."""
    rows = [running(40.0) for _ in range(12)] + [paused(30.0) for _ in range(12)]
    rows += [waiting() for _ in range(12)]
    sizes = {"max_batch_size": 12, "num_total_blocks": 192, **changes}
    return snapshot(rows, costs=costs_of(speed, 99), **sizes)


@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_a_burst_on_a_fast_engine_is_surely_carried_and_brought_back(capacity_policy) -> None:
    snap = crowd(30.0, capacity_policy=capacity_policy)
    view = view_of(snap, POLICY)
    assert surely_carried(view)
    yielding, coming = view.running, view.waiting
    assert surely_back(view, yielding, coming, free_slots=0, free_blocks=view.free_blocks)
    assert len(plan(snap, POLICY).admit) == 12


def test_nothing_is_sure_on_a_slow_engine_or_where_kv_is_lost() -> None:
    assert not surely_carried(view_of(crowd(0.3), POLICY))
    view = view_of(crowd(30.0, num_total_blocks=60), POLICY)
    assert view.overflow.num_blocks
    assert not surely_back(view, view.running, view.waiting, free_slots=0, free_blocks=0)
    loading = crowd(30.0)
    costs = dataclasses.replace(loading.costs, onboard_block_s=0.001)
    view = view_of(dataclasses.replace(loading, costs=costs), POLICY)
    assert not surely_back(view, view.running, view.waiting, free_slots=0, free_blocks=0)


def test_short_answers_take_short_turns() -> None:
    """12 of 100 tokens at most, but all that were seen had 3: the pool holds 8, and each turn of 3
    computes all of its KV again. By their limits turns are longer, and that is carried."""
    blocks = {"num_prompt_tokens": 128, "num_blocks_needed": 4, "num_blocks_final": 7}
    rows = [waiting(max_tokens=100, read_rate=6.0, **blocks)] * 12
    sizes = {"num_total_blocks": 40, "capacity_policy": MAX_UTIL, "costs": costs_of(20.0, 0.2)}
    snap = snapshot(rows, lengths=known_lengths((3, 1e-9)), **sizes)
    by_expectation = view_of(snap, TokenflowPolicy(load_by_expectation=True))
    assert one_by_one(by_expectation).num_admitted(by_expectation.waiting) < 12
    assert not surely_carried(by_expectation)
    assert surely_carried(view_of(snap, POLICY))
