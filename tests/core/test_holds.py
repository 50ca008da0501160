"""A client holds its stream paused, and a request has a time limit of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.core.invariants import check_instants
from tokenflow.executor.api import SamplingConfig
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import EndReason, SessionState

S = SessionState
PROMPT = (5, 6, 7, 8, 9)


def run_until(h: Harness, handle: int, num_tokens: int) -> None:
    while len(h.tokens_of(handle)) < num_tokens:
        h.step()


@pytest.mark.parametrize("policy", [None, TokenflowPolicy(), FcfsReservePolicy()])
def test_a_held_stream_stays_paused_until_it_is_released(
    policy: TokenflowPolicy | FcfsReservePolicy | None,
) -> None:
    h = Harness(planner=None if policy is None else lambda s: plan(s, policy))
    handle, other = h.submit(PROMPT, 20), h.submit((3, 2, 1), 12)
    run_until(h, handle, 4)
    for _ in range(5):
        h.coordinator.hold(handle, h.now)
    for _ in range(20):
        h.step()
    assert h.state(handle) is S.PREEMPTED
    assert h.coordinator.num_held == 1
    assert h.coordinator.counters.num_pauses == 1
    h.expect_whole(other, (3, 2, 1), 12)  # nobody waits for the one that is held
    for _ in range(5):
        h.coordinator.release(handle, h.now)
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    h.expect_nothing_left()


def test_two_hundred_holds_of_one_stream() -> None:
    h = Harness(replace(CONFIG, max_seq_len=512, max_tokens_in_paged_kv_cache=1024))
    handle = h.submit(PROMPT, 400)
    num_holds = 0
    while h.state(handle) is not None:
        if h.state(handle) is S.RUNNING and num_holds < 200:
            num_holds += 1
            h.coordinator.hold(handle, h.now)
            h.step()
            assert h.state(handle) is S.PREEMPTED
            h.coordinator.release(handle, h.now)
        h.step()
    assert num_holds == 200
    h.expect_whole(handle, PROMPT, 400)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("at", ["waiting", "prefilling", "resuming", "pausing", "last step"])
def test_a_hold_in_any_state(at: str, in_flight: bool) -> None:
    h = Harness(replace(CONFIG, max_num_tokens=16))
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    planner.hold = at == "waiting"
    prompt = tuple(range(1, 31)) if at == "prefilling" else PROMPT
    handle = h.submit(prompt, 10)
    h.plan()
    if at in ("resuming", "pausing"):
        run_until(h, handle, 3)
        h.pause(handle)
        h.plan()
    if at == "resuming":
        h.step()
        h.plan()
        assert h.state(handle) is S.RESUMING
    if at == "last step":
        run_until(h, handle, 9)
    if in_flight:
        h.begin()
    h.coordinator.hold(handle, h.now)
    if in_flight:
        h.end()
    planner.hold = False
    for _ in range(15):
        h.step()
    if at == "last step" and in_flight:
        h.expect_whole(handle, prompt, 10)
        return
    assert h.state(handle) is (S.WAITING if at == "waiting" else S.PREEMPTED)
    h.coordinator.release(handle, h.now)
    h.run_to_empty()
    h.expect_whole(handle, prompt, 10)
    h.expect_nothing_left()


def test_a_hold_ends_by_itself() -> None:
    h = Harness(replace(CONFIG, max_hold_s=3.0))
    handle = h.submit(PROMPT, 10)
    run_until(h, handle, 2)
    h.coordinator.hold(handle, h.now)
    held_time = h.now
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 10)
    assert 3.0 < h.now - held_time < 5.0


def test_a_hold_that_outlasts_its_stream_ends_nobody_elses() -> None:
    """The row of a stream that ended is the next one's."""
    h = Harness(replace(CONFIG, max_hold_s=3.0))
    handle = h.submit(PROMPT, 10)
    run_until(h, handle, 2)
    h.coordinator.hold(handle, h.now)
    h.step()
    h.now += 3.1
    h.coordinator.cancel(handle, h.now)
    h.plan()
    assert [e["request_id"] for e in h.tracer.named("release")] == []
    h.run_to_empty()
    h.expect_nothing_left()


def test_holds_of_one_stream_are_counted_together() -> None:
    h = Harness(replace(CONFIG, max_hold_s=3.0))
    handle = h.submit(PROMPT, 20)
    run_until(h, handle, 2)
    for _ in range(2):
        h.coordinator.hold(handle, h.now)
        h.step()
        h.now += 1.4
        h.coordinator.release(handle, h.now)
    h.coordinator.hold(handle, h.now)
    held_time = h.now
    while h.coordinator.num_held:
        h.step()
    assert h.now - held_time < 0.3
    h.coordinator.hold(handle, h.now)
    assert h.coordinator.num_held == 0
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)


@pytest.mark.parametrize("end", ["cancel", "shutdown", "timeout"])
def test_a_held_stream_ends_at_once(end: str) -> None:
    h = Harness()
    handle = h.submit(PROMPT, 10, timeout_s=20.0)
    run_until(h, handle, 2)
    h.coordinator.hold(handle, h.now)
    h.step()
    if end == "cancel":
        h.coordinator.cancel(handle, h.now)
    elif end == "shutdown":
        h.coordinator.fail_all("over", h.now)
    else:
        h.now += 20.0
        h.plan()
    assert h.end_of(handle) is not None
    h.run_to_empty()
    h.expect_nothing_left()


