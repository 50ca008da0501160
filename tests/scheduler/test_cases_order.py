"""Reported faults of order: who starts, who yields, who comes back."""

from __future__ import annotations

import itertools

import pytest

from perf.virtual.values import SimEngine, SimRequest
from tests.scheduler.build import paused, running, snapshot, waiting
from tests.scheduler.outcomes import MAX_UTIL, NO_EVICT, Outcome, all_served, worst_stall_s
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan

POLICY = TokenflowPolicy()


def request(arrival_time: float = 0.0, prompt: int = 40, max_tokens: int = 40, **fields):
    return SimRequest(
        arrival_time=arrival_time, num_prompt_tokens=prompt, max_tokens=max_tokens, **fields
    )


@pytest.mark.parametrize("arrival_time", [20.0, 20.013, 20.03])
def test_an_urgent_request_does_not_wait_for_slots_full_of_patient_ones(
    arrival_time: float,
) -> None:
    """Reported: a high-priority request waits because low-priority ones hold all slots.

    Four low streams of 2,000 tokens fill four slots, their readers far behind. An urgent one has
    its first token within three steps and its prefill, one stream yields, and all end.
    """
    low = [request(prompt=100, max_tokens=2000, priority=0.1) for _ in range(4)]
    high = request(arrival_time, 64, 50, priority=0.9, kind="high")
    engine = SimEngine(max_batch_size=4, num_total_blocks=300)
    run = Outcome([*low, high], engine)
    step_s = engine.step_base_s + 4 * engine.step_per_sequence_s
    assert run.ttft("high")[0] <= 3 * step_s + 64 / engine.prefill_tokens_per_s
    assert run.num_pauses()[-1] == 0
    assert sorted(run.num_pauses()) == [0, 0, 0, 0, 1]
    assert all_served(run.result)
    assert worst_stall_s(run.result) == 0.0


def test_a_preempted_stream_comes_back_before_newcomers_unless_its_reader_has_plenty() -> None:
    """Reported: a preempted request loses its place to requests that never started.

    The rule is slack: the emptier reader goes first, and one that has not started is the emptiest,
    as long as the paused one can still be brought back in time.
    """
    nearly_dry = plan(snapshot([paused(0.6), waiting()], max_batch_size=1), POLICY)
    assert (nearly_dry.resume, nearly_dry.admit) == ((10,), ())
    plenty = plan(snapshot([paused(20.0), waiting()], max_batch_size=1), POLICY)
    assert (plenty.resume, plenty.admit) == ((), (11,))


def test_one_that_yielded_to_a_newcomer_is_back_before_its_reader_runs_dry() -> None:
    """The same, over its whole life: B and then C pass A in the only slot; A never stalls."""
    engine = SimEngine(max_batch_size=1)
    run = Outcome([request(max_tokens=200), request(4.0), request(4.5)], engine)
    assert run.num_pauses()[0] >= 1
    assert worst_stall_s(run.result) == 0.0
    assert max(run.ttft("reader")) <= 4.0


@pytest.mark.parametrize("read_rate", [4.0, 8.0, 12.0])
def test_equal_streams_take_turns_slowly(read_rate: float) -> None:
    """Reported: equal requests evict each other in turn.

    Two equal streams and one slot: at most one switch per second, and the one that yields has more
    unread than the one that takes its place, by more than the margin; or the other is so far ahead
    that what is made in excess goes to it, to its end.
    """
    engine = SimEngine(max_batch_size=1)
    run = Outcome([request(max_tokens=400, read_rate=read_rate) for _ in range(2)], engine)
    times = [pause["time"] for pause in run.pauses()]
    assert times
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))
    for pause in run.pauses():
        if pause["why"] != "for waiting":
            taker = 3 - int(pause["request_id"])
            reader = run.result.streams()[taker - 1]
            num_there = int((reader.token_times < pause["time"]).sum())
            read_s = pause["time"] - float(reader.token_times[0])
            slack_s = num_there / read_rate - read_s
            is_far_ahead = slack_s * read_rate >= 0.15 * 400
            assert is_far_ahead or pause["slack_s"] - slack_s > POLICY.slack_margin_s
            assert not is_far_ahead or pause["slack_s"] >= 0.10 * 400 / read_rate
    assert worst_stall_s(run.result) == 0.0


