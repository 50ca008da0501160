"""The coordinator on the real in-flight core, step by step in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.support.stepped import SteppedExecutor
from tokenflow.errors import EngineError
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, EndReason, SessionState, Snapshot

S = SessionState
PROMPT = (5, 6, 7, 8, 9)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("pause_at", range(1, 60))
def test_a_pause_after_any_token_changes_nothing(pause_at: int, in_flight: bool) -> None:
    h = Harness(replace(CONFIG, max_seq_len=128))
    handle = h.submit(PROMPT, 60)
    other = h.submit((3, 2, 1), 40)
    while len(h.tokens_of(handle)) < pause_at:
        h.step()
    h.pause(handle)
    if in_flight:
        h.begin()
        h.plan()
        h.end()
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 60)
    h.expect_whole(other, (3, 2, 1), 40)
    usage = h.events_of(handle)[-1].usage
    assert usage is not None
    assert usage.num_pauses == 1
    # A pause during the very last step meets a request that has ended by itself.
    ended = in_flight and pause_at == 59
    assert h.coordinator.counters.num_resumes == (0 if ended else 1)
    assert h.coordinator.counters.num_recomputed_tokens == 0
    h.expect_nothing_left()


def test_a_pause_that_meets_the_natural_end_is_the_end() -> None:
    h = Harness()
    handle = h.submit(PROMPT, 3)
    while len(h.tokens_of(handle)) < 2:
        h.step()
    h.begin()
    h.pause(handle)
    h.plan()
    assert h.state(handle) is S.PAUSING
    h.end()
    h.expect_whole(handle, PROMPT, 3)
    h.expect_nothing_left()


def test_sampled_parts_get_their_own_seed_and_the_limits_that_remain() -> None:
    h = Harness()
    sampling = SamplingConfig(top_k=4, seed=9, min_tokens=8)
    handle = h.submit(PROMPT, 12, sampling_config=sampling)
    while len(h.tokens_of(handle)) < 5:
        h.step()
    h.pause(handle)
    h.run_to_empty()
    first, second = h.executor.requests[1], h.executor.requests[2]
    assert (first.max_tokens, first.sampling_config.seed) == (12, 9)
    assert second.input_token_ids == PROMPT + tuple(h.tokens_of(handle)[:5])
    assert second.max_tokens == 7
    assert second.sampling_config.min_tokens == 3
    assert second.sampling_config.seed not in (None, 9)
    h.expect_whole(handle, PROMPT, 12)


@pytest.mark.parametrize("state", [S.WAITING, S.PREFILLING, S.RUNNING, S.PAUSING, S.PREEMPTED])
def test_cancel_ends_the_stream_at_once_in_every_state(state: SessionState) -> None:
    h = Harness()
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    planner.hold = state is S.WAITING
    handle = h.submit(PROMPT, 30)
    if state is not S.WAITING:
        h.plan()
    if state in (S.RUNNING, S.PAUSING, S.PREEMPTED):
        h.step()
        h.step()
    if state in (S.PAUSING, S.PREEMPTED):
        planner.hold = True
        h.pause(handle)
        h.plan()
    if state is S.PREEMPTED:
        h.step()
    assert h.state(handle) is state
    num_before = len(h.tokens_of(handle))
    h.coordinator.cancel(handle, h.now)
    h.coordinator.cancel(handle, h.now)
    assert h.end_of(handle) is EndReason.CANCELLED
    planner.hold = False
    h.run_to_empty()
    assert len(h.tokens_of(handle)) == num_before
    assert h.coordinator.counters.num_cancelled == 1
    h.expect_nothing_left()


def test_nothing_is_cancelled_in_the_engine_before_its_first_token() -> None:
    h = Harness(replace(CONFIG, max_num_tokens=16))
    handle = h.submit(tuple(range(1, 31)), 10)
    h.step()
    assert h.state(handle) is S.PREFILLING
    h.coordinator.cancel(handle, h.now)
    num_steps = 0
    while h.executor.batcher.num_active:
        h.step()
        num_steps += 1
    assert num_steps >= 2  # the context was computed to its end
    assert h.runner.num_computed_tokens >= 30
    h.expect_nothing_left()


def test_a_stop_string_ends_the_work_without_a_further_event() -> None:
    h = Harness()
    handle = h.submit(PROMPT, 30)
    for _ in range(4):
        h.step()
    seen = len(h.events_of(handle))
    h.coordinator.finish(handle, h.now)
    h.run_to_empty()
    assert len(h.events_of(handle)) == seen
    assert h.coordinator.counters.num_ok == 1
    h.expect_nothing_left()


def test_an_engine_error_ends_only_the_request_it_names() -> None:
    h = Harness()
    bad = h.submit(PROMPT, 5, end_id=1000)
    good = h.submit(PROMPT, 5)
    h.run_to_empty()
    assert h.end_of(bad) is EndReason.ERROR
    assert "end_id" in (h.events_of(bad)[-1].error or "")
    h.expect_whole(good, PROMPT, 5)
    assert (h.coordinator.counters.num_failed, h.coordinator.counters.num_ok) == (1, 1)


def test_the_queue_bound_is_exact_and_the_answer_retryable() -> None:
    h = Harness()  # 3 slots, 8 may wait
    handles = [h.submit(PROMPT, 6) for _ in range(20)]
    refused = [n for n in handles if h.end_of(n) is EndReason.ERROR]
    assert len(refused) == 20 - 3 - 8
    event = h.events_of(refused[0])[0]
    assert event.retryable
    assert "max_queue_size" in (event.error or "")
    h.run_to_empty()
    assert sum(h.end_of(n) is EndReason.LENGTH for n in handles) == 11


def test_a_wait_longer_than_the_bound_is_answered() -> None:
    h = Harness(replace(CONFIG, max_queue_delay_s=1.0))
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    planner.hold = True
    handle = h.submit(PROMPT, 6)
    h.now = 0.9
    h.plan()
    assert h.end_of(handle) is None
    h.now = 1.1
    h.plan()
    assert h.end_of(handle) is EndReason.ERROR
    assert h.events_of(handle)[0].retryable
    h.expect_nothing_left()


def test_fail_all_ends_everybody_in_every_state_once() -> None:
    h = Harness()
    handles = [h.submit(PROMPT, 30) for _ in range(5)]
    for _ in range(3):
        h.step()
    h.pause(handles[0])
    h.plan()
    h.coordinator.fail_all("the engine is gone", h.now, retryable=True)
    for handle in handles:
        assert h.end_of(handle) is EndReason.ERROR
        assert h.events_of(handle)[-1].error == "the engine is gone"
    h.run_to_empty()
    h.expect_nothing_left()


def test_recomputed_tokens_are_counted_when_the_cache_lost_them() -> None:
    config = replace(CONFIG, max_tokens_in_paged_kv_cache=48, max_batch_size=1)
    h = Harness(config)
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    handle = h.submit(PROMPT, 20)
    while len(h.tokens_of(handle)) < 10:
        h.step()
    h.pause(handle)
    planner.hold = True
    h.step()
    assert h.state(handle) is S.PREEMPTED
    session = h.coordinator.table.get(handle)
    assert session is not None
    snapshot = h.coordinator.snapshot(h.now)
    assert snapshot.sessions.num_resume_tokens.tolist() == [1]
    planner.hold, planner.hold_paused = False, True
    # Another request takes almost the whole pool: the paused KV is evicted.
    big = h.submit(tuple(range(20, 40)), 24)
    while h.end_of(big) is None:
        h.step()
    assert h.coordinator.snapshot(h.now).sessions.num_resume_tokens[0] > 1
    planner.hold_paused = False
    h.run_to_empty()
    h.expect_whole(handle, PROMPT, 20)
    assert h.coordinator.counters.num_recomputed_tokens > 0


def test_stock_policy_hands_everything_to_the_engine_in_order() -> None:
    h = Harness(planner=lambda s: plan(s, FcfsReservePolicy()))
    handles = [h.submit((n + 1,), 4) for n in range(6)]
    h.step()
    assert all(h.state(n) in (S.PREFILLING, S.RUNNING) for n in handles)
    assert h.executor.batcher.num_active == 3
    assert h.executor.batcher.num_queued == 3
    h.run_to_empty()
    for n, handle in enumerate(handles):
        h.expect_whole(handle, (n + 1,), 4)
    ends = [e.handle for e in h.events if e.end]
    assert ends == handles
    assert h.coordinator.counters.num_pauses == 0


def test_tokenflow_starts_a_newcomer_at_the_cost_of_a_stream_that_is_ahead() -> None:
    policy = TokenflowPolicy(min_quantum_s=0.1)
    seen: list[Snapshot] = []

    def planner(snapshot: Snapshot) -> Decision:
        seen.append(snapshot)
        return plan(snapshot, policy)

    h = Harness(planner=planner)
    ahead = [h.submit((n + 1,), 50, read_rate=2.0) for n in range(3)]
    while len(h.tokens_of(ahead[0])) < 30:
        h.step()
    newcomer = h.submit((40,), 8, read_rate=2.0)
    arrival = h.now
    while not h.tokens_of(newcomer):
        h.step()
    assert h.now - arrival <= 0.25
    assert h.coordinator.counters.num_pauses == 1
    h.run_to_empty()
    for n, handle in enumerate(ahead):
        h.expect_whole(handle, (n + 1,), 50)
    h.expect_whole(newcomer, (40,), 8)
    h.expect_nothing_left()


def test_a_cancelled_prefill_keeps_its_room_until_the_engine_lets_go() -> None:
    policy = TokenflowPolicy()
    h = Harness(
        replace(CONFIG, max_batch_size=1, max_num_tokens=16, max_seq_len=256,
                max_tokens_in_paged_kv_cache=512),
        planner=lambda s: plan(s, policy),
    )  # fmt: skip
    gone = h.submit(tuple(n % 90 + 1 for n in range(200)), 10)
    h.step()
    h.coordinator.cancel(gone, h.now)
    assert h.end_of(gone) is EndReason.CANCELLED
    newcomer = h.submit((5,), 4)
    while h.state(gone) is S.PREFILLING:
        assert h.state(newcomer) is S.WAITING  # not parked in the engine's queue
        assert h.executor.batcher.num_queued == 0
        h.step()
    h.run_to_empty()
    h.expect_whole(newcomer, (5,), 4)
    h.expect_nothing_left()


class PickyExecutor(SteppedExecutor):
    """Refuses any call that carries a prompt with token 66, before taking anything of it."""

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if any(66 in request.input_token_ids for request in requests):
            raise EngineError("a message may not hold token 66")
        return super().enqueue_requests(requests)


def test_a_request_that_the_engine_refuses_does_not_end_those_started_with_it() -> None:
    h = Harness(executor_type=PickyExecutor)
    first = h.submit(PROMPT, 20)
    for _ in range(5):
        h.step()
    h.pause(first)
    h.step()
    assert h.state(first) is S.PREEMPTED
    bad, good = h.submit((66,), 5), h.submit((7,), 5)
    h.run_to_empty()
    assert h.end_of(bad) is EndReason.ERROR
    assert "token 66" in (h.events_of(bad)[-1].error or "")
    h.expect_whole(first, PROMPT, 20)
    h.expect_whole(good, (7,), 5)


def test_larger_than_the_pool_is_refused_at_once() -> None:
    h = Harness(replace(CONFIG, max_seq_len=4096))
    handle = h.submit(PROMPT, 4000)
    event = h.events_of(handle)[0]
    assert event.end is EndReason.ERROR
    assert not event.retryable
    assert "max_tokens" in (event.error or "")
    assert len(h.coordinator.table) == 0


def test_what_waits_in_the_engines_queue_counts_as_waiting() -> None:
    h = Harness(
        replace(CONFIG, max_batch_size=8, max_tokens_in_paged_kv_cache=64, max_seq_len=64),
        planner=lambda s: plan(s, FcfsReservePolicy()),
    )
    handles = [h.submit((n + 1,), 56) for n in range(4)]  # 14 of 16 blocks each: one at a time
    h.step()
    assert h.coordinator.num_queued_in_engine == 0  # they are active, without room
    assert h.executor.batcher.num_active == 4
    many = [h.submit((n + 10,), 8) for n in range(6)]
    h.step()
    h.step()
    assert h.coordinator.num_queued_in_engine == 2
    h.run_to_empty()
    for n, handle in enumerate(handles):
        h.expect_whole(handle, (n + 1,), 56)
    assert all(h.end_of(n) is EndReason.LENGTH for n in many)


def test_the_quantum_starts_with_the_first_token() -> None:
    h = Harness(replace(CONFIG, max_num_tokens=16))
    handle = h.submit(tuple(range(1, 40)), 10)
    h.step()
    h.step()
    while h.state(handle) is S.PREFILLING:
        h.step()
    assert h.coordinator.table.columns(h.now).running_since_time[0] == h.now


def test_after_a_lost_engine_no_block_counts_as_used() -> None:
    h = Harness()
    h.submit(PROMPT, 30)
    for _ in range(3):
        h.step()
    assert h.coordinator.num_free_blocks < h.coordinator.num_total_blocks
    h.coordinator.fail_all("gone", h.now)
    assert h.coordinator.num_free_blocks == h.coordinator.num_total_blocks
