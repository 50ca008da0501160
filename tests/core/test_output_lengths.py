"""What answers are expected to be, from those that ended: by hand, and against a slow estimate."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.build import running, snapshot
from tokenflow.output_lengths import OutputLengths
from tokenflow.types import LengthEstimate, SessionColumns


def learned(ended: list[tuple[int, bool]]) -> OutputLengths:
    lengths = OutputLengths()
    for num_tokens, stopped in ended:
        lengths.observe(num_tokens, stopped=stopped)
    return lengths


def estimate_of(
    ended: list[tuple[int, bool]], going_on: list[int] | None = None
) -> LengthEstimate | None:
    return learned(ended).estimate(sessions(going_on or []), 0.0)


def sessions(num_generated: list[int]) -> SessionColumns:
    """Streams that run, with so many tokens each."""
    return snapshot([running(1.0, num_generated=num) for num in num_generated]).sessions


def expected(estimate: LengthEstimate | None, num_generated: int, max_tokens: int) -> int:
    assert estimate is not None
    (value,) = estimate.expected(np.array([num_generated]), np.array([max_tokens])).tolist()
    return value


def slowly(
    ended: list[tuple[int, bool]], going_on: list[int], num_generated: int, max_tokens: int
) -> int:
    """The definition, one token after the other, in exact numbers: the next one comes with the
    share of those at risk that did not end there; four are never at an end."""
    seen = [num for num, _ in ended] + [num for num in going_on if num]
    total, alive = Fraction(num_generated), Fraction(1)
    for length in range(num_generated, max_tokens):
        if length > num_generated:
            num_at_risk = sum(num >= length for num in seen) + 4
            num_ends = sum(num == length and stopped for num, stopped in ended)
            alive *= 1 - Fraction(num_ends, num_at_risk)
        total += alive
    return min(max_tokens, max(num_generated + 1, math.ceil(total)))


def test_nothing_is_known_before_one_ended_by_itself() -> None:
    assert estimate_of([]) is None
    assert estimate_of([(30, False), (80, False)]) is None


def test_after_many_alike_the_next_is_expected_to_be_so() -> None:
    estimate = estimate_of([(300, True)] * 200)
    # 4 of 204 are taken to go on to the limit.
    assert expected(estimate, 0, 4096) == math.ceil(300 + 4 / 204 * (4096 - 300))
    assert expected(estimate, 0, 200) == 200  # never more than it may have
    assert expected(estimate, 299, 4096) > 299
    assert expected(estimate, 300, 4096) == 4096  # longer than all that were seen


def test_a_few_say_little() -> None:
    few, many = (estimate_of([(100, True)] * num) for num in (4, 100))
    assert expected(few, 0, 2100) == 100 + 2000 // 2
    assert expected(many, 0, 2100) == math.ceil(100 + 2000 * 4 / 104)


def test_short_ones_that_end_first_do_not_make_answers_look_short() -> None:
    """Of 40 at once, 10 have ended with 50 tokens, and 30 go on with as many."""
    ended = [(50, True)] * 10
    alone, beside = estimate_of(ended), estimate_of(ended, [50] * 30)
    assert expected(alone, 0, 1000) < 330
    assert expected(beside, 0, 1000) == math.ceil(50 + 950 * 34 / 44)


def test_what_clients_and_limits_cut_says_that_it_is_longer() -> None:
    cut = [(60, False)] * 50
    estimate = estimate_of([*cut, (40, True), (90, True)])
    # 1 of 56 ends at 40; of the 5 that are left beyond 60, one at 90.
    assert expected(estimate, 0, 100) == math.ceil(40 + 50 * 55 / 56 + 10 * 55 / 56 * 4 / 5)


def test_only_the_last_ones_count() -> None:
    assert expected(estimate_of([(1000, True)] * 300 + [(10, True)] * 2048), 0, 1000) < 30
    assert estimate_of([(1000, True)] * 300 + [(10, False)] * 2048) is None


def test_one_without_a_token_says_nothing() -> None:
    assert estimate_of([(0, True), (0, False)]) is None


def test_answers_that_get_longer_than_all_others_were_are_seen_within_a_second() -> None:
    """After 256 of 10 tokens, 200 go on beyond them, and none of those ends."""
    lengths = learned([(10, True)] * 256)
    first = lengths.estimate(sessions([5] * 200), 7.0)
    assert expected(first, 0, 2000) == math.ceil(10 + 1990 * 4 / 260)
    assert lengths.estimate(sessions([11] * 200), 7.9) is first
    later = lengths.estimate(sessions([12] * 200), 8.0)
    assert expected(later, 0, 2000) == math.ceil(10 + 1990 * 204 / 460)


ENDED = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30).filter(
    lambda ended: any(stopped for _, stopped in ended)
)


@settings(max_examples=150, deadline=None)
@given(
    ended=ENDED,
    going_on=st.lists(st.integers(0, 60), max_size=20),
    asked=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=8),
)
def test_it_is_the_mean_of_those_that_are_longer(
    ended: list[tuple[int, bool]], going_on: list[int], asked: list[tuple[int, int]]
) -> None:
    estimate = estimate_of(ended, going_on)
    assert estimate is not None
    generated = np.array([num for num, _ in asked])
    limits = generated + np.array([more for _, more in asked])
    found = estimate.expected(generated, limits)
    assert found.dtype == np.int64
    for value, num, limit in zip(found.tolist(), generated.tolist(), limits.tolist(), strict=True):
        assert num < value <= limit
        assert abs(value - slowly(ended, going_on, num, limit)) <= 1  # a sum rounded up


@pytest.mark.parametrize("num_generated", [0, 7, 400])
def test_where_none_ended_before_the_limit_the_limit_is_expected(num_generated: int) -> None:
    estimate = estimate_of([(2000, True)] * 9)
    assert expected(estimate, num_generated, 1500) == 1500
