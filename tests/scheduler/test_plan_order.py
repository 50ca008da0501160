"""plan(): who starts, who yields and who comes back first. Row i has slot i + 10."""

from __future__ import annotations

from tests.scheduler.build import NOW, paused, running, waiting
from tests.scheduler.decisions import decide
from tokenflow.policies import TokenflowPolicy
from tokenflow.types import Decision


def test_free_room_goes_to_newcomers_in_order_of_arrival() -> None:
    rows = [running(0.3), waiting(), waiting(), waiting(), waiting()]
    decision = decide(rows, max_batch_size=4)
    assert decision.admit == (11, 12, 13)
    assert not decision.pause


def test_the_stream_with_most_slack_yields_to_a_newcomer() -> None:
    decision = decide([running(5.0), running(9.0), running(2.0), waiting()], max_batch_size=3)
    assert decision == Decision(pause=(11,), admit=(13,), why={11: "for waiting", 13: "waiting"})


def test_due_comes_before_waiting_and_takes_the_only_victim() -> None:
    decision = decide([running(9.0), running(0.2), paused(0.5), waiting()], max_batch_size=2)
    assert (decision.pause, decision.resume, decision.admit) == ((10,), (12,), ())


def test_a_lower_class_is_paused_first_but_only_with_slack() -> None:
    rows = [running(9.0, priority=1.0), running(6.0, priority=0.0), waiting(priority=1.0)]
    assert decide(rows, max_batch_size=2).pause == (11,)
    rows[1]["slack_s"] = 0.5
    assert decide(rows, max_batch_size=2).pause == (10,)


def test_higher_classes_are_admitted_first() -> None:
    rows = [running(0.1), waiting(priority=0.2), waiting(priority=0.9)]
    assert decide(rows, max_batch_size=2).admit == (12,)


def test_streams_well_ahead_yield_before_the_others_and_the_furthest_goes_on() -> None:
    """24 of 40 s are 10 % of the output: of those beyond it the one with fewest tokens yields."""
    reading = {"read_rate": 1.0, "max_tokens": 240}
    rows = [
        running(20.0, num_generated=60, **reading),
        running(40.0, num_generated=120, **reading),
        running(30.0, num_generated=100, **reading),
        waiting(),
    ]
    policy = TokenflowPolicy(tail_share=100.0)
    assert decide(rows, policy, max_batch_size=3).pause == (12,)
    rows[1] = rows[2] = running(22.0, num_generated=100, **reading)
    assert decide(rows, policy, max_batch_size=3).pause == (11,)  # nobody is: most slack first


def test_the_order_of_excess_is_the_policys() -> None:
    old = paused(30.0, num_generated=150)
    young = paused(30.0, num_generated=110)
    rows = [running(0.1, num_generated=10), old, young]
    by_rest = TokenflowPolicy(tail_share=0.0, max_arrival_gaps=0.0)
    by_age = TokenflowPolicy(tail_share=100.0)
    assert decide(rows, by_rest, max_batch_size=2).resume == (12,)
    assert decide(rows, by_age, max_batch_size=2).resume == (11,)


def test_nobody_will_run_alone_as_long_as_others_keep_coming() -> None:
    """One request a second until `since_s` ago; the younger of the two has the longer rest."""
    by_rest = TokenflowPolicy(tail_share=0.0)

    def first(since_s: float) -> tuple[int, ...]:
        last = NOW - since_s
        rows = [
            running(0.1, num_generated=10, arrival_time=last - 2.0),
            paused(30.0, num_generated=150, arrival_time=last - 1.0),
            paused(30.0, num_generated=110, arrival_time=last),
        ]
        return decide(rows, by_rest, max_batch_size=2).resume

    assert first(4.9) == (11,)
    assert first(5.1) == (12,)
