"""Reported faults of waiting: queues, long prompts beside running streams, slots kept too long."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from perf.virtual.values import SimEngine, SimRequest
from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tests.scheduler.outcomes import Outcome, all_served, worst_stall_s
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.types import EndReason, SessionState


def request(arrival_time: float = 0.0, prompt: int = 40, max_tokens: int = 40, **fields):
    return SimRequest(
        arrival_time=arrival_time, num_prompt_tokens=prompt, max_tokens=max_tokens, **fields
    )


@pytest.mark.parametrize("policy", [TokenflowPolicy(), FcfsReservePolicy()])
def test_beyond_the_queue_limit_the_answer_comes_at_once(policy: Policy) -> None:
    """Reported: past the queue limit requests hang open instead of being refused.

    Four slots, a queue of 8 and 64 requests in one instant: 12 are served, 52 are refused in that
    instant, with a message to try again.
    """
    engine = SimEngine(max_batch_size=4, max_queue_size=8)
    run = Outcome([request(1.0, 30, 20) for _ in range(64)], engine, policy)
    ends = Counter(seq.end for seq in run.result.seqs)
    assert ends == {EndReason.LENGTH: 12, EndReason.ERROR: 52}
    for seq in run.result.seqs:
        if seq.end is EndReason.ERROR:
            assert seq.end_time == 1.0
            assert seq.retryable
            assert (seq.error or "").startswith("overloaded")


@pytest.mark.parametrize("policy", [TokenflowPolicy(), FcfsReservePolicy()])
def test_a_slot_is_free_when_the_last_token_is_generated_not_when_it_is_read(
    policy: Policy,
) -> None:
    """Reported: the model is done, but the host drains text for 30 s and keeps the slots taken.

    512 readers of 1 token/s and 200 tokens each on 64 slots: every end is told with its last token,
    no slot is empty while somebody waits, and the whole takes as long as the generation, a third
    more than the 200 s that one reader needs.
    """
    engine = SimEngine(max_batch_size=64, max_num_tokens=1024, num_total_blocks=512 * 8)
    run = Outcome(
        [request(prompt=30, max_tokens=200, read_rate=1.0) for _ in range(512)], engine, policy
    )
    assert all(seq.end_time == seq.token_times[-1] for seq in run.result.seqs)
    assert run.result.idle_slot_s <= 0.01 * run.result.busy_slot_s
    full_step_s = engine.step_base_s + 64 * engine.step_per_sequence_s
    assert max(q.end_time for q in run.result.seqs) <= 1.3 * 512 * 200 * full_step_s / 64
    assert all_served(run.result)


def test_a_newcomers_prefill_does_not_wait_for_a_running_stream() -> None:
    """Reported: a newcomer's prefill is put off until a running decode ends, a minute later.

    A stream of 1,500 tokens; 2 s later a prompt of 9,500. Its first token comes within twice its
    prefill time, and the stream's reader never has to wait.
    """
    engine = SimEngine(num_total_blocks=400)
    run = Outcome(
        [request(prompt=64, max_tokens=1500), request(2.0, 9500, 50, kind="long")], engine
    )
    assert run.ttft("long")[0] <= 2 * 9500 / engine.prefill_tokens_per_s
    assert worst_stall_s(run.result) == 0.0


def test_chunks_of_a_long_prompt_follow_each_other() -> None:
    """Reported: chunked prefill computes one chunk, then waits until the decode batch is empty.

    Four streams of 400 tokens; at 6 s a prompt of 10,000 tokens in 19 chunks: one chunk per second
    at least, and nobody stalls.
    """
    engine = SimEngine(num_total_blocks=400, max_num_tokens=544 + 7)
    streams = [request(prompt=64, max_tokens=400) for _ in range(4)]
    run = Outcome([*streams, request(6.0, 10_000, 50, kind="long")], engine, watch=True)
    first_token_time = 6.0 + run.ttft("long")[0]
    chunk_times = [time for time in run.step_times(5) if time < first_token_time]
    assert len(chunk_times) in (19, 20)
    assert chunk_times[0] <= 7.0
    assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(chunk_times))
    assert worst_stall_s(run.result) == 0.0


def test_one_that_arrives_while_everything_is_paused_is_not_forgotten() -> None:
    """Reported: a request that arrives between pause and resume is parked, and blocks the drain.

    All slots are paused and planning is held; z arrives; everything goes on. z runs to its end, and
    the trace says how long it waited for its place.
    """
    h = Harness(CONFIG)
    planner = h.planner
    assert isinstance(planner, ChosenPlanner)
    prompts = [(1, 2, i) for i in range(3)]
    handles = [h.submit(prompt, 20) for prompt in prompts]
    for _ in range(3):
        h.step()
    planner.hold = True
    for handle in handles:
        h.pause(handle)
    h.step()
    assert [h.state(handle) for handle in handles] == [SessionState.PREEMPTED] * 3
    arrival_time = h.now
    z = h.submit((9, 9, 9), 10, request_id="z")
    for _ in range(5):
        h.step()
    assert h.state(z) is SessionState.WAITING
    planner.hold = False
    h.run_to_empty()
    for handle, prompt in zip(handles, prompts, strict=True):
        h.expect_whole(handle, prompt, 20)
    h.expect_whole(z, (9, 9, 9), 10)
    (admitted,) = [event for event in h.tracer.named("admit") if event["request_id"] == "z"]
    (arrived,) = [event for event in h.tracer.named("arrival") if event["request_id"] == "z"]
    assert arrived["time"] == arrival_time
    assert admitted["time"] - arrived["time"] >= 5 * 0.05 - 1e-9
    h.expect_nothing_left()


def test_one_that_arrives_while_clients_hold_everything_takes_the_free_room() -> None:
    """The same with holds of the clients: the slots are free, so z does not wait at all."""
    h = Harness(CONFIG)
    prompts = [(1, 2, i) for i in range(3)]
    handles = [h.submit(prompt, 20) for prompt in prompts]
    for _ in range(3):
        h.step()
    for handle in handles:
        h.coordinator.hold(handle, h.now)
    h.step()
    z = h.submit((9, 9, 9), 10)
    for _ in range(12):
        h.step()
    h.expect_whole(z, (9, 9, 9), 10)
    for handle in handles:
        h.coordinator.release(handle, h.now)
    h.run_to_empty()
    for handle, prompt in zip(handles, prompts, strict=True):
        h.expect_whole(handle, prompt, 20)
    h.expect_nothing_left()
