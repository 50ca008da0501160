"""What no schedule can do better, by hand and against what policies reach."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_engines.model_shapes import LLAMA3_8B
from perf.lab.bounds import prefill_bound_s, raw_throughput_bound
from perf.lab.gpus import H200
from perf.lab.roofline import RooflineCosts, StepTotals, prefill_totals, sim_engine
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimRequest
from tokenflow.metrics import raw_throughput
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.scheduler import plan

COSTS = RooflineCosts(H200, LLAMA3_8B)


def test_the_engine_runs_a_burst_and_first_tokens_keep_the_bound():
    engine = sim_engine(H200, LLAMA3_8B, memory_fraction=0.3, max_batch_size=64)
    requests = [
        SimRequest(arrival_time=0.01 * i, num_prompt_tokens=500 + i, max_tokens=8)
        for i in range(40)
    ]
    policy = FcfsReservePolicy()
    result = Simulation(requests, lambda snapshot: plan(snapshot, policy), engine).run()
    ttfts = [q.token_times[0] - q.request.arrival_time for q in result.seqs]
    bound = prefill_bound_s(
        COSTS, [r.num_prompt_tokens for r in requests], [r.arrival_time for r in requests]
    )
    assert bound.mean_s <= sum(ttfts) / len(ttfts) < 2 * bound.mean_s
    assert bound.p99_s <= max(ttfts) < 2 * bound.p99_s


def test_the_prefill_bound_by_hand():
    def seconds(*parts):
        read = pairs = ended = 0
        for start, num, is_end in parts:
            one = prefill_totals(num, start)
            read, pairs = read + one.num_context_tokens_read, pairs + one.attention_pairs
            ended += is_end
        num_tokens = sum(num for _, num, _ in parts)
        return COSTS.step_s(StepTotals(0, read, num_tokens, pairs, ended))

    first = seconds((0, 600, True), (0, 400, False))
    second = seconds((400, 200, True))
    bound = prefill_bound_s(COSTS, [600, 600], [0.0, 0.0], max_num_tokens=1000)
    assert bound.mean_s == pytest.approx((first + first + second) / 2)
    assert bound.p99_s == pytest.approx(first + second)
    apart = prefill_bound_s(COSTS, [600, 600], [9.0, 0.0])
    assert apart.mean_s == pytest.approx(seconds((0, 600, True)))
    with pytest.raises(ValueError, match="token"):
        prefill_bound_s(COSTS, [0], [0.0])


def ask(prompt: int, answer: int, arrival_time: float = 0.0, **fields) -> SimRequest:
    return SimRequest(
        arrival_time=arrival_time, num_prompt_tokens=prompt, max_tokens=answer, **fields
    )


def test_the_raw_bound_of_one_answer_is_what_it_takes():
    engine = sim_engine(H200, LLAMA3_8B)
    seconds = COSTS.step_s(prefill_totals(64))
    seconds += sum(COSTS.decode_s(1, 64 + done) for done in range(1, 200))
    bound = raw_throughput_bound(COSTS, engine, [ask(64, 200, arrival_time=5.0)])
    assert bound == pytest.approx(200 / seconds)
    long = raw_throughput_bound(COSTS, engine, [ask(6400, 200)])  # prefill beside all that is read
    assert bound > long > 200 / (seconds + COSTS.step_s(prefill_totals(6400)))
    late = raw_throughput_bound(COSTS, engine, [ask(600, 3), ask(600, 3, arrival_time=40.0)])
    assert late == pytest.approx(6 / 40, rel=0.01)


def test_a_small_pool_needs_more_steps_to_read_as_much():
    requests = [ask(1000, 200) for _ in range(40)]
    large = sim_engine(H200, LLAMA3_8B)
    small = dataclasses.replace(large, num_total_blocks=10 * 1200 // 32)
    few_slots = dataclasses.replace(large, max_batch_size=10)
    bounds = [raw_throughput_bound(COSTS, e, requests) for e in (large, small, few_slots)]
    assert bounds[0] > 2 * bounds[1]
    assert bounds[0] > 2 * bounds[2]


@pytest.mark.parametrize(
    "unknown", [{"num_shared_tokens": 32}, {"num_history_tokens": 9}, {"cancel_after_s": 1.0}]
)
def test_the_raw_bound_is_not_known_where_blocks_are_shared_or_clients_leave(unknown):
    engine = sim_engine(H200, LLAMA3_8B)
    assert raw_throughput_bound(COSTS, engine, [ask(64, 8), ask(64, 8, **unknown)]) is None


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(16, 400), st.integers(1, 60)), min_size=1, max_size=24),
    gap_s=st.sampled_from([0.0, 0.002, 0.05]),
    num_blocks=st.integers(16, 80),
    capacity_policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    policy=st.sampled_from([FcfsReservePolicy(), TokenflowPolicy()]),
)
def test_no_policy_makes_more_than_the_raw_bound(
    lengths, gap_s, num_blocks, capacity_policy, policy
):
    engine = dataclasses.replace(
        sim_engine(H200, LLAMA3_8B, max_batch_size=8, capacity_policy=capacity_policy),
        num_total_blocks=num_blocks,
    )
    requests = [ask(*length, arrival_time=gap_s * i) for i, length in enumerate(lengths)]
    result = Simulation(requests, lambda snapshot: plan(snapshot, policy), engine).run()
    bound = raw_throughput_bound(COSTS, engine, requests)
    assert raw_throughput(result.streams()) <= bound * (1 + 1e-9)
