"""Leases: an enqueue asks for a part of the tokens; its end is a pause point that loses none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.executor.api import SamplingConfig
from tokenflow.types import EndReason, SessionState

S = SessionState
PROMPT = (5, 6, 7, 8, 9)


def leased(lease_tokens: int = 5, **changes: object) -> Harness:
    return Harness(replace(CONFIG, lease_tokens=lease_tokens, **changes))  # type: ignore[arg-type]


def planner_of(h: Harness) -> ChosenPlanner:
    assert isinstance(h.planner, ChosenPlanner)
    return h.planner


@pytest.mark.parametrize("lease_tokens", [1, 2, 5, 19, 20, 21])
def test_leases_change_nothing_and_lose_no_token(lease_tokens: int) -> None:
    h = leased(lease_tokens)
    handle, other = h.submit(PROMPT, 20), h.submit((3, 2, 1), 7)
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    h.expect_whole(other, (3, 2, 1), 7)
    counters = h.coordinator.counters
    assert counters.num_lease_ends == (20 - 1) // lease_tokens + (7 - 1) // lease_tokens
    assert counters.num_resumes == counters.num_lease_ends
    assert counters.num_pauses == 0
    assert counters.num_recomputed_tokens == 0
    assert sum(r.max_tokens for r in h.executor.requests.values()) == 27
    usage = h.events_of(handle)[-1].usage
    assert usage is not None
    assert usage.num_pauses == 0
    h.expect_nothing_left()


def test_a_lease_reserves_only_its_own_blocks() -> None:
    h = leased(4, max_tokens_in_paged_kv_cache=32)  # 8 blocks of 4
    handles = [h.submit((n, n + 1, n + 2, n + 3), 24) for n in (1, 2, 3)]  # 7 blocks each
    h.step()
    assert [h.state(handle) for handle in handles] == [S.RUNNING] * 3
    h.run_to_empty()
    for n, handle in zip((1, 2, 3), handles, strict=True):
        h.expect_whole(handle, (n, n + 1, n + 2, n + 3), 24)
    h.expect_nothing_left()


def test_a_lease_that_is_not_renewed_at_once_is_a_pause() -> None:
    h = leased()
    handle = h.submit(PROMPT, 20)
    while len(h.tokens_of(handle)) < 4:
        h.step()
    planner_of(h).hold_paused = True
    h.step()
    assert h.state(handle) is S.PREEMPTED
    assert len(h.tokens_of(handle)) == 5
    for _ in range(4):
        h.step()
    assert h.coordinator.counters.num_pauses == 1
    assert [e["why"] for e in h.tracer.named("pause")] == ["lease"]
    planner_of(h).hold_paused = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    usage = h.events_of(handle)[-1].usage
    assert usage is not None
    assert usage.num_pauses == 1
    assert usage.paused_s == pytest.approx(0.2)
    h.expect_nothing_left()


@pytest.mark.parametrize("at", range(1, 20))
def test_a_pause_that_races_with_a_lease_end(at: int) -> None:
    """Asked for while the step is in flight in which the lease, or the request, may end."""
    h = leased()
    handle = h.submit(PROMPT, 20)
    while len(h.tokens_of(handle)) < at:
        h.step()
    if h.state(handle) is S.PREEMPTED:
        h.plan()
    h.begin()
    if h.state(handle) is S.RUNNING:
        h.pause(handle)
        h.plan()
        assert h.state(handle) is S.PAUSING
    h.end()
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    h.expect_nothing_left()


@pytest.mark.parametrize("at", range(1, 12))
def test_a_cancel_that_races_with_a_lease_end(at: int) -> None:
    h = leased()
    handle = h.submit(PROMPT, 20)
    while len(h.tokens_of(handle)) < at:
        h.step()
    h.begin()
    h.coordinator.cancel(handle, h.now)
    h.end()
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.CANCELLED
    assert len(h.tokens_of(handle)) == at
    h.expect_nothing_left()


def test_a_kind_that_is_never_paused_gets_no_lease() -> None:
    h = leased()
    handle = h.submit(PROMPT, 20, sampling_config=SamplingConfig(top_p=0.9, top_p_decay=0.9))
    h.run_to_empty()
    assert [r.max_tokens for r in h.executor.requests.values()] == [20]
    h.expect_whole(handle, PROMPT, 20)


def test_a_stop_on_the_last_token_of_a_lease_is_the_end() -> None:
    h = leased()
    fifth = Harness()
    other = fifth.submit(PROMPT, 5)
    fifth.run_to_empty()
    handle = h.submit(PROMPT, 20, stop_words=((fifth.tokens_of(other)[-1],),))
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.STOP
    assert len(h.tokens_of(handle)) == 5
    assert h.coordinator.counters.num_lease_ends == 0


@pytest.mark.parametrize("lease_tokens", [59, 60])
def test_the_engines_own_limit_within_a_lease_is_the_end(lease_tokens: int) -> None:
    """max_seq_len 64 leaves 59 tokens: the end of one lease, the inside of the other."""
    h = leased(lease_tokens)
    handle = h.submit(PROMPT, 100)
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.LENGTH
    assert len(h.tokens_of(handle)) == 59
    assert h.coordinator.counters.num_lease_ends == 0
    h.expect_nothing_left()


def test_a_loss_within_a_lease() -> None:
    h = leased()
    handle = h.submit(PROMPT, 20)
    while len(h.tokens_of(handle)) < 7:
        h.step()
    h.lose_engine()
    h.start_engine()
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    h.expect_nothing_left()


def test_a_renewal_does_not_start_the_quantum_anew() -> None:
    h = leased()
    handle = h.submit(PROMPT, 20)
    starts = set()
    while h.state(handle) is not None:
        h.step()
        columns = h.coordinator.table.columns(h.now)
        if h.state(handle) is S.RUNNING:
            starts.add(float(columns.running_since_time[0]))
    assert len(starts) == 1


def test_a_loss_while_a_lease_is_renewed_is_an_interruption() -> None:
    h = leased()
    handle = h.submit(PROMPT, 20)
    while h.state(handle) is not S.RESUMING:
        h.step()
        h.plan()
    h.lose_engine()
    h.now += 3.0
    h.start_engine()
    h.step()
    assert h.state(handle) is S.RUNNING
    assert h.coordinator.table.columns(h.now).running_since_time[0] == pytest.approx(h.now)
