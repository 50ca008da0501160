"""Reported faults of memory: pools that are too small for everybody at once."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from perf.virtual.values import SimEngine, SimRequest, SimResult
from tests.core.harness import CONFIG, Harness
from tests.scheduler.outcomes import (
    MAX_UTIL,
    NO_EVICT,
    Outcome,
    all_served,
    throughput_ratio,
    worst_stall_s,
)
from tokenflow.metrics import percentile, share_with_visible_stall, ttft_s
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, SessionState, Snapshot

POLICIES = [NO_EVICT, MAX_UTIL]
S = SessionState


def request(arrival_time: float = 0.0, prompt: int = 40, max_tokens: int = 40, **fields):
    return SimRequest(
        arrival_time=arrival_time, num_prompt_tokens=prompt, max_tokens=max_tokens, **fields
    )


@pytest.mark.parametrize("policy", [TokenflowPolicy(), FcfsReservePolicy()])
@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_outputs_are_whole_on_a_pool_that_is_too_small(
    policy: Policy, capacity_policy: str
) -> None:
    """Reported: the output of a preempted request is incomplete.

    256 tokens of KV, six requests of 20 + 100 tokens at once: each gets the 100 tokens that it gets
    alone, with their log-probs and counts.
    """
    config = dataclasses.replace(
        CONFIG,
        max_batch_size=6,
        tokens_per_block=32,
        max_tokens_in_paged_kv_cache=256,
        max_num_tokens=96,
        max_seq_len=128,
        batch_scheduler_policy=capacity_policy,
    )
    h = Harness(config, planner=lambda snapshot: plan(snapshot, policy))
    prompts = [tuple((7 * i + k) % 97 for k in range(20)) for i in range(6)]
    handles = [h.submit(prompt, 100, read_rate=4.0) for prompt in prompts]
    h.run_to_empty()
    for handle, prompt in zip(handles, prompts, strict=True):
        h.expect_whole(handle, prompt, 100)
    counters = h.coordinator.counters
    assert counters.num_pauses + counters.num_internal_pauses > 0 or policy == FcfsReservePolicy()
    h.expect_nothing_left()


@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_no_request_is_preempted_again_and_again(capacity_policy: str) -> None:
    """Reported: a request is resumed and preempted at each step, and throughput falls.

    256 tokens of KV, three requests of 40 + 80 tokens (360 > 256) and no further arrivals: at most
    one pause per ten tokens, and all are done in at most 1.5 times their times alone.
    """
    engine = SimEngine(num_total_blocks=8, capacity_policy=capacity_policy)
    alone_s = Outcome([request(max_tokens=80)], engine).result.seqs[0].end_time
    run = Outcome([request(max_tokens=80) for _ in range(3)], engine)
    assert max(run.num_pauses()) <= 80 // 10
    assert run.result.num_internal_pauses == 0
    assert max(seq.end_time for seq in run.result.seqs) <= 1.5 * 3 * alone_s
    assert all_served(run.result)


def over_subscribed(read_rate: float, prompt: int = 32) -> tuple[SimRequest, ...]:
    """128 requests of 512 tokens at once."""
    return (request(prompt=prompt, max_tokens=512, read_rate=read_rate),) * 128


def third_of_the_pool(capacity_policy: str, prompt: int = 32, **costs: float) -> SimEngine:
    """Slots for all, and blocks for a third of them."""
    return SimEngine(
        max_batch_size=128,
        max_num_tokens=640,
        num_total_blocks=128 * ((prompt + 512) // 32) // 3,
        capacity_policy=capacity_policy,
        **costs,
    )


@functools.cache
def without_pauses(requests: tuple[SimRequest, ...], engine: SimEngine) -> SimResult:
    """The baseline: run to completion with full reservation."""
    engine = dataclasses.replace(engine, capacity_policy=NO_EVICT)
    return Outcome(requests, engine, FcfsReservePolicy()).result


def median_ttft_s(result: SimResult) -> float:
    return percentile((ttft_s(s) for s in result.streams()), 50)


@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_three_times_as_many_as_the_pool_holds(capacity_policy: str) -> None:
    """Reported: under over-subscription preemption brings first tokens early, but 40 % less output
    and gaps nine times as long.

    Readers of 2 tokens/s, 0.9 of what the engine without pauses writes: at least 95 % of its output
    rate, and nobody stalls.
    """
    requests, engine = over_subscribed(2.0), third_of_the_pool(capacity_policy)
    run = Outcome(requests, engine).result
    baseline = without_pauses(requests, engine)
    assert throughput_ratio(run, baseline) >= 0.95
    assert worst_stall_s(run) == 0.0
    assert median_ttft_s(run) <= 0.1 * median_ttft_s(baseline)
    assert run.num_forced == run.num_internal_pauses == 0
    assert all_served(run)


@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_three_times_as_many_as_the_pool_holds_and_twice_what_can_be_written(
    capacity_policy: str,
) -> None:
    """The same with readers of 4 tokens/s, 1.8 times what the engine writes: some must wait, those
    who started do not pay for it."""
    requests, engine = over_subscribed(4.0), third_of_the_pool(capacity_policy)
    run = Outcome(requests, engine).result
    baseline = without_pauses(requests, engine)
    assert throughput_ratio(run, baseline) >= 0.95
    assert share_with_visible_stall(run.streams()) == 0.0
    assert median_ttft_s(run) <= 0.5 * median_ttft_s(baseline)


ACCELERATOR = {
    "step_base_s": 0.006,
    "step_per_sequence_s": 2e-5,
    "step_per_context_token_s": 8e-9,
    "prefill_tokens_per_s": 20_000.0,
}


@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_an_engine_that_decodes_fast_and_recomputes_slowly(capacity_policy: str) -> None:
    """The same on an accelerator: a turn is short, what a resume must compute again is not.

    Prompts of 512 tokens, readers of 10 tokens/s, a third of what the engine writes. Turns of
    thirty tokens with 700 to recompute would end in nothing but prefill.
    """
    requests = over_subscribed(10.0, prompt=512)
    engine = third_of_the_pool(capacity_policy, prompt=512, **ACCELERATOR)
    run = Outcome(requests, engine).result
    baseline = without_pauses(requests, engine)
    assert throughput_ratio(run, baseline) >= 0.85
    assert share_with_visible_stall(run.streams()) <= 0.02
    assert max(q.num_pauses for q in run.seqs) <= 6
    assert median_ttft_s(run) <= 0.5 * median_ttft_s(baseline)


@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_a_huge_max_tokens_blocks_nobody(capacity_policy: str) -> None:
    """Reported: one request with a huge max_tokens blocks all others, by its reservation.

    12,000 tokens of KV; A may write 11,000 and its reservation leaves 100. B and C come a second
    later and have their first tokens within a second.
    """
    engine = SimEngine(num_total_blocks=375, capacity_policy=capacity_policy)
    short = [request(1.0, 100, 50, kind="short", read_rate=4.0) for _ in range(2)]
    # A leaves in the end: nobody has to watch 11,000 tokens.
    run = Outcome([request(prompt=900, max_tokens=11_000, cancel_after_s=30.0), *short], engine)
    assert max(run.ttft("short")) < 1.0
    assert worst_stall_s(run.result) == 0.0
    assert [len(q.token_times) for q in run.result.seqs[1:]] == [50, 50]


class PauseBothFirst:
    """Runs A and B one after the other up to some length and pauses them. Then, in one instant,
    both come back: together, or as the product plans.
    """

    def __init__(self, lengths: tuple[int, int], *, together: bool) -> None:
        self._lengths = lengths
        self._together = together
        self.both_paused = False

    def __call__(self, snapshot: Snapshot) -> Decision:
        s = snapshot.sessions
        self.both_paused = self.both_paused or s.state.tolist() == [S.PREEMPTED] * 2
        if self.both_paused and self._together:
            return Decision(resume=tuple(s.slot[s.state == S.PREEMPTED].tolist()))
        if self.both_paused:
            return plan(snapshot, TokenflowPolicy())
        for i, length in enumerate(self._lengths):
            slot = (int(s.slot[i]),)
            if s.state[i] == S.WAITING:
                return Decision(admit=slot)
            if s.state[i] == S.RUNNING and s.num_prompt_tokens[i] + s.num_generated[i] >= length:
                return Decision(pause=slot)
            if s.state[i] != S.PREEMPTED:
                break
        return Decision()


@pytest.mark.parametrize("together", [True, False], ids=["enqueued together", "as planned"])
@pytest.mark.parametrize("capacity_policy", POLICIES)
def test_two_resumes_do_not_block_each_other(capacity_policy: str, together: bool) -> None:
    """Reported: two resumes hold a part of the pool each and wait for the other's for ever.

    512 tokens of KV; A of 400 and B of 300 tokens are paused and come back in the same instant.
    Both end, and the engine is never without work for a second.
    """
    config = dataclasses.replace(
        CONFIG,
        max_batch_size=4,
        tokens_per_block=32,
        max_tokens_in_paged_kv_cache=512,
        max_num_tokens=128,
        max_seq_len=512,
        batch_scheduler_policy=capacity_policy,
    )
    planner = PauseBothFirst((400, 300), together=together)
    h = Harness(config, planner)
    prompts, lengths = ((1,) * 100, (2,) * 100), (320, 220)
    handles = [h.submit(p, n, read_rate=4.0) for p, n in zip(prompts, lengths, strict=True)]
    idle_s = longest_idle_s = 0.0
    while len(h.coordinator.table):
        h.step()
        idle_s = 0.0 if h.executor.batcher.kv.num_used_blocks else idle_s + 0.05
        longest_idle_s = max(longest_idle_s, idle_s)
        assert h.now < 120.0
    assert planner.both_paused
    assert longest_idle_s <= 1.0
    for handle, prompt, length in zip(handles, prompts, lengths, strict=True):
        h.expect_whole(handle, prompt, length)
    h.expect_nothing_left()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", [TokenflowPolicy(), FcfsReservePolicy()])
def test_several_long_prompts_at_once_are_served(policy: Policy, chunked: bool) -> None:
    """Reported: several legal long prompts at once crash the engine instead of queueing.

    8,192 tokens fit in an iteration; six prompts of 3,000 tokens come within 10 ms.
    """
    engine = SimEngine(
        num_total_blocks=600,
        max_num_tokens=8192,
        max_seq_len=4096,
        enable_chunked_context=chunked,
    )
    run = Outcome([request(0.002 * i, 3000, 50) for i in range(6)], engine, policy)
    assert all_served(run.result)
    assert max(run.ttft("reader")) <= 6 * 3000 / engine.prefill_tokens_per_s + 1.0
