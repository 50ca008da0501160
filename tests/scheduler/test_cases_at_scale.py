"""Reported faults of order and waiting, with hundreds of requests on the laboratory's machines.

The small forms are in test_cases_order.py and test_cases_queue.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, defaultdict

import pytest

from tests.scheduler.gpus import h200, prefill_s, request, rtx_4090
from tests.scheduler.outcomes import MAX_UTIL, NO_EVICT, Outcome, all_served, worst_stall_s
from tests.scheduler.pauses import returns
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, percentile
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.types import EndReason

POLICY = TokenflowPolicy()
CAPACITY_POLICIES = [NO_EVICT, MAX_UTIL]


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
def test_urgent_requests_do_not_wait_for_slots_full_of_patient_ones(capacity_policy: str) -> None:
    """98 on an H200: 256 low streams hold all slots, their readers far behind. 32 urgent ones
    within 10 ms have their first tokens within three steps and their prefill, and one yields to
    each."""
    engine = h200(capacity_policy=capacity_policy)
    low = [request(0.001 * i, max_tokens=400, priority=0.1) for i in range(256)]
    high = [request(2.0 + 3e-4 * i, 64, 50, priority=0.9, kind="high") for i in range(32)]
    run = Outcome([*low, *high], engine, watch=True)
    step_s = max(s.step_s for s in run.steps if 1.5 < s.start_time < 2.0)
    assert max(run.ttft("high")) <= 3 * step_s + prefill_s(engine, *[64] * 32)
    assert sum(run.num_pauses()) == 32
    assert max(run.num_pauses()) == 1
    assert all_served(run.result)
    assert worst_stall_s(run.result) == 0.0


def test_those_that_yielded_to_newcomers_are_back_before_their_readers_run_dry() -> None:
    """99 on a 4090: 160 readers in 16 s on 48 slots. Newcomers pass whoever has plenty; everybody
    who yielded is back in time."""
    engine = rtx_4090(max_batch_size=48)
    run = Outcome([request(0.1 * i, 256, 240, read_rate=4.0) for i in range(160)], engine)
    found = list(returns(run))
    assert sum(pause["why"] == "for waiting" for pause, _ in found) >= 20
    assert max(late_s for _, late_s in found) <= 0.0
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S
    assert all_served(run.result)


def test_a_crowd_of_equal_streams_takes_turns_slowly() -> None:
    """102 on a 4090: 128 equal streams and 64 slots. A stream is paused at most once a second; two
    streams switch at most once a second for each slot."""
    run = Outcome([request(max_tokens=400) for _ in range(128)], rtx_4090(max_batch_size=64))
    times = defaultdict(list)
    for pause in run.pauses():
        times[pause["request_id"]].append(pause["time"])
    assert len(times) > 64
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, times.values()))
    assert all(later - earlier >= 1.0 for earlier, later in pairs)
    assert len(run.pauses()) <= 64 * max(seq.end_time for seq in run.result.seqs)
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S


def test_hundreds_of_pauses_earn_no_right_against_newcomers() -> None:
    """103 on a 4090: 160 streams on 64 slots, paused more than once each, and twenty short
    newcomers: first tokens within the time for which a newcomer can be passed over."""
    old = [request(0.02 * i, 64, 400, read_rate=8.0) for i in range(160)]
    new = [request(20.0 + 0.01 * i, 64, 40, kind="new") for i in range(20)]
    run = Outcome([*old, *new], rtx_4090(max_batch_size=64))
    assert sum(pause["time"] < 20.0 for pause in run.pauses()) > 160
    assert max(run.ttft("new")) <= POLICY.max_bypass_s
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S


def test_no_more_victims_than_newcomers_of_the_same_size() -> None:
    """104 on an H200: 300 streams that reserve the whole pool and 16 newcomers of the same size:
    exactly 16 yield."""
    size = -(-(256 + 384) // 32)
    engine = dataclasses.replace(h200(max_batch_size=512), num_total_blocks=300 * size)
    old = [request(5e-4 * i, 257, 384) for i in range(300)]
    run = Outcome([*old, *(request(1.5, 257, 384, kind="new") for _ in range(16))], engine)
    first_time = 1.5 + max(run.ttft("new"))
    assert first_time <= 1.5 + POLICY.max_bypass_s
    assert sum(pause["time"] <= first_time for pause in run.pauses()) == 16
    assert all_served(run.result)


def test_requests_of_the_default_length_run_side_by_side() -> None:
    """107 on an H200: 256 calls that leave max_tokens out get the default's length, and all run at
    once."""
    engine = h200()
    num = engine.config().default_max_tokens
    run = Outcome([request(0.0, 64, num) for _ in range(256)], engine, watch=True)
    assert max(len(step.handles) for step in run.steps) == 256
    assert all_served(run.result)


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
def test_hundreds_of_small_ones_pass_a_head_that_does_not_fit(capacity_policy: str) -> None:
    """110 on a 4090 with 25,600 tokens of KV: four streams that cannot be paused hold half. One of
    13,500 finds no room; 200 small ones behind it do, at once; it starts when a stream has ended
    that is in its way, however many small ones come."""
    engine = rtx_4090(capacity_policy=capacity_policy)
    engine = dataclasses.replace(engine, num_total_blocks=800)
    fixed = [request(0.0, 2880, 300, pausable=False) for _ in range(4)]
    big = request(4.0, 13_500, 40, kind="big")
    small = [request(4.0 + 0.02 * i, 32, 40, kind="small") for i in range(200)]
    run = Outcome([*fixed, big, *small], engine)
    end_time = min(seq.end_time for seq in run.result.seqs[:4])
    assert run.ttft("big")[0] + 4.0 > end_time
    early = [seq for seq in run.result.seqs[5:] if seq.request.arrival_time < 5.0]
    assert all(seq.token_times[0] - seq.request.arrival_time <= 0.25 for seq in early)
    assert run.ttft("big")[0] + 4.0 <= end_time + prefill_s(engine, 13_500) + POLICY.max_bypass_s
    assert all_served(run.result)


def test_small_ones_beside_long_prompts_wait_no_longer_than_without_pauses() -> None:
    """110 with time instead of room: 200 small requests, 12 per second, and three prompts of 12,000
    tokens on a 4090. All large ones are served within twice their prefill; the small ones do not
    pay more for them than first come, first served makes them."""
    rng, now, small = random.Random(7), 0.0, []
    for _ in range(200):
        now += rng.expovariate(12.0)
        small.append(request(now, rng.randint(60, 200), rng.randint(60, 150), kind="small"))
    big = [request(6.0 + 3.0 * i, 12_000 + i, 100, kind="big") for i in range(3)]
    engine = rtx_4090()
    run, plain = (Outcome([*small, *big], engine, p) for p in (POLICY, FcfsReservePolicy()))
    assert percentile(run.ttft("small"), 99) <= percentile(plain.ttft("small"), 99)
    assert max(run.ttft("big")) <= 2 * prefill_s(engine, 12_000) + POLICY.max_bypass_s
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S


@pytest.mark.parametrize("capacity_policy", CAPACITY_POLICIES)
def test_long_prompts_do_not_wait_for_sixty_running_streams(capacity_policy: str) -> None:
    """111 on a 4090: 60 streams of 400 tokens, then every three seconds a prompt of 9,500. Its
    first token comes within twice its prefill time, and no reader waits."""
    engine = rtx_4090(capacity_policy=capacity_policy)
    old = [request(0.01 * i, 64, 400) for i in range(60)]
    long = [request(3.0 + 3.0 * i, 9500 + i, 50, kind="long") for i in range(3)]
    run = Outcome([*old, *long], engine)
    assert max(run.ttft("long")) <= 2 * prefill_s(engine, 9500)
    assert worst_stall_s(run.result) == 0.0


def test_chunks_of_three_long_prompts_follow_each_other() -> None:
    """112 on a 4090 with 512 tokens a step: 100 streams and three prompts of 10,000 tokens. From
    its first chunk to its first token each has a chunk per second at least."""
    engine = rtx_4090(max_num_tokens=512)
    old = [request(0.005 * i, 64, 400) for i in range(100)]
    long = [request(3.0 + 0.1 * i, 10_000 + i, 50, kind="long") for i in range(3)]
    run = Outcome([*old, *long], engine, watch=True)
    for handle, seq in enumerate(run.result.seqs[100:], 101):
        times = [*run.step_times(handle)]
        chunk_times = [t for t in times if t < seq.token_times[0]]
        assert len(chunk_times) >= 20
        assert all(b - a <= 1.0 for a, b in itertools.pairwise(chunk_times))
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S


@pytest.mark.parametrize("policy", [POLICY, FcfsReservePolicy()])
@pytest.mark.parametrize("gap_s", [0.0, 0.001], ids=["at once", "within a second"])
def test_a_thousand_calls_are_served_or_refused_and_none_hangs(
    gap_s: float, policy: Policy
) -> None:
    """113 and 114 on a 4090 with a queue of 256: each of 1,000 calls is refused in its instant, as
    one that may be tried again, exactly if 256 wait by then; or it is served."""
    engine = dataclasses.replace(rtx_4090(), max_queue_size=256)
    run = Outcome([request(1.0 + gap_s * i, 30, 100) for i in range(1000)], engine, policy)
    ends = Counter(seq.end for seq in run.result.seqs)
    assert set(ends) == {EndReason.LENGTH, EndReason.ERROR}
    assert ends[EndReason.LENGTH] >= 256
    for seq in run.result.seqs:
        if seq.end is EndReason.ERROR:
            assert seq.end_time == seq.request.arrival_time
            assert seq.retryable
            assert (seq.error or "").startswith("overloaded")
        else:
            assert len(seq.token_times) == 100
    if policy == POLICY:  # what waits is on our side, so the trace tells how many
        names = [name for name, _, _ in run.tracer.events if name in ("arrival", "admit", "error")]
        num_waiting = 0
        for name in names:
            assert num_waiting == 256 if name == "error" else num_waiting <= 256
            num_waiting += {"arrival": 1, "admit": -1, "error": 0}[name]


@pytest.mark.parametrize("policy", [POLICY, FcfsReservePolicy()])
def test_slots_of_hundreds_of_slow_readers_are_free_with_the_last_token(policy: Policy) -> None:
    """116 on a 4090: 512 readers of 1 token/s and 200 tokens each on 64 slots. Every end is told
    with its last token, no slot stands empty while somebody waits, and in all it takes no longer
    than generating it, where one reader takes 200 s."""
    engine = rtx_4090(max_batch_size=64)
    run = Outcome([request(0.0, 30, 200, read_rate=1.0) for _ in range(512)], engine, policy)
    assert all(seq.end_time == seq.token_times[-1] for seq in run.result.seqs)
    assert run.result.idle_slot_s <= 0.01 * run.result.busy_slot_s
    full_step_s = engine.step_cost.decode_s(64, 64 * 230)  # type: ignore[union-attr]
    assert max(seq.end_time for seq in run.result.seqs) <= 1.3 * 512 * 200 * full_step_s / 64
    assert all_served(run.result)