def test_a_held_newcomer_is_not_overloaded_and_blocks_nobody() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=1.0))
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    planner.hold = True
    held, waiting = h.submit(PROMPT, 5), h.submit((1, 2), 5)
    h.coordinator.hold(held, h.now)
    h.now += 2.0
    h.plan()
    assert "max_queue_delay_s" in (h.events_of(waiting)[-1].error or "")
    assert h.state(held) is S.WAITING
    planner.hold = False
    h.coordinator.release(held, h.now)
    h.run_to_empty()
    h.expect_whole(held, PROMPT, 5)


def test_what_can_never_be_paused_cannot_be_held() -> None:
    h = Harness()
    handle = h.submit(PROMPT, 10, sampling_config=SamplingConfig(top_p=0.9, top_p_decay=0.5))
    run_until(h, handle, 2)
    h.coordinator.hold(handle, h.now)
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 10)
    assert h.coordinator.counters.num_pauses == 0


def test_unknown_and_finished_streams_can_be_held_and_released_without_effect() -> None:
    h = Harness()
    handle = h.submit(PROMPT, 3)
    h.run_to_empty()
    for unknown in (handle, 999):
        h.coordinator.hold(unknown, h.now)
        h.coordinator.release(unknown, h.now)
    assert h.coordinator.num_held == 0


@pytest.mark.parametrize(
    "state", [S.WAITING, S.PREFILLING, S.RUNNING, S.PAUSING, S.PREEMPTED, S.RESUMING]
)
def test_a_request_ends_at_its_own_limit_with_what_it_has(state: SessionState) -> None:
    h = Harness()
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    planner.hold = state is S.WAITING
    handle = h.submit(PROMPT, 30, timeout_s=1.0)
    h.plan()
    if state not in (S.WAITING, S.PREFILLING):
        run_until(h, handle, 3)
    if state in (S.PAUSING, S.PREEMPTED, S.RESUMING):
        planner.hold_paused = True
        h.pause(handle)
        h.plan()
    if state in (S.PREEMPTED, S.RESUMING):
        h.step()
        planner.hold_paused = False
    if state is S.RESUMING:
        h.plan()
    assert h.state(handle) is state
    planner.hold_paused = True
    assert h.coordinator.next_plan_time() <= 1.0
    num_tokens = len(h.tokens_of(handle))
    h.now = 1.0
    h.plan()
    assert h.end_of(handle) is EndReason.TIMEOUT
    planner.hold = planner.hold_paused = False
    h.run_to_empty()
    assert len(h.tokens_of(handle)) == num_tokens
    usage = h.events_of(handle)[-1].usage
    assert usage is not None
    assert usage.num_output_tokens == num_tokens
    assert h.coordinator.counters.num_timed_out == 1
    h.expect_nothing_left()


def test_requests_with_limits_that_end_early_leave_nothing_behind() -> None:
    h = Harness(replace(CONFIG, max_queue_size=300))
    assert isinstance(h.planner, ChosenPlanner)
    h.planner.hold = True
    last, *others = [h.submit(PROMPT, 5, timeout_s=50.0 + n) for n in range(300)]
    for handle in others:
        h.coordinator.cancel(handle, h.now)
    check_instants(h.coordinator.table.groups.deadlines, at_least=1, at_most=1)
    h.now += 50.0
    h.plan()
    assert h.end_of(last) is EndReason.TIMEOUT


def test_held_newcomers_take_no_place_in_the_queue() -> None:
    h = Harness(replace(CONFIG, max_queue_size=2, max_batch_size=1))
    running = h.submit(PROMPT, 10)
    h.step()
    held = [h.submit(PROMPT, 5) for _ in range(2)]
    for handle in held:
        h.coordinator.hold(handle, h.now)
    others = [h.submit((n, n), 5) for n in (1, 2)]
    refused = h.submit((3, 3), 5)
    assert "max_queue_size" in (h.events_of(refused)[-1].error or "")
    while h.state(others[1]) is not None:
        h.step()
    h.expect_whole(running, PROMPT, 10)
    h.expect_whole(others[1], (2, 2), 5)
    for handle in held:
        h.coordinator.release(handle, h.now)
    h.run_to_empty()
    h.expect_whole(held[0], PROMPT, 5)
    h.expect_nothing_left()


def test_no_more_streams_are_held_than_may_wait() -> None:
    h = Harness(replace(CONFIG, max_queue_size=2))
    handles = [h.submit((n, n + 1), 5) for n in range(2)]
    h.step()
    handles.append(h.submit((7, 8), 5))
    for handle in handles:
        h.coordinator.hold(handle, h.now)
    assert h.coordinator.num_held == 2
    h.coordinator.cancel(handles[0], h.now)
    h.coordinator.hold(handles[2], h.now)
    assert h.coordinator.num_held == 2


def test_one_that_leaves_while_it_is_started_is_held_no_more() -> None:
    h = Harness(replace(CONFIG, max_num_tokens=16))
    handle = h.submit(tuple(range(1, 31)), 5)
    h.plan()
    h.coordinator.hold(handle, h.now)
    assert h.coordinator.num_held == 1
    h.coordinator.cancel(handle, h.now)
    assert h.state(handle) is S.PREFILLING
    assert h.coordinator.num_held == 0
    h.coordinator.release(handle, h.now)
    assert h.tracer.named("release") == []
    h.run_to_empty()
    h.expect_nothing_left()
