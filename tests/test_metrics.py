"""Every measure against a slow, independent reading of its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow import metrics
from tokenflow.metrics import Stream

gaps = st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=40)
rates = st.floats(0.2, 50)


def make(arrival: float, gap_list: list[float], rate: float | None, length=None) -> Stream:
    return Stream(
        arrival_time=arrival,
        token_times=arrival + np.cumsum(gap_list),
        read_rate=rate,
        output_length=length,
    )


streams = st.builds(make, st.floats(0, 100), gaps, rates)


def walk(stream: Stream) -> tuple[list[float], list[float], list[int]]:
    """Reader walked token by token: (instant read, stall before it, unread when received)."""
    read: list[float] = []
    waits: list[float] = []
    for j, received in enumerate(stream.token_times):
        if j == 0:
            read.append(received)
            waits.append(0.0)
            continue
        wanted = read[-1] + 1 / stream.read_rate
        waits.append(max(0.0, received - wanted))
        read.append(max(received, wanted))
    unread = [
        sum(1 for k in range(j) if read[k] > received + 1e-12)
        for j, received in enumerate(stream.token_times)
    ]
    return read, waits, unread


@given(streams)
def test_reading_matches_a_walk_token_by_token(stream: Stream) -> None:
    read, waits, _ = walk(stream)
    np.testing.assert_allclose(metrics.read_times(stream), read, atol=1e-7)
    np.testing.assert_allclose(metrics.tbt_s(stream), np.diff(read), atol=1e-7)
    assert metrics.rebuffer_s(stream) == pytest.approx(sum(waits), abs=1e-6)


@given(streams)
def test_stalls_are_the_waits_over_the_limit(stream: Stream) -> None:
    _, waits, _ = walk(stream)
    found = {s.token_index: s for s in metrics.stalls(stream, 0.25)}
    for j, wait in enumerate(waits):
        if abs(wait - 0.25) < 1e-6:
            continue
        assert (j in found) == (wait > 0.25)
        if j in found:
            assert found[j].duration_s == pytest.approx(wait, abs=1e-6)
            assert found[j].end_time == pytest.approx(stream.token_times[j], abs=1e-6)


@given(streams)
def test_stalls_add_up_to_the_shift_of_the_last_token(stream: Stream) -> None:
    ideal = stream.token_times[0] + (stream.num_tokens - 1) / stream.read_rate
    shift = metrics.read_times(stream)[-1] - ideal
    assert metrics.rebuffer_s(stream) == pytest.approx(shift, abs=1e-6)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 60))
def test_weights_match_a_walk(quarter_gaps: list[int], length: int) -> None:
    # quarters of a second and 4 tokens/s are exact in binary, so ties fall the same way
    stream = make(0.0, [g / 4 for g in quarter_gaps], 4.0, length)
    _, _, unread = walk(stream)
    assert metrics.unread_when_received(stream).tolist() == unread
    expected = []
    for buffered in unread:
        if buffered <= 0.1 * length:
            expected.append(1.0)
        elif buffered >= 0.2 * length:
            expected.append(0.0)
        else:
            expected.append((0.2 * length - buffered) / (0.1 * length))
    np.testing.assert_allclose(metrics.token_weights(stream), expected, atol=1e-9)


@given(st.lists(streams, min_size=1, max_size=5))
def test_aggregates_match_their_formulas(group: list[Stream]) -> None:
    duration = max(s.token_times[-1] for s in group) - min(s.arrival_time for s in group)
    if duration < 1e-3:
        assert metrics.raw_throughput(group) >= 0
        return
    tokens = sum(len(s.token_times) for s in group)
    assert metrics.raw_throughput(group) == pytest.approx(tokens / duration)
    assert metrics.effective_throughput(group) <= metrics.raw_throughput(group) + 1e-9
    value, in_time = 0.0, 0
    for s in group:
        _, waits, _ = walk(s)
        first = s.token_times[0] - s.arrival_time
        value += metrics.token_weights(s).sum() - 2.0 * first - 3.0 * sum(waits)
        if first <= 0.5:
            in_time += sum(1 for wait in waits if wait <= 0.2 + 1e-9)
    assert metrics.qos(group, ttft_weight=2.0, rebuffer_weight=3.0) == pytest.approx(
        value / duration, abs=1e-3
    )
    borderline = any(abs(w - 0.2) < 1e-6 for s in group for w in walk(s)[1]) or any(
        abs(metrics.ttft_s(s) - 0.5) < 1e-6 for s in group
    )
    if not borderline:
        assert metrics.effective_goodput(group) == pytest.approx(in_time / duration)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 100))
def test_percentile_is_the_nearest_rank(values: list[float], q: int) -> None:
    rank = math.ceil(q / 100 * len(values))
    assert metrics.percentile(values, q) == sorted(values)[rank - 1]


def test_a_stall_shifts_the_timeline_and_is_counted_once() -> None:
    # 2 tokens/s; token 2 comes 1 s late, the rest keep the pace after it
    stream = Stream(arrival_time=0, token_times=np.array([1, 1.5, 3, 3.5, 4]), read_rate=2)
    (stall,) = metrics.stalls(stream)
    assert (stall.token_index, stall.wanted_time, stall.duration_s) == (2, 2.0, 1.0)
    assert metrics.rebuffer_s(stream) == 1.0
    assert metrics.ttft_s(stream) == 1.0
    assert metrics.end_to_end_s(stream) == 4.0


def test_tokens_ahead_of_the_reader_lose_their_worth() -> None:
    # 100 tokens at once: those that meet up to 10 unread weigh 1, from 20 on nothing
    stream = Stream(arrival_time=0, token_times=np.ones(100), read_rate=1)
    weights = metrics.token_weights(stream)
    assert weights[:11].tolist() == [1.0] * 11
    assert weights[16] == pytest.approx(0.5)
    assert weights[21:].tolist() == [0.0] * 79


def test_a_machine_never_stalls_and_every_token_counts() -> None:
    stream = Stream(arrival_time=0, token_times=np.array([1.0, 9.0, 9.0]))
    assert metrics.stalls(stream) == ()
    assert metrics.token_weights(stream).tolist() == [1, 1, 1]
    assert metrics.share_with_visible_stall([stream]) == 0


def test_a_stream_without_tokens_has_no_latency() -> None:
    stream = Stream(arrival_time=3, token_times=np.array([]), read_rate=4)
    assert math.isnan(metrics.ttft_s(stream))
    assert math.isnan(metrics.end_to_end_s(stream))
    assert metrics.raw_throughput([stream]) == 0
    assert math.isnan(metrics.percentile([], 99))


def test_share_of_readers_with_a_visible_stall() -> None:
    smooth = Stream(arrival_time=0, token_times=np.arange(4.0), read_rate=1)
    late = Stream(arrival_time=0, token_times=np.array([0, 1.3]), read_rate=1)
    almost = Stream(arrival_time=0, token_times=np.array([0, 1.2]), read_rate=1)
    assert metrics.share_with_visible_stall([smooth, late, almost]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("times", "rate"), [([2.0, 1.0], 4.0), ([[1.0]], 4.0), ([1.0], 0.0), ([1.0], float("nan"))]
)
def test_impossible_records_are_refused(times: list[float], rate: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Stream(arrival_time=0, token_times=np.array(times), read_rate=rate)


def test_qoe_by_hand() -> None:
    # 2 tokens/s, expected at 1.0, 1.5, 2.0 and 2.5 s after arrival
    on_time = Stream(arrival_time=10.0, token_times=[10.5, 10.5, 11.0, 12.5], read_rate=2.0)
    assert metrics.qoe(on_time) == 1.0
    # first token 1 s late: read at 2.0, 2.5, 3.0, 3.5; each 1 s late, areas up to 3.5
    late = Stream(arrival_time=10.0, token_times=[12.0] * 4, read_rate=2.0)
    assert metrics.qoe(late) == pytest.approx(1 - 4.0 / (2.5 + 2.0 + 1.5 + 1.0))
    # a stall of 1 s before the third: read at 0.5, 1.0, 2.5, 3.0; late by 0, 0, 0.5, 0.5
    stalled = Stream(arrival_time=0.0, token_times=[0.5, 0.6, 2.5, 2.6], read_rate=2.0)
    assert metrics.qoe(stalled) == pytest.approx(1 - 1.0 / (2.0 + 1.5 + 1.0 + 0.5))
    assert metrics.qoe(stalled, expected_ttft_s=0.5) == pytest.approx(
        1 - 2.0 / (2.5 + 2.0 + 1.5 + 1.0)
    )
    assert metrics.qoe(Stream(arrival_time=0.0, token_times=[], read_rate=2.0)) == 0.0
    assert math.isnan(metrics.qoe(Stream(arrival_time=0.0, token_times=[9.0])))


@given(streams)
def test_qoe_is_a_share_and_falls_with_a_later_start(stream: Stream) -> None:
    assert 0.0 <= metrics.qoe(stream) <= 1.0
    sooner = Stream(
        arrival_time=stream.arrival_time + 1.0,
        token_times=stream.token_times + 1.0,
        read_rate=stream.read_rate,
    )
    assert metrics.qoe(sooner) == pytest.approx(metrics.qoe(stream), abs=1e-6)
    if stream.num_tokens > 1:
        later = Stream(
            arrival_time=stream.arrival_time,
            token_times=stream.token_times + 5.0,
            read_rate=stream.read_rate,
        )
        assert metrics.qoe(later) <= metrics.qoe(stream) + 1e-9


@given(streams)
def test_waits_are_what_the_reader_waits(stream: Stream) -> None:
    _, waits, _ = walk(stream)
    np.testing.assert_allclose(metrics.waits_s(stream), waits, atol=1e-6)
    machine = Stream(arrival_time=0.0, token_times=stream.token_times)
    assert not metrics.waits_s(machine).any()
