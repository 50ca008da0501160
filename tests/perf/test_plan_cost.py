"""What plan_cost measures: a coordinator's own plan, in a situation that repeats do not change."""

from __future__ import annotations

import numpy as np
import pytest

from perf import plan_cost
from perf.mid_work import NOW, STEP_BASE_S, batch_size, build
from tokenflow.types import SessionState

_S = SessionState


@pytest.mark.parametrize("kind", list(STEP_BASE_S))
def test_the_situation_is_what_its_name_says_and_stays(kind: str) -> None:
    num = 64
    coordinator, planner = build(num, kind)
    states = (_S.WAITING, _S.RUNNING, _S.PREEMPTED)
    counts = [coordinator.table.count(state) for state in states]
    num_batch = batch_size(num, kind)
    num_paused = 0 if kind == "quiet" else num // 3
    assert counts == [num - num_batch - num_paused, num_batch, num_paused]
    # the prior of the cost model pulls a little
    step_s = coordinator.costs.estimate(0.05).step_s(8, 1000)
    assert step_s == pytest.approx(STEP_BASE_S[kind], rel=0.2)

    coordinator.plan(NOW)
    before, first = coordinator.snapshot(NOW), planner.decision
    coordinator.plan(NOW)
    after = coordinator.snapshot(NOW)
    assert planner.decision == first
    assert np.array_equal(before.sessions.state, after.sessions.state)
    assert np.array_equal(before.sessions.num_resume_tokens, after.sessions.num_resume_tokens)
    assert len(first.pause) == len(first.admit) == (8 if kind == "burst" else 0)


def test_an_applied_decision_reaches_the_engine() -> None:
    coordinator, planner = build(64, "burst")
    planner.apply = True
    coordinator.plan(NOW)
    assert coordinator.table.count(_S.PAUSING) == len(planner.decision.pause) > 0
    assert coordinator.table.count(_S.PREFILLING) == len(planner.decision.admit) > 0


def test_a_row_says_whether_its_goal_is_met() -> None:
    row = plan_cost.measure(64, "busy", 0.0)
    assert row["whole_us"] > row["snapshot_us"] > 0
    assert row["goal_us"] is row["within_goal"] is None
    assert "goal" not in plan_cost.format_row(row)
    for within, word in ((True, "OK"), (False, "over")):
        text = plan_cost.format_row({**row, "goal_us": 200.0, "within_goal": within})
        assert text.endswith(f"goal 200: {word}")
