"""plan(): exchanges between running and paused streams. Row i has slot i + 10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.build import LENGTHS, NOW, known_lengths, paused, running
from tests.scheduler.decisions import decide

INF = float("inf")


def test_excess_goes_to_a_stream_that_is_nearly_read_out() -> None:
    rich = running(25.0)  # 100 of 256 tokens unread
    poor = paused(2.0)  # 8 unread, 3 %: not yet due
    decision = decide([rich, poor], max_batch_size=1)
    assert (decision.pause, decision.resume) == ((10,), (11,))
    assert decision.why == {10: "for balance", 11: "balance"}


def test_no_exchange_that_does_not_pay() -> None:
    assert not decide([running(25.0), paused(4.5)], max_batch_size=1)  # 7 %: not low
    assert not decide([running(5.5), paused(2.0)], max_batch_size=1)  # 8.6 %: not rich
    costly = paused(2.0, num_resume_tokens=1500)
    assert not decide([running(25.0), costly], max_batch_size=1)


def leaders(**changes: Any) -> list[dict]:
    """One that begins to be ahead of its reader, 15 % of its answer; a paused one at 30 % that has
    generated twice as much; both read 1 token/s."""
    reading = {"read_rate": 1.0, "max_tokens": 240}
    begins = running(36.0, num_generated=60, **reading)
    return [begins, {**paused(72.0, num_generated=120, **reading), **changes}]


def test_what_is_made_in_excess_goes_on_to_those_farthest_ahead() -> None:
    decision = decide(leaders(), max_batch_size=1)
    assert (decision.pause, decision.resume) == ((10,), (11,))
    assert decision.why == {10: "for balance", 11: "balance"}


@pytest.mark.parametrize(
    "change",
    [
        {"slack_s": 35.0},  # 14.6 %: its own tokens are worth something
        {"num_generated": 70},  # hardly farther
        {"num_resume_tokens": 12_000},  # costs more than it gains
        {"has_reader": False, "slack_s": INF},
        {"num_blocks_needed": 200},
        {"priority": 0.4},
        {"wait_since_time": NOW - 0.9},  # it was paused just now
    ],
)
def test_who_is_not_given_what_is_made_in_excess(change: dict) -> None:
    assert not decide(leaders(**change), max_batch_size=1)


def test_excess_is_shared_out_only_where_there_is_some() -> None:
    fast = running(36.0, num_generated=60, read_rate=20.0, max_tokens=4800)
    rows = [fast, paused(72.0, num_generated=3000, read_rate=20.0, max_tokens=4800)]
    assert not decide(rows, max_batch_size=1)  # readers take 40 tokens/s, the engine makes 21
    far = running(60.0, num_generated=60, read_rate=1.0, max_tokens=240)
    assert not decide([far, leaders()[1]], max_batch_size=1)  # 25 %: it is ahead already


def test_two_make_room_for_one_that_is_far_ahead_but_not_three() -> None:
    def rows(num_givers: int) -> list[dict]:
        begins, far = leaders(num_blocks_needed=6 * num_givers, num_blocks_final=6 * num_givers)
        return [{**begins, "num_blocks_needed": 6, "num_blocks_held": 6}] * num_givers + [far]

    decision = decide(rows(2), max_batch_size=3, num_total_blocks=13)
    assert (sorted(decision.pause), decision.resume) == ([10, 11], (12,))
    assert not decide(rows(3), max_batch_size=4, num_total_blocks=19)


def test_excess_is_not_shared_out_where_pauses_lose_kv() -> None:
    """Both fill 8 blocks."""
    rows = leaders(num_blocks_needed=5, num_blocks_final=5)
    assert decide(rows, max_batch_size=1, num_total_blocks=8).resume == (11,)
    assert not decide(rows, max_batch_size=1, num_total_blocks=7)


def test_shares_are_of_the_answer_that_is_expected() -> None:
    """24 unread tokens of the one that runs are 2 % of what it may have and 20 % of what it will; 6
    of the paused one are little by either."""
    rows = [running(6.0, max_tokens=1200), paused(1.5, max_tokens=1200)]
    assert not decide(rows, max_batch_size=1)
    decision = decide(rows, max_batch_size=1, lengths=LENGTHS[1])
    assert (decision.pause, decision.resume) == ((10,), (11,))
    assert decision.why == {10: "for balance", 11: "balance"}


def test_how_far_ahead_one_is_goes_by_the_answer_that_is_expected() -> None:
    """Both may have 2,400 tokens; those that were seen had 240."""
    known = known_lengths((240, 1e-9))

    def rows(**changes: Any) -> list[dict]:
        return [{**row, "max_tokens": 2400} for row in leaders(**changes)]

    assert decide(rows(), max_batch_size=1, lengths=known) == decide(leaders(), max_batch_size=1)
    assert not decide(rows(), max_batch_size=1)
    # Little farther, or costing more than the giver would have made until it is worth nothing.
    for change in ({"num_generated": 70}, {"num_resume_tokens": 12_000}):
        assert not decide(rows(**change), max_batch_size=1, lengths=known)
