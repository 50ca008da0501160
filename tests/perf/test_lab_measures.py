"""Records of runs: each measure by hand, what readers waited for, and how fast it is."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.lab.measures import Effort, Load, Record, deterministic, measure
from perf.lab.timeline import Cause, Timeline, on_grid, stall_causes
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult, SimSeq
from perf.virtual.workloads import demo, machines
from tokenflow import metrics
from tokenflow.answers import Counters
from tokenflow.metrics import Stream
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import EndReason

LOAD = Load(
    ttft_bound_mean_s=0.5, ttft_bound_p99_s=1.0, raw_bound=90.0, sum_rate=20.0, capacity=40.0
)
EFFORT = Effort(num_plans=7, plan_wall_s=0.01, wall_s=2.0)


def seq(times: list[float], *, arrival: float = 0.0, rate: float | None = 2.0, **more) -> SimSeq:
    request = SimRequest(
        arrival_time=arrival, num_prompt_tokens=4, max_tokens=len(times), read_rate=rate
    )
    return SimSeq(request, token_times=times, **{"end": EndReason.LENGTH, **more})


def test_a_record_by_hand() -> None:
    counters = Counters(num_offloads_completed=3, num_onboards_completed=2)
    counters.offload_s, counters.onboard_s, counters.copy_wait_s = 3.0, 1.0, 1.0
    result = SimResult(
        seqs=[
            seq([1.0, 1.0, 1.5, 4.0]),  # wanted at 2.5 (read 1.0, 1.5, 2.0): waits 2.0 s for it
            seq([2.0, 2.5, 3.1, 3.6], arrival=1.0),  # waits 0.1 s once
            seq([3.0, 5.0], arrival=1.0, rate=None),
            seq([], arrival=1.0, end=EndReason.CANCELLED),
        ],
        num_pauses=5,
        num_forced=2,
        num_internal_pauses=1,
        num_recomputed_tokens=9,
        counters=counters,
        num_host_blocks_peak=6,
    )
    result.seqs[0].token_times[3] = 4.5
    record = measure(result, Timeline(), LOAD, EFFORT, block_bytes=100)
    streams = result.streams()
    assert record["num_requests"] == 4
    assert (record["num_completed"], record["num_cancelled"], record["num_failed"]) == (3, 1, 0)
    assert record["num_without_token"] == 1
    assert record["ttft_mean_s"] == pytest.approx((1.0 + 1.0 + 2.0) / 3)
    assert (record["ttft_p50_s"], record["ttft_p99_s"], record["ttft_worst_s"]) == (1.0, 2.0, 2.0)
    assert record["ttft_mean_low_s"] <= record["ttft_mean_s"] <= record["ttft_mean_high_s"]
    assert record["tbt_p50_s"] == pytest.approx(0.5)  # 0.5, 0.5 and 2.5 s; 0.5, 0.6 and 0.5 s
    assert record["tbt_p99_s"] == pytest.approx(2.5)
    assert record["end_to_end_mean_s"] == pytest.approx((4.5 + 2.6 + 4.0) / 3)
    assert (record["virtual_s"], record["virtual_per_wall_s"]) == (5.0, 2.5)
    assert record["raw_throughput"] == pytest.approx(10 / 5.0)
    assert record["effective_throughput"] == metrics.effective_throughput(streams)
    assert record["goodput"] == 0.0  # nobody began within half a second
    assert record["qos"] == pytest.approx(metrics.qos(streams[:3]))
    assert record["qoe_mean"] == pytest.approx(
        sum(map(metrics.qoe, [*streams[:2], streams[3]])) / 3
    )
    assert (record["num_readers"], record["num_stalls"]) == (3, 1)
    assert record["share_stalled"] == pytest.approx(1 / 3)
    assert record["stall_s"] == record["stall_worst_s"] == pytest.approx(2.0)
    assert record["rebuffer_s"] == pytest.approx(2.0 + 0.1)
    assert (record["num_planned_pauses"], record["num_forced_pauses"]) == (3, 2)
    assert (record["num_internal_pauses"], record["num_recomputed_tokens"]) == (1, 9)
    assert (record["offload_bytes"], record["onboard_bytes"]) == (300, 200)
    assert (record["hidden_copy_share"], record["host_peak_bytes"]) == (0.75, 600)
    assert (record["load"], record["is_schedulable"], record["num_plans"]) == (0.5, True, 7)
    json.dumps(record, allow_nan=False)


def test_nothing_received_is_none_not_nan() -> None:
    result = SimResult(seqs=[seq([], end=EndReason.ERROR)])
    record = measure(result, Timeline(), LOAD, EFFORT, block_bytes=1)
    assert record["ttft_p99_s"] is record["tbt_p99_s"] is None
    assert record["end_to_end_mean_s"] is None
    assert record["num_failed"] == 1
    json.dumps(record, allow_nan=False)


# Each case: events of the trace beside a reader of 2 tokens/s who got tokens at 0 and 0.1 and waits
# from 1.0 (it read the second one at 0.5) to 3.0.
CASES = {
    "paused, no resume in time": (
        [("pause", 0.2), ("resume", 1.1), ("resumed", 3.0)],
        [],
        Cause.PAUSE,
    ),
    "paused for good": ([("pause", 0.2)], [], Cause.PAUSE),
    "resumed in time, came late": (
        [("pause", 0.2), ("resume", 0.9), ("resumed", 3.0)],
        [1.0, 2.0, 3.0],
        Cause.LATE_RESUME,
    ),
    "an older pause is not to blame": (
        [("pause", 0.02), ("resume", 0.03), ("resumed", 0.1)],
        [3.0],
        Cause.ENGINE_STEP,
    ),
    "a pause after it is not to blame": ([("pause", 3.0)], [3.0], Cause.ENGINE_STEP),
    "one long step": ([], [0.1, 3.0], Cause.ENGINE_STEP),
    "the engine went on without it": ([], [0.1, 1.5, 3.0], Cause.ENGINE_PAUSE),
    "a lease was renewed": (
        [("resume", 0.2), ("resumed", 3.0)],
        [3.0],
        Cause.ENGINE_STEP,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_reader_waited_for(name: str) -> None:
    events, step_ends, cause = CASES[name]
    timeline = Timeline()
    for event, at in events:
        timeline.record(event, at, request_id="1")
    for end in step_ends:
        iteration(timeline, end)
    stream = Stream(arrival_time=0.0, token_times=[0.0, 0.1, 3.0], read_rate=2.0)
    totals = stall_causes({"1": stream}, timeline)
    assert {c: t.num_stalls for c, t in totals.items()} == {c: int(c is cause) for c in Cause}
    assert totals[cause].stall_s == pytest.approx(2.0)


def iteration(timeline: Timeline, end_time: float, **counts: int) -> None:
    names = ("num_scheduled", "num_active", "num_waiting", "num_queued", "num_preempted")
    fields = dict(zip(names, (1, 1, 0, 0, 0), strict=True)) | counts
    timeline.record("iteration", end_time, latency_ms=100.0, **fields)


def test_steps_that_compute_nothing_are_none() -> None:
    timeline = Timeline()
    iteration(
        timeline, 1.0, num_scheduled=3, num_active=5, num_waiting=2, num_queued=1, num_preempted=4
    )
    iteration(timeline, 2.0, num_scheduled=0)
    assert (timeline.step_end_times, timeline.num_running) == ([1.0], [3])
    assert (timeline.num_waiting, timeline.num_paused) == ([2 + 1 + 2], [4])
    assert timeline.step_s == pytest.approx([0.1])


def test_a_value_holds_until_the_next_one() -> None:
    instants = np.array([0.5, 1.0, 1.9, 2.0, 9.0])
    assert on_grid([5, 7], [1.0, 2.0], instants).tolist() == [0, 5, 5, 7, 7]


def simulate(policy: Policy, engine: SimEngine, requests: list[SimRequest]) -> Record:
    timeline = Timeline()
    simulation = Simulation(requests, lambda s: plan(s, policy), engine, tracer=timeline)
    result = simulation.run()
    assert len(timeline.step_s) > 100
    assert sum(map(len, timeline.pauses.values())) == result.num_pauses
    return measure(result, timeline, LOAD, EFFORT, block_bytes=engine.block_bytes)


TIERED = SimEngine(num_total_blocks=40, num_host_blocks=64, capacity_policy="max_utilization")


def test_a_run_is_measured_the_same_twice_and_adds_up() -> None:
    requests = machines(demo(), every=5)
    records = [simulate(TokenflowPolicy(), TIERED, requests) for _ in range(2)]
    assert deterministic(records[0]) == deterministic(records[1])
    record = records[0]
    assert record["num_completed"] == len(requests)
    assert record["num_pauses"] > 0
    assert record["offload_bytes"] > 0
    assert 0 < record["host_peak_bytes"] <= 64 * TIERED.block_bytes
    assert record["num_stalls"] == sum(record[f"num_stalls_{cause.value}"] for cause in Cause)
    assert record["stall_s"] == pytest.approx(sum(record[f"stall_{c.value}_s"] for c in Cause))


def test_an_engine_that_pauses_by_itself_is_named() -> None:
    engine = dataclasses.replace(TIERED, num_total_blocks=30, num_host_blocks=0)
    record = simulate(FcfsReservePolicy(), engine, demo(num_newcomers=4))
    assert record["num_internal_pauses"] > 0
    assert record["num_stalls_engine_pause"] > 0
    assert record["num_stalls_pause"] == record["num_stalls_late_resume"] == 0


def test_a_slow_engine_is_named() -> None:
    engine = SimEngine(step_base_s=0.6)
    record = simulate(FcfsReservePolicy(), engine, demo(num_newcomers=2))
    assert record["num_stalls"] == record["num_stalls_engine_step"] > 0


def test_a_large_run_is_measured_within_a_second() -> None:
    rng = np.random.default_rng(1)
    gaps = rng.exponential(0.2, size=(400, 4096))  # 5 tokens/s for readers of 6: all of them wait
    result = SimResult(seqs=[seq(list(np.cumsum(row)), rate=6.0) for row in gaps])
    timeline = Timeline()
    for end in np.cumsum(np.full(20_000, 0.04)):
        iteration(timeline, float(end))
    start = time.process_time()
    record = measure(result, timeline, LOAD, EFFORT, block_bytes=1)
    assert record["num_stalls"] > 50_000
    assert time.process_time() - start < 3.0  # 0.7 s on a quiet machine


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 3.0), min_size=2, max_size=30), st.floats(0.5, 20.0))
def test_every_visible_stall_has_one_cause(gaps: list[float], rate: float) -> None:
    times = list(np.cumsum(gaps))
    timeline = Timeline()
    timeline.record("pause", times[0], request_id="1")
    stream = Stream(arrival_time=0.0, token_times=times, read_rate=rate)
    found = metrics.stalls(stream, metrics.CLIENT_VISIBLE_STALL_S)
    totals = stall_causes({"1": stream}, timeline)
    assert sum(t.num_stalls for t in totals.values()) == len(found)
    total_s = math.fsum(stall.duration_s for stall in found)
    assert sum(t.stall_s for t in totals.values()) == pytest.approx(total_s)
