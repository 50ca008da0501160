"""plan(): one rule at a time, on snapshots by hand. Row i has slot i + 10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.build import MAX_UTIL, NOW, paused, running, waiting
from tests.scheduler.decisions import POLICY, decide
from tokenflow.policies import FcfsReservePolicy, TokenflowPolicy
from tokenflow.types import Decision, SessionState

INF = float("inf")


def test_nothing_to_do_is_an_empty_decision() -> None:
    assert not decide([])
    assert not decide([running(1.0), running(0.0)])


@pytest.mark.parametrize("policy", [POLICY, FcfsReservePolicy()])
def test_nobody_is_started_whom_the_client_holds(policy) -> None:
    rows = [waiting(held=True), paused(0.1, held=True), paused(9.0), waiting()]
    decision = decide(rows, policy, max_batch_size=4)
    assert (decision.resume, decision.admit) == ((12,), (13,))


def test_held_streams_are_no_load() -> None:
    """Eight that stand still do not keep a newcomer out that the others can make room for."""
    fast = {"read_rate": 11.0, "max_tokens": 400}
    rows = [paused(20.0, held=True, **fast) for _ in range(8)]
    rows += [running(20.0, **fast) for _ in range(4)]
    assert decide([*rows, waiting(**fast)], max_batch_size=4).admit == (22,)
    crowd = [{**row, "held": False} for row in rows]
    assert not decide([*crowd, waiting(**fast)], max_batch_size=4).admit


def threshold_s(prefill_s: float = 32 / 2600) -> float:
    return 1.5 * (0.06 + 0.06 + 0.05) + 0.5 + prefill_s


@pytest.mark.parametrize(("above", "expected"), [(0.001, (10,)), (-0.001, ())])
def test_slack_must_cover_the_round_trip_and_the_prefill(above: float, expected: tuple) -> None:
    decision = decide([running(threshold_s() + above), waiting()], max_batch_size=1)
    assert decision.pause == expected


@pytest.mark.parametrize(
    "change",
    [
        {"pausable": False},
        {"state": SessionState.PREFILLING, "started": False},
        {"state": SessionState.RESUMING},
        {"state": SessionState.PAUSING, "num_blocks_needed": 64},
        {"running_since_time": NOW - 0.4},  # its quantum has not run
        {"max_tokens": 102},  # ends sooner than a pause pays
    ],
)
def test_who_is_never_paused_for_a_newcomer(change: dict) -> None:
    assert not decide([{**running(9.0), **change}, running(0.1), waiting()], max_batch_size=1).pause


def test_a_due_resume_does_not_wait_for_a_quantum() -> None:
    fresh = running(9.0, running_since_time=NOW - 0.2)
    decision = decide([fresh, paused(0.5)], max_batch_size=1)
    assert (decision.pause, decision.resume) == ((10,), (11,))


def test_newcomers_wait_while_a_due_stream_finds_no_room() -> None:
    rows = [running(0.2, num_blocks_needed=40), paused(0.3, num_blocks_needed=40), waiting()]
    assert not decide(rows, max_batch_size=4, num_total_blocks=64)


def test_a_stream_that_ends_in_the_step_in_flight_gives_its_slot_now() -> None:
    ends = running(0.1, num_generated=255, max_tokens=256, num_blocks_needed=60)
    decision = decide([ends, waiting(num_blocks_needed=10)], max_batch_size=1)
    assert decision == Decision(admit=(11,), why={11: "waiting"})


@pytest.mark.parametrize("state", [SessionState.PAUSING, SessionState.CANCELLING])
def test_leaving_streams_count_as_gone(state: SessionState) -> None:
    leaving = running(9.0, state=state, num_blocks_needed=60)
    assert decide([leaving, waiting(num_blocks_needed=10)], max_batch_size=1).admit == (11,)


def test_no_more_victims_than_slots_and_blocks_are_short() -> None:
    """In the order of yielding the first two would be paused; the second alone is enough."""
    rows = [
        running(9.0, num_blocks_needed=2, num_generated=90),
        running(9.0, num_blocks_needed=20),
        running(9.0, num_blocks_needed=20, num_generated=110),
        waiting(num_blocks_needed=20, num_blocks_final=20),
    ]
    policy = TokenflowPolicy(tail_share=100.0)
    decision = decide(rows, policy, max_batch_size=4, num_total_blocks=45)
    assert (decision.pause, decision.admit) == ((11,), (13,))


def test_a_pause_that_a_later_one_makes_unnecessary_is_taken_back() -> None:
    rows = [
        running(9.0, num_blocks_needed=2),
        running(8.0, num_blocks_needed=22),
        waiting(num_blocks_needed=2, num_blocks_final=2),
        waiting(num_blocks_needed=20, num_blocks_final=20),
    ]
    decision = decide(rows, max_batch_size=8, num_total_blocks=24)
    assert (decision.pause, decision.admit) == ((11,), (12, 13))


def test_larger_than_the_pool_is_never_admitted() -> None:
    rows = [waiting(num_blocks_needed=65, num_blocks_final=65), waiting()]
    assert decide(rows).admit == (11,)
    assert decide(rows, FcfsReservePolicy()).admit == (11,)


def test_others_pass_a_newcomer_that_does_not_fit_until_it_has_waited_long() -> None:
    def rows(since: float):
        big = waiting(num_blocks_needed=60, num_blocks_final=60, wait_since_time=NOW - since)
        return [running(0.1, num_blocks_needed=10), big, waiting()]

    assert decide(rows(0.5)).admit == (12,)
    assert not decide(rows(2.5))


def test_an_unschedulable_newcomer_makes_nobody_yield() -> None:
    """All together read faster than the engine writes, for longer than the unread text lasts."""
    fast = {"read_rate": 12.0, "max_tokens": 1000}
    rows = [running(9.0, **fast), running(9.0, **fast), waiting(read_rate=20.0, max_tokens=1000)]
    assert not decide(rows, max_batch_size=2)
    assert decide(rows, max_batch_size=3).admit == (12,)  # a free slot costs nobody anything


def test_unread_text_bridges_a_short_answer_beyond_the_capacity() -> None:
    """The same readers, far ahead, and a newcomer that is done before they have read it."""
    fast = {"read_rate": 12.0, "max_tokens": 1000}
    far, near = running(90.0, **fast), running(6.0, **fast)

    def newcomer(max_tokens: int) -> dict[str, Any]:
        return waiting(read_rate=20.0, max_tokens=max_tokens)

    assert decide([far, far, newcomer(400)], max_batch_size=2).admit == (12,)
    assert not decide([near, near, newcomer(400)], max_batch_size=2)
    assert decide([near, near, newcomer(40)], max_batch_size=2).admit == (12,)


def test_capacity_is_taken_at_mid_life() -> None:
    """Short now, long later: what fits at the present context does not at prompt + half."""
    rows = [running(9.0, read_rate=7.0), running(9.0, read_rate=7.0), waiting(read_rate=7.0)]
    assert decide(rows, max_batch_size=2).pause
    long = [{**row, "max_tokens": 30_000} for row in rows]
    assert not decide(long, max_batch_size=2, num_total_blocks=4000).pause


def test_no_pause_if_its_way_back_is_blocked() -> None:
    """The victim must be back in a second, but the newcomer holds the only slot for three."""
    rows = [running(1.2), waiting(pausable=False, max_tokens=60)]
    assert not decide(rows, max_batch_size=1)
    assert decide([running(9.0), rows[1]], max_batch_size=1).pause == (10,)


def test_no_pause_if_the_blocks_for_its_way_back_are_given_away() -> None:
    big = waiting(pausable=False, max_tokens=60, num_blocks_needed=30, num_blocks_final=30)
    assert not decide([running(1.2, num_blocks_needed=40), big])
    assert decide([running(9.0, num_blocks_needed=40), big]).pause == (10,)


def test_kinds_that_cannot_be_paused_hold_at_most_half() -> None:
    fixed = [waiting(pausable=False) for _ in range(4)]
    assert decide(fixed, max_batch_size=4).admit == (10, 11)
    big = [waiting(pausable=False, num_blocks_final=20, num_blocks_needed=20) for _ in range(3)]
    assert decide(big, max_batch_size=8, num_total_blocks=64).admit == (10,)
    alone = [waiting(pausable=False, num_blocks_final=50, num_blocks_needed=50)]
    assert decide(alone, max_batch_size=8, num_total_blocks=64).admit == (10,)


def test_machines_are_paused_a_bounded_number_of_times() -> None:
    machine = {"has_reader": False}
    free = running(INF, **machine, num_pauses=POLICY.max_machine_pauses - 1)
    spent = running(INF, **machine, num_pauses=POLICY.max_machine_pauses)
    assert decide([free, waiting()], max_batch_size=1).pause == (10,)
    assert not decide([spent, waiting()], max_batch_size=1)


def test_a_machine_paused_often_enough_yields_only_to_a_reader_that_would_stall() -> None:
    spent = running(INF, has_reader=False, num_pauses=POLICY.max_machine_pauses)
    late = paused(INF, has_reader=False, wait_since_time=NOW - 10.5)
    assert decide([spent, paused(0.2)], max_batch_size=1).pause == (10,)
    assert not decide([spent, late], max_batch_size=1)
    assert not decide([spent, paused(60.0)], max_batch_size=1)


def test_machines_come_back_after_a_bounded_pause() -> None:
    machine = {"has_reader": False}
    soon = paused(INF, **machine, wait_since_time=NOW - 9)
    late = paused(INF, **machine, wait_since_time=NOW - 10.5)
    assert not decide([running(5.0), soon], max_batch_size=1)
    assert decide([running(5.0), late], max_batch_size=1).resume == (11,)


def test_prefill_under_way_is_bounded_by_the_least_slack() -> None:
    """0.1 s each, two within a reader's token of 0.25 s; within 0.15 s of slack only one."""
    prompt = {"num_prompt_tokens": 260, "num_resume_tokens": 260}
    rows = [running(9.0), *[waiting(**prompt)] * 3]
    assert decide(rows, max_batch_size=8).admit == (11, 12)
    rows[0] = running(0.15)
    assert decide(rows, max_batch_size=8).admit == (11,)


