"""The longest wait for a start, of requests that their clients hold for a part of it."""

from __future__ import annotations

from dataclasses import replace

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.types import SessionState

S = SessionState
PROMPT = (5, 6, 7, 8, 9)


def test_short_holds_do_not_evade_the_longest_wait() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=5.0))
    assert isinstance(h.planner, ChosenPlanner)
    h.planner.hold = True
    handle = h.submit(PROMPT, 5)
    for _ in range(2):
        h.now += 4.0
        h.coordinator.hold(handle, h.now)
        h.now += 0.001
        h.coordinator.release(handle, h.now)
        h.plan()
    assert "max_queue_delay_s" in (h.events_of(handle)[-1].error or "")


def test_a_wait_goes_on_after_a_hold_where_it_stood_before() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=5.0))
    assert isinstance(h.planner, ChosenPlanner)
    h.planner.hold = True
    handle = h.submit(PROMPT, 5)
    h.now += 3.0
    for _ in range(2):
        h.coordinator.hold(handle, h.now)
        h.now += 100.0
        h.plan()
        h.coordinator.release(handle, h.now)
        h.plan()
        h.now += 0.875
    h.plan()
    assert h.state(handle) is S.WAITING
    h.now += 0.25
    h.plan()
    assert "max_queue_delay_s" in (h.events_of(handle)[-1].error or "")
    h.expect_nothing_left()


def test_the_time_of_a_hold_does_not_count_after_a_loss() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=5.0, max_num_tokens=16))
    handle = h.submit(tuple(range(1, 31)), 5)
    h.plan()
    h.coordinator.hold(handle, h.now)
    h.now += 100.0
    h.lose_engine()
    assert h.state(handle) is S.WAITING
    h.coordinator.release(handle, h.now)
    h.now += 4.0
    h.plan()
    assert h.state(handle) is S.WAITING
    h.now += 2.0
    h.plan()
    assert "max_queue_delay_s" in (h.events_of(handle)[-1].error or "")
