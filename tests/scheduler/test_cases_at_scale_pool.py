"""Reported faults of memory, with hundreds of requests on the laboratory's machines.

The small forms are in test_cases_pool.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.scheduler.gpus import h200, prefill_s, request, rtx_4090
from tests.scheduler.outcomes import (
    MAX_UTIL,
    NO_EVICT,
    Outcome,
    all_served,
    throughput_ratio,
    worst_stall_s,
)
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, percentile, share_with_visible_stall
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy

POLICY = TokenflowPolicy()
CAPACITY_POLICIES = [NO_EVICT, MAX_UTIL]
GB = 10**9


def end_time(run: Outcome) -> float:
    return max(seq.end_time for seq in run.result.seqs)


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
def test_none_of_a_crowd_is_preempted_again_and_again(capacity_policy: str) -> None:
    """101 on a 4090: 120 requests of 600 tokens on 42,000 tokens of KV, without a host tier. At
    most one pause per ten tokens, and all are done in 1.5 times the time without pauses."""
    engine = rtx_4090(capacity_policy=capacity_policy)
    requests = [request(0.001 * i, 300, 300) for i in range(120)]
    run, plain = (Outcome(requests, engine, p) for p in (POLICY, FcfsReservePolicy()))
    assert run.pauses()
    assert max(run.num_pauses()) <= 300 // 10
    assert run.result.num_internal_pauses == 0
    assert end_time(run) <= 1.5 * end_time(plain)
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S
    assert all_served(run.result)


WITHOUT_HOST = {}
BY_RULES = {"host_bytes": 32 * GB}
TOLD = {"host_bytes": 32 * GB, "kv_tiering": True}


@pytest.mark.parametrize(
    ("host", "capacity_policy", "num", "least_ratio"),
    [
        pytest.param(BY_RULES, MAX_UTIL, 192, 0.95, id="host"),
        pytest.param(BY_RULES, NO_EVICT, 192, 0.93, id="host, reserved"),
        pytest.param(TOLD, MAX_UTIL, 96, 0.95, id="KvTiering"),
        pytest.param(WITHOUT_HOST, MAX_UTIL, 192, 0.85, id="no host"),
        pytest.param(WITHOUT_HOST, NO_EVICT, 192, 0.80, id="no host, reserved"),
    ],
)
def test_hundreds_on_a_third_of_their_pool(
    host: dict, capacity_policy: str, num: int, least_ratio: float
) -> None:
    """105 on an H200 that holds a third of `num` requests of 512 tokens, all at once: first tokens
    in half the time of the engine without pauses, nobody stalls, and its output rate is kept where
    there is a host tier and blocks are taken as needed. The engine without pauses writes a whole
    third at a time here, a multiple of what readers want: what is lost is the price of the early
    first tokens, and highest where everything paused has to be computed again."""
    engine = h200(max_batch_size=512, capacity_policy=capacity_policy, **host)
    engine = dataclasses.replace(engine, num_total_blocks=num * 512 // 32 // 3)
    requests = [request(0.0, 64, 448) for _ in range(num)]
    run = Outcome(requests, engine)
    plain = Outcome(
        requests, dataclasses.replace(engine, capacity_policy=NO_EVICT), FcfsReservePolicy()
    )
    assert run.pauses()
    assert throughput_ratio(run.result, plain.result) >= least_ratio
    assert share_with_visible_stall(run.result.streams()) == 0.0
    ttft, plain_ttft = (percentile(o.ttft("reader"), 50) for o in (run, plain))
    assert ttft <= 0.5 * plain_ttft
    assert run.result.num_forced == run.result.num_internal_pauses == 0
    assert all_served(run.result)


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
def test_three_huge_max_tokens_block_none_of_sixty(capacity_policy: str) -> None:
    """106 on a 4090: three that may write 12,000 tokens each, of 42,000 tokens of KV; sixty short
    ones a second later have their first tokens within a second."""
    engine = rtx_4090(capacity_policy=capacity_policy)
    huge = [request(0.01 * i, 900, 12_000, cancel_after_s=12.0) for i in range(3)]
    short = [request(1.0 + 0.01 * i, 100, 50, kind="short") for i in range(60)]
    run = Outcome([*huge, *short], engine)
    assert max(run.ttft("short")) < 1.0
    assert worst_stall_s(run.result) == 0.0
    assert all(len(seq.token_times) == 50 for seq in run.result.seqs[3:])


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
@pytest.mark.parametrize(("kv_tiering", "num"), [(False, 120), (True, 40)])
def test_resumes_that_load_do_not_block_each_other(
    kv_tiering: bool, num: int, capacity_policy: str
) -> None:
    """109 on an H200 whose pool holds a third of 120 (40) streams, the rest on the host: the engine
    is never without work for a second until all have ended, and what comes back was loaded."""
    engine = h200(host_bytes=16 * GB, kv_tiering=kv_tiering, capacity_policy=capacity_policy)
    engine = dataclasses.replace(engine, num_total_blocks=8 * num)
    requests = [
        request(0.002 * i, 600 + i % 7 * 50, 200 + i % 5 * 30, read_rate=10.0) for i in range(num)
    ]
    run = Outcome(requests, engine, watch=True)
    starts = [step.start_time for step in run.steps]
    assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(starts))
    assert run.result.counters.num_onboards_completed > 0
    assert run.result.counters.num_resumes > num // 2
    assert all_served(run.result)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", [POLICY, FcfsReservePolicy()])
def test_fifty_long_prompts_at_once_are_served(policy: Policy, chunked: bool) -> None:
    """115 on a 4090: fifty prompts of 3,000 to 3,800 tokens within 10 ms, four times the pool, in
    chunks or whole. All are served, in not much more than the time that their prefill takes."""
    engine = rtx_4090(
        max_batch_size=64,
        max_num_tokens=2048 if chunked else 8192,
        max_seq_len=8192,
        enable_chunked_context=chunked,
    )
    requests = [request(2e-4 * i, 3000 + i % 9 * 100, 60) for i in range(50)]
    run = Outcome(requests, engine, policy)
    assert all_served(run.result)
    own_s = prefill_s(engine, *[r.num_prompt_tokens for r in requests])
    assert max(run.ttft("reader")) <= 1.6 * own_s