def test_whoever_starts_wants_its_second_token_before_a_crowd_is_prefilled() -> None:
    """Nobody runs yet: a whole batch at once would make the first of them wait for it."""
    prompt = {"num_prompt_tokens": 260, "num_resume_tokens": 260}
    assert decide([waiting(**prompt)] * 8, max_batch_size=8).admit == (10, 11)
    machines = [waiting(has_reader=False, **prompt)] * 8
    assert len(decide(machines, max_batch_size=8).admit) == 8


def test_max_utilization_pauses_ahead_of_an_exhausted_pool() -> None:
    rows = [
        running(5.0, num_generated=31, num_blocks_held=2, num_blocks_final=9),
        running(9.0, num_generated=31, num_blocks_held=2, num_blocks_final=9),
    ]
    limits = {"capacity_policy": MAX_UTIL, "num_total_blocks": 9}
    decision = decide(rows, num_free_blocks=1, **limits)
    assert decision == Decision(pause=(11,), why={11: "growth"})
    assert not decide(rows, num_free_blocks=2, **limits)


def test_forced_pauses_are_counted_and_take_the_largest_slack() -> None:
    rows = [
        running(0.1, num_generated=31, num_blocks_held=2, num_blocks_final=9),
        running(0.3, num_generated=31, num_blocks_held=2, num_blocks_final=9),
    ]
    decision = decide(rows, num_free_blocks=1, capacity_policy=MAX_UTIL, num_total_blocks=9)
    assert decision.forced == decision.pause == (11,)