def test_many_pauses_earn_no_right_against_newcomers() -> None:
    """Reported: what was preempted often is favoured so much that new arrivals starve.

    Twenty streams share eight slots and have been paused five times each and more when a short one
    comes, and the load can be carried: its first token comes within the time for which a newcomer
    can be passed over.
    """
    old = [request(0.3 * i, 40, 600, read_rate=5.0) for i in range(20)]
    new = request(80.0, 40, 40, kind="new")
    run = Outcome([*old, new], SimEngine(num_total_blocks=1000))
    assert sum(pause["time"] < 80.0 for pause in run.pauses()) >= 5 * 20
    assert run.ttft("new")[0] <= POLICY.max_bypass_s
    assert worst_stall_s(run.result) == 0.0


@pytest.mark.parametrize("num_pauses", [0, 5, 50])
def test_how_often_somebody_was_paused_does_not_count(num_pauses: int) -> None:
    """The same at one instant."""
    often = [paused(40.0, num_pauses=num_pauses) for _ in range(20)]
    rows = [*[running(40.0)] * 8, *often, waiting()]
    assert plan(snapshot(rows, max_batch_size=8, num_total_blocks=256), POLICY).admit == (38,)


@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_no_more_victims_than_the_room_that_is_short(capacity_policy: str) -> None:
    """Reported: more victims are preempted than needed.

    Four streams of 64 tokens of KV fill the pool, a fifth needs 60 tokens: exactly one yields.
    """
    requests = [request(prompt=16, max_tokens=49) for _ in range(4)]
    engine = SimEngine(num_total_blocks=8, capacity_policy=capacity_policy)
    run = Outcome([*requests, request(1.5, 20, 40, kind="new")], engine)
    assert sum(pause["time"] < 1.5 + 0.5 for pause in run.pauses()) == 1
    assert len(run.pauses()) == 1
    assert run.ttft("new")[0] <= 0.2
    assert all_served(run.result)


@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_small_ones_pass_a_head_of_the_queue_that_does_not_fit(capacity_policy: str) -> None:
    """Reported: small requests are stuck behind an oversized head of the queue.

    96 tokens of KV are free; 400, 20 and 20 are asked for. The two small ones start at once. The
    big one starts as soon as the stream that may not be paused has ended.
    """
    engine = SimEngine(num_total_blocks=16, capacity_policy=capacity_policy)
    fixed = request(prompt=350, max_tokens=60, pausable=False)
    big = request(0.5, 380, 20, kind="big")
    small = [request(0.5, 10, 10, kind="small") for _ in range(2)]
    run = Outcome([fixed, big, *small], engine)
    assert max(run.ttft("small")) <= 0.1
    first_token_time = run.ttft("big")[0] + 0.5
    assert first_token_time <= run.result.seqs[0].end_time + 0.4
    assert all_served(run.result)


def test_a_big_one_is_not_passed_for_ever() -> None:
    """The same with small ones that keep coming: others pass it for `max_bypass_s`, no longer."""
    engine = SimEngine(num_total_blocks=16, capacity_policy=NO_EVICT)
    small = [request(0.25 * i, 60, 30, kind="small") for i in range(80)]
    big = request(3.0, 380, 20, kind="big")
    run = Outcome([*small, big], engine)
    # Once it may not be passed any more it waits for those that are in the engine.
    assert run.ttft("big")[0] <= POLICY.max_bypass_s + 3.0
    assert worst_stall_s(run.result) <= 0.25
