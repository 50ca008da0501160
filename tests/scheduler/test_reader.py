"""The reader: fluid = discrete at token borders, acknowledgements, learning, column form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.metrics import Stream, rebuffer_s
from tokenflow.reader import LEARNED_RATE_BOUNDS, Reader, slack_s


def test_nothing_is_read_before_the_first_token() -> None:
    reader = Reader(4.0, 6.0)
    assert math.isnan(reader.slack_s(100.0))
    assert reader.unread(100.0) == 0.0
    assert math.isnan(reader.state.unread)
    reader.deliver(0, 100.0)
    assert not reader.started


def test_reads_at_its_rate_and_stalls_when_dry() -> None:
    reader = Reader(4.0, 6.0)
    reader.deliver(8, 10.0)
    assert reader.slack_s(10.0) == pytest.approx(2.0)
    assert reader.unread(11.0) == pytest.approx(4.0)
    assert reader.slack_s(13.0) == 0.0
    assert reader.stall_s(13.0) == pytest.approx(1.0)
    reader.deliver(4, 13.0)  # the timeline shifts: all four are ahead of the reader
    assert reader.slack_s(13.0) == pytest.approx(1.0)
    assert reader.stall_s(13.5) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Reader(rate, 6.0)


def test_negative_delivery_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        Reader(4.0, 6.0).deliver(-1, 0.0)


gaps = st.lists(st.floats(0.0, 2.0), min_size=1, max_size=40)


@given(gaps=gaps, rate=st.floats(0.5, 20.0))
def test_fluid_equals_discrete(gaps: list[float], rate: float) -> None:
    times = np.cumsum(gaps)
    reader = Reader(rate, 6.0)
    for t in times:
        reader.deliver(1, float(t))
    discrete = rebuffer_s(Stream(arrival_time=0.0, token_times=times, read_rate=rate))
    assert reader.stall_s(float(times[-1])) == pytest.approx(discrete, abs=1e-6)
    # At a token border the discrete reader has taken exactly what the fluid one has read.
    num_read = reader.num_delivered - reader.unread(float(times[-1]))
    expected = (times[-1] - times[0] - discrete) * rate
    assert num_read == pytest.approx(expected, abs=1e-5)


events = st.lists(
    st.tuples(st.sampled_from("da"), st.integers(0, 60), st.floats(-1.0, 3.0)), max_size=40
)


@given(events=events, declared=st.booleans())
def test_consumed_never_falls_and_never_passes_delivered(
    events: list[tuple[str, int, float]], declared: bool
) -> None:
    reader, now, consumed, latest_time = Reader(5.0 if declared else None, 5.0), 0.0, 0.0, 0.0
    for kind, amount, gap in events:
        now += gap  # instants may also come out of order
        latest_time = max(latest_time, now)
        if kind == "d":
            reader.deliver(amount, now)
        else:
            reader.acknowledge(amount, now)
        latest = reader.num_delivered - reader.unread(latest_time)
        assert latest >= consumed - 1e-9
        assert -1e-9 <= reader.unread(latest_time) <= reader.num_delivered
        consumed = latest
    if declared:
        assert reader.rate == 5.0


def test_acknowledgements_only_move_forward() -> None:
    reader = Reader(2.0, 6.0)
    reader.deliver(100, 0.0)
    reader.acknowledge(40, 1.0)
    assert reader.unread(1.0) == pytest.approx(60)
    reader.acknowledge(10, 1.0)  # out of order
    reader.acknowledge(40, 1.0)  # twice
    assert reader.unread(1.0) == pytest.approx(60)
    reader.acknowledge(1000, 1.0)  # more than it ever got
    assert reader.unread(1.0) == 0.0
    reader.deliver(5, 1.0)
    assert reader.unread(1.0) == pytest.approx(5)


def test_learns_the_rate_of_a_reader_that_had_enough() -> None:
    reader = Reader(None, 6.0)
    reader.deliver(200, 0.0)
    for second in range(1, 11):
        reader.acknowledge(3 * second, float(second))
    assert reader.rate == pytest.approx(3.0)


def test_does_not_learn_the_rate_of_delivery_from_a_starved_reader() -> None:
    reader = Reader(None, 6.0)
    for i in range(40):  # 2 tokens/s come, each read at once by a reader that could do 20
        reader.deliver(1, i * 0.5)
        reader.acknowledge(i + 1, i * 0.5 + 0.05)
    assert reader.rate == 6.0


def test_does_not_learn_across_a_dry_spell_inside_an_interval() -> None:
    reader = Reader(None, 6.0)
    reader.deliver(10, 0.0)
    reader.deliver(100, 5.0)  # a reader of 8 tokens/s was dry from 1.25 s to 5 s
    reader.acknowledge(18, 6.0)  # mean pace 3, true rate 8
    assert reader.rate == 6.0
    reader.acknowledge(34, 8.0)
    assert reader.rate == pytest.approx(8.0)


@pytest.mark.parametrize(("pace", "expected"), [(0.1, LEARNED_RATE_BOUNDS[0]), (500, 40.0)])
def test_learned_rates_are_clamped(pace: float, expected: float) -> None:
    reader = Reader(None, 6.0)
    reader.deliver(100_000, 0.0)
    for i in range(1, 30):
        reader.acknowledge(int(pace * 10 * i), 10.0 * i)
    assert reader.rate == pytest.approx(expected)


def test_short_intervals_are_joined() -> None:
    reader = Reader(None, 6.0)
    reader.deliver(1000, 0.0)
    for i in range(1, 101):  # bursts of acknowledgements 1 ms apart
        reader.acknowledge(4 * (i // 10) + i % 10 // 9, (i // 10) + (i % 10) * 0.001)
    assert reader.rate == pytest.approx(4.0, rel=0.1)


@given(
    unread=st.floats(0, 500), age=st.floats(-1, 50), rate=st.floats(0.5, 20), more=st.floats(0, 50)
)
def test_column_form_equals_the_scalar(unread: float, age: float, rate: float, more: float) -> None:
    reader = Reader(rate, 6.0)
    num = int(unread) + 1
    reader.deliver(num, 100.0)
    state = reader.state
    now = 100.0 + age + more
    columns = slack_s(
        np.array([state.unread, np.nan, np.inf]),
        np.array([state.unread_time, 0.0, 0.0]),
        np.array([state.rate, 6.0, 6.0]),
        now,
    )
    assert columns[0] == pytest.approx(reader.slack_s(now), abs=1e-9)
    assert np.isnan(columns[1])
    assert columns[2] == np.inf
