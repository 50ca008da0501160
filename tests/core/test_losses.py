"""The engine is lost: what clients have is kept, what can go on goes on, the rest is told so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.support.stepped import LOSS
from tokenflow.config import ServingConfig
from tokenflow.errors import LAST_OUTPUT
from tokenflow.executor.api import SamplingConfig
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import EndReason, SessionState

S = SessionState
PROMPT = (5, 6, 7, 8, 9)
LONG_PROMPT = tuple(range(1, 31))  # two chunks of context
DECAY = SamplingConfig(top_p=0.9, top_p_decay=0.9)


def planner_of(h: Harness) -> ChosenPlanner:
    assert isinstance(h.planner, ChosenPlanner)
    return h.planner


def to_state(h: Harness, state: SessionState, **fields: object) -> int:
    """One request in this state; nobody else is there."""
    planner_of(h).hold = state is S.WAITING
    handle = h.submit(LONG_PROMPT if state is S.PREFILLING else PROMPT, 20, **fields)
    h.step()
    if state in (S.WAITING, S.PREFILLING):
        return handle
    while len(h.tokens_of(handle)) < 4:
        h.step()
    if state is S.RUNNING:
        return handle
    planner_of(h).hold_paused = True
    h.pause(handle)
    h.plan()
    if state is S.CANCELLING:
        h.coordinator.cancel(handle, h.now)
        return handle
    if state is S.PAUSING:
        return handle
    h.step()
    planner_of(h).hold_paused = False
    if state is S.RESUMING:
        h.plan()
    return handle


@pytest.fixture
def small_steps() -> ServingConfig:
    return replace(CONFIG, max_num_tokens=16)


KILLS: dict[str, Callable[[Harness], None]] = {
    "between steps": lambda h: h.lose_engine(),
    "within a step": lambda h: (h.begin(), h.lose_engine(), None)[-1],
    "noticed late": lambda h: (h.lose_engine(noticed=False), h.plan(), h.notice_loss(), None)[-1],
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
@pytest.mark.parametrize(
    "state", [S.WAITING, S.PREFILLING, S.RUNNING, S.PAUSING, S.PREEMPTED, S.RESUMING]
)
def test_a_loss_in_any_state_changes_nothing(
    state: SessionState, kill: Callable[[Harness], None], small_steps: ServingConfig
) -> None:
    h = Harness(small_steps)
    handle = to_state(h, state)
    assert h.state(handle) is state
    kill(h)
    waits = state in (S.WAITING, S.PREFILLING)
    assert h.state(handle) is (S.WAITING if waits else S.PREEMPTED)
    assert not h.coordinator.engine_is_up
    h.plan()  # there is nobody to ask
    planner_of(h).hold = planner_of(h).hold_paused = False
    h.start_engine()
    h.run_to_empty()
    h.expect_whole(handle, LONG_PROMPT if state is S.PREFILLING else PROMPT, 20)
    counters = h.coordinator.counters
    assert counters.num_engine_losses == 1
    in_engine = state not in (S.WAITING, S.PREEMPTED)
    if state is not S.PAUSING:  # the step may have ended its pause before
        assert counters.num_recovered == in_engine
    if not waits:  # the whole context was computed once more, and only once
        assert counters.num_resumes_recomputed == 1
        assert counters.num_recomputed_tokens == len(PROMPT) + 4 - 1
    h.expect_nothing_left()


def test_a_client_that_was_answered_hears_nothing_more() -> None:
    h = Harness()
    handle = to_state(h, S.CANCELLING)
    h.lose_engine()
    assert h.state(handle) is None
    assert h.end_of(handle) is EndReason.CANCELLED
    h.start_engine()
    h.run_to_empty()
    h.expect_nothing_left()


def test_the_second_loss_of_a_request_is_its_end() -> None:
    h = Harness()
    handle, other = to_state(h, S.RUNNING), h.submit((3, 2, 1), 6)
    h.lose_engine()
    h.start_engine()
    h.step()
    h.step()
    assert h.state(handle) is S.RUNNING
    num_tokens = len(h.tokens_of(handle))
    newcomer = h.submit((1, 1, 2), 30)
    h.step()
    h.lose_engine()
    end = h.events_of(handle)[-1]
    assert end.end is EndReason.ERROR
    assert end.retryable
    assert "a second time" in (end.error or "")
    assert LOSS in (end.error or "")
    assert len(h.tokens_of(handle)) >= num_tokens
    h.start_engine()
    h.run_to_empty()
    h.expect_whole(newcomer, (1, 1, 2), 30)
    h.expect_whole(other, (3, 2, 1), 6)  # it waited through the first loss
    h.expect_nothing_left()


def test_a_loss_while_paused_does_not_count_against_the_request() -> None:
    h = Harness()
    handle = to_state(h, S.PREEMPTED)
    planner_of(h).hold = True
    for _ in range(3):
        h.lose_engine()
        h.start_engine()
    planner_of(h).hold = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)


def test_a_kind_that_cannot_be_resumed_ends_with_the_reason() -> None:
    h = Harness()
    started = to_state(h, S.RUNNING, sampling_config=DECAY)
    planner_of(h).hold = True
    waiting = h.submit(PROMPT, 5, sampling_config=DECAY)
    h.lose_engine()
    end = h.events_of(started)[-1]
    assert end.end is EndReason.ERROR
    assert "top_p decay" in (end.error or "")
    assert end.retryable
    planner_of(h).hold = False
    h.start_engine()
    h.run_to_empty()
    h.expect_whole(waiting, PROMPT, 5)


def test_an_error_of_an_engine_that_goes_on_is_the_requests_own() -> None:
    h = Harness()
    handle = h.submit((VOCAB_TOO_LARGE,), 5)
    other = h.submit(PROMPT, 5)
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.ERROR
    h.expect_whole(other, PROMPT, 5)
    assert h.coordinator.counters.num_recovered == 0


VOCAB_TOO_LARGE = 1 << 20


def test_while_there_is_no_engine_requests_wait_up_to_the_bounds() -> None:
    h = Harness(replace(CONFIG, max_queue_size=3, max_queue_delay_s=5.0))
    h.lose_engine()
    waiting = [h.submit(PROMPT, 4) for _ in range(3)]
    refused = h.submit(PROMPT, 4)
    assert "max_queue_size" in (h.events_of(refused)[-1].error or "")
    h.now += 5.1
    h.plan()
    late = h.submit(PROMPT, 4)
    for handle in waiting:
        assert "max_queue_delay_s" in (h.events_of(handle)[-1].error or "")
        assert h.events_of(handle)[-1].retryable
    h.coordinator.cancel(late, h.now)
    assert h.end_of(late) is EndReason.CANCELLED
    last = h.submit(PROMPT, 4)
    h.start_engine()
    h.run_to_empty()
    h.expect_whole(last, PROMPT, 4)


def test_those_that_wait_again_keep_their_order_of_arrival() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=100.0))
    planner_of(h).hold = True
    first = h.submit(LONG_PROMPT, 5)
    planner_of(h).hold = False
    h.plan()
    assert h.state(first) is S.PREFILLING
    planner_of(h).hold = True
    h.now += 50.0
    second = h.submit(PROMPT, 5)
    h.lose_engine()
    h.now += 60.0
    h.plan()
    assert h.end_of(first) is EndReason.ERROR  # waited for 110 s
    assert h.end_of(second) is None


def test_who_waits_again_is_not_overtaken_by_who_came_later() -> None:
    """By the real plan, which goes by how long each has waited."""
    policy = TokenflowPolicy()
    config = replace(CONFIG, max_batch_size=1, max_num_tokens=16)
    h = Harness(config, lambda snapshot: plan(snapshot, policy))
    h.submit((3, 2, 1), 10)
    h.run_to_empty()  # what the engine costs is known
    first = h.submit(LONG_PROMPT, 5)
    h.plan()
    assert h.state(first) is S.PREFILLING
    h.now += 0.5
    second = h.submit(PROMPT, 5)
    h.now += 0.5
    h.lose_engine()
    h.now += 5.0
    h.start_engine()
    h.plan()
    assert h.state(first) is S.PREFILLING
    assert h.state(second) is S.WAITING
    h.run_to_empty()
    h.expect_whole(first, LONG_PROMPT, 5)
    h.expect_whole(second, PROMPT, 5)


def test_a_stall_is_counted_from_the_last_sign_of_life() -> None:
    h = Harness()
    h.now = 1000.0
    assert h.coordinator.stalled_s(h.now) == 0.0
    h.submit(PROMPT, 10)
    h.plan()
    h.now += 3.0
    assert h.coordinator.stalled_s(h.now) == pytest.approx(3.0)
    h.step()
    assert h.coordinator.stalled_s(h.now) == 0.0
    h.now += 7.0
    h.lose_engine()
    assert h.coordinator.stalled_s(h.now) == 0.0
    h.now += 7.0
    h.start_engine()
    assert h.coordinator.stalled_s(h.now) == 0.0
    h.plan()
    assert h.coordinator.stalled_s(h.now + 2.0) == pytest.approx(2.0)


def test_what_the_engine_wrote_last_is_not_for_clients() -> None:
    h = Harness()
    handle = to_state(h, S.RUNNING, sampling_config=DECAY)
    h.coordinator.on_engine_lost(LOSS + LAST_OUTPUT + "/a/path: secret", h.now)
    end = h.events_of(handle)[-1]
    assert (end.error or "").endswith(LOSS)
