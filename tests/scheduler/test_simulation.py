"""The whole server in virtual time: first tokens at once, nobody stalls, throughput kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult
from perf.virtual.workloads import demo, machines, sustained
from tests.scheduler.outcomes import MAX_UTIL, throughput_ratio, ttft, worst_stall_s
from tokenflow.metrics import stalls, ttft_s
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import EndReason

DEFAULT = SimEngine()


def simulate(requests: Sequence[SimRequest], engine: SimEngine, policy: Policy) -> SimResult:
    result = Simulation(requests, lambda snap: plan(snap, policy), engine).run()
    assert [len(q.token_times) for q in result.seqs] == [q.request.max_tokens for q in result.seqs]
    return result


_remembered = functools.lru_cache(maxsize=None)(simulate)


def run(requests: list[SimRequest], engine: SimEngine = DEFAULT) -> SimResult:
    return _remembered(tuple(requests), engine, TokenflowPolicy())


def fcfs(requests: list[SimRequest], engine: SimEngine = DEFAULT) -> SimResult:
    return _remembered(tuple(requests), engine, FcfsReservePolicy())


def test_events_inside_a_step_have_their_own_instants_and_act_at_its_end() -> None:
    """Steps of 0.1 s, responses 0.01 s later; the second request comes 0.04 s into the first step.

    Its first token takes the second step, and the answer to the first ends in the fourth.
    """
    engine = SimEngine(
        step_base_s=0.1,
        step_per_sequence_s=0.0,
        step_per_context_token_s=0.0,
        prefill_tokens_per_s=1e9,
        response_delays_s=(0.01,),
    )
    requests = [
        SimRequest(arrival_time=at, num_prompt_tokens=30, max_tokens=4) for at in (0.0, 0.04)
    ]
    for result in (run(requests, engine), fcfs(requests, engine)):
        first, second = (q.token_times for q in result.seqs)
        np.testing.assert_allclose(first, [0.11, 0.21, 0.31, 0.41], atol=1e-6)
        np.testing.assert_allclose(second, [0.21, 0.31, 0.41, 0.51], atol=1e-6)


def test_answers_that_end_before_their_limits() -> None:
    """The burst of the demo, but every request names four times as much as its answer has."""
    usual = demo(seed=1)
    requests = [dataclasses.replace(r, limit_tokens=4 * r.max_tokens) for r in usual]
    pool = dataclasses.replace(DEFAULT, capacity_policy=MAX_UTIL)
    result = run(requests, pool)
    assert {q.end for q in result.seqs} == {EndReason.STOP}
    assert result.num_pauses > 10
    assert ttft(result, 100) <= 1.0
    assert worst_stall_s(result) == 0.0
    assert {q.end for q in run(usual, pool).seqs} == {EndReason.LENGTH}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_burst(seed: int) -> None:
    result, baseline = run(demo(seed=seed)), fcfs(demo(seed=seed))
    assert ttft(result, 50) <= 0.8
    assert ttft(result, 100) <= 1.0
    assert ttft(baseline, 100) > 10.0
    assert worst_stall_s(result) == 0.0
    assert throughput_ratio(result, baseline) >= 0.97
    assert result.num_forced == result.num_internal_pauses == 0
    assert result.num_pauses <= 2.5 * 24  # about one and a half round trips a stream
    # The batch is full whenever somebody waits, under both policies.
    assert result.idle_slot_s <= 0.01 * result.busy_slot_s
    assert baseline.idle_slot_s <= 0.01 * baseline.busy_slot_s
    # A paused stream finds its KV again.
    assert result.num_recomputed_tokens <= 0.02 * sum(
        q.request.num_prompt_tokens + q.request.max_tokens for q in result.seqs
    )


def test_a_burst_at_the_limit_of_the_capacity() -> None:
    requests = demo(num_newcomers=24)
    result, baseline = run(requests), fcfs(requests)
    assert ttft(result, 50) <= 1.0
    assert ttft(result, 100) <= 0.4 * ttft(baseline, 100)
    assert worst_stall_s(result) == 0.0
    assert throughput_ratio(result, baseline) >= 0.95


def test_a_burst_of_fast_readers_beyond_the_capacity() -> None:
    result, baseline = run(demo(rate=6.0)), fcfs(demo(rate=6.0))
    assert ttft(result, 50) <= 1.0
    assert ttft(result, 100) <= 0.4 * ttft(baseline, 100)
    assert worst_stall_s(result) == 0.0
    assert throughput_ratio(result, baseline) >= 0.95


def test_unread_text_carries_a_burst_beyond_the_capacity() -> None:
    """Two thirds of the speed: all together read 1.1 times what the engine writes, for a while."""
    engine = SimEngine(step_factors=(1.5,))
    result, baseline = run(demo(), engine), fcfs(demo(), engine)
    assert ttft(result, 100) <= 0.1 * ttft(baseline, 100)
    assert worst_stall_s(result) == 0.0
    assert throughput_ratio(result, baseline) >= 0.95


def test_an_engine_of_half_the_speed_lets_newcomers_wait_but_nobody_stall() -> None:
    engine = SimEngine(step_factors=(2.0,))
    result, baseline = run(demo(), engine), fcfs(demo(), engine)
    assert worst_stall_s(result) == 0.0
    assert ttft(result, 100) <= 0.5 * ttft(baseline, 100)
    assert throughput_ratio(result, baseline) >= 0.95


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_slower_engines_and_other_bursts(factor: float, seed: int) -> None:
    engine = SimEngine(step_factors=(factor,))
    result, baseline = run(demo(seed=seed), engine), fcfs(demo(seed=seed), engine)
    assert worst_stall_s(result) == 0.0
    assert ttft(result, 50) <= (0.8 if factor == 1.5 else 0.25 * ttft(baseline, 50))
    assert ttft(result, 100) <= 0.5 * ttft(baseline, 100)
    assert throughput_ratio(result, baseline) >= 0.94


@pytest.mark.parametrize("num_total_blocks", [128, 64])
def test_max_utilization(num_total_blocks: int) -> None:
    engine = SimEngine(capacity_policy=MAX_UTIL, num_total_blocks=num_total_blocks)
    result, baseline = run(demo(), engine), fcfs(demo(), engine)
    assert ttft(result, 100) <= 1.0
    assert worst_stall_s(result) == 0.0
    assert result.num_forced == result.num_internal_pauses == 0
    assert throughput_ratio(result, baseline) >= 0.95


def test_a_pool_that_binds_before_the_slots() -> None:
    engine = SimEngine(capacity_policy=MAX_UTIL, num_total_blocks=48, max_batch_size=16)
    result, baseline = run(demo(), engine), fcfs(demo(), engine)
    assert baseline.num_internal_pauses > 0
    assert result.num_internal_pauses == 0
    assert worst_stall_s(baseline) > 1.0
    assert worst_stall_s(result) <= 0.25
    assert ttft(result, 100) <= 0.2 * ttft(baseline, 100)


@pytest.mark.parametrize("every", [1, 2])
def test_machines_yield_and_come_back(every: int) -> None:
    requests = machines(demo(), every)
    policy = TokenflowPolicy()
    result, baseline = run(requests), fcfs(requests)
    assert ttft(result, 50) <= 1.0
    assert ttft(result, 100) <= (0.3 if every == 1 else 0.25) * ttft(baseline, 100)
    assert worst_stall_s(result) == 0.0
    assert max(q.num_pauses for q in result.seqs) <= policy.max_machine_pauses
    assert throughput_ratio(result, baseline) >= 0.9


def test_classes_shift_the_order_and_keep_the_low_ones_from_stalling() -> None:
    requests = [
        dataclasses.replace(r, priority=(0.1, 0.9)[i % 2]) for i, r in enumerate(sustained(1.5))
    ]
    result = run(requests)
    high = [
        ttft_s(s)
        for s, q in zip(result.streams(), result.seqs, strict=True)
        if q.request.priority > 0.5
    ]
    low = [
        ttft_s(s)
        for s, q in zip(result.streams(), result.seqs, strict=True)
        if q.request.priority < 0.5
    ]
    assert sum(high) / len(high) < 0.7 * sum(low) / len(low)
    assert worst_stall_s(result) <= 0.25


@pytest.mark.parametrize("arrivals_per_s", [0.5, 0.7, 1.5])
def test_sustained_load_never_ends_in_thrashing(arrivals_per_s: float) -> None:
    """Below, at and far above the capacity: no stall, no throughput lost, nobody waits for ever."""
    requests = sustained(arrivals_per_s)
    result, baseline = run(requests), fcfs(requests)
    assert worst_stall_s(result) <= 0.25
    assert throughput_ratio(result, baseline) >= 0.95
    assert ttft(result, 50) <= ttft(baseline, 50)
    assert ttft(result, 100) <= 1.1 * ttft(baseline, 100) + 1.0


def test_a_lasting_overload_of_a_slow_engine_stalls_nobody() -> None:
    """Twice what the engine can write, for minutes: later newcomers wait, as they do under fcfs."""
    engine = SimEngine(step_factors=(2.0,))
    for seed in (1, 2):
        requests = sustained(0.5, seed=seed)
        result, baseline = run(requests, engine), fcfs(requests, engine)
        assert worst_stall_s(result) <= 0.25
        assert throughput_ratio(result, baseline) >= 0.95
        assert ttft(result, 50) <= ttft(baseline, 50)


def test_a_big_newcomer_gets_its_turn_among_many_small_ones() -> None:
    small = sustained(0.6, num=60)
    big = SimRequest(
        arrival_time=8.0, num_prompt_tokens=3200, max_tokens=64, read_rate=4.0, kind="big"
    )
    result = run([*small, big])
    assert ttft_s(result.streams("big")[0]) <= 20.0
    assert worst_stall_s(result) <= 0.25


def test_kinds_that_cannot_be_paused_leave_room_for_others() -> None:
    fixed = [
        dataclasses.replace(r, pausable=i >= 8, arrival_time=r.arrival_time)
        for i, r in enumerate(demo())
    ]
    result = run(fixed)
    assert ttft(result, 50) <= 1.5
    assert worst_stall_s(result) == 0.0


def test_hiccups_of_the_engine_do_not_turn_into_visible_stalls() -> None:
    """Steps vary by a tenth and every sixtieth takes six times as long (0.35 s)."""
    factors = tuple((0.9, 1.0, 1.1)[i % 3] * (6.0 if i % 60 == 59 else 1.0) for i in range(180))
    engine = SimEngine(step_factors=factors)
    for seed in (1, 2, 3):
        result, baseline = run(demo(seed=seed), engine), fcfs(demo(seed=seed), engine)
        found = [stall for s in result.streams() for stall in stalls(s)]
        # A slow step that meets somebody's very first tokens is felt under any policy.
        assert max((s.duration_s for s in found if s.token_index > 4), default=0.0) == 0.0
        assert worst_stall_s(result) <= 0.4
        assert ttft(result, 100) <= 1.5
        assert throughput_ratio(result, baseline) >= 0.95


def test_same_run_twice_is_the_same() -> None:
    first, second = (simulate(demo(), DEFAULT, TokenflowPolicy()) for _ in range(2))
    for a, b in zip(first.seqs, second.seqs, strict=True):
        np.testing.assert_array_equal(a.token_times, b.token_times)