def test_the_last_stream_is_never_forced_out() -> None:
    rows = [running(0.1, num_generated=31, num_blocks_held=9, num_blocks_final=9)]
    assert not decide(rows, num_free_blocks=0, capacity_policy=MAX_UTIL, num_total_blocks=9)


def test_fcfs_hands_over_everything_and_never_pauses() -> None:
    rows = [paused(0.1), running(9.0), waiting(), waiting(), waiting()]
    decision = decide(rows, FcfsReservePolicy(), max_batch_size=1)
    assert decision == Decision(
        resume=(10,), admit=(12, 13, 14), why=dict.fromkeys((10, 12, 13, 14), "arrival")
    )


def test_a_reader_that_no_engine_could_serve_does_not_keep_newcomers_out() -> None:
    far = running(60.0)
    impossible = running(0.0, read_rate=1000.0)
    assert decide([far, far, impossible, waiting()], max_batch_size=3).admit == (13,)


def test_a_stream_without_reader_keeps_free_room_after_its_longest_pause() -> None:
    def rows(since: float):
        machine = paused(
            float("inf"), has_reader=False, wait_since_time=NOW - since, num_blocks_needed=40
        )
        small = paused(0.1, num_blocks_needed=10)
        return [running(0.1, num_blocks_needed=20), machine, small]

    limits = {"max_batch_size": 4, "num_total_blocks": 50}
    assert decide(rows(10.5), **limits).resume == (12,)  # passed over once more
    assert not decide(rows(60.0), **limits)  # the next room is its own


def test_a_machine_that_waits_for_long_keeps_no_room_from_a_reader_that_would_stall() -> None:
    """Those in the engine were paused as often as is allowed: only readers take their places."""
    spent = running(INF, has_reader=False, num_pauses=POLICY.max_machine_pauses)
    long = paused(INF, has_reader=False, wait_since_time=NOW - 60.0)
    decision = decide([spent, spent, long, paused(0.2)], max_batch_size=2)
    assert len(decision.pause) == 1
    assert decision.resume == (13,)
    assert not decide([spent, spent, long], max_batch_size=2)


def test_a_reader_beside_a_machine_that_waits_for_long_leaves_it_what_is_free() -> None:
    spent = running(INF, has_reader=False, num_pauses=POLICY.max_machine_pauses)
    long = paused(INF, has_reader=False, wait_since_time=NOW - 60.0, num_blocks_needed=30)
    rows = [spent, spent, long, paused(0.2)]
    decision = decide(rows, max_batch_size=4, num_total_blocks=32)  # 24 are free
    assert len(decision.pause) == 1
    assert decision.resume == (13,)
