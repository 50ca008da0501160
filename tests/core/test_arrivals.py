"""Moving averages of arrivals: rates, blocks, and how soon a burst is seen and forgotten."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.arrivals import RATES, forgotten_s, gamma, measure, noticed, on_off, onsets, poisson
from tokenflow.arrivals import ArrivalAverages
from tokenflow.types import ArrivalEstimate

NUM_RUNS = 60


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def learned(rate: float, seconds: float, num_blocks: int = 3) -> tuple[ArrivalAverages, float]:
    rng, averages, now = random.Random(5), ArrivalAverages(), 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        averages.observe(now, num_blocks)
    return averages, now


def test_before_the_first_arrival_nothing_is_expected() -> None:
    assert ArrivalAverages().estimate(7.0) == ArrivalEstimate()


@pytest.mark.parametrize("rate", RATES)
def test_the_long_average_is_the_rate(rate: float) -> None:
    """Twenty seconds of memory: a standard deviation of sqrt(rate / 40)."""
    found = []
    for seed in range(20):
        rng, averages, now = random.Random(seed), ArrivalAverages(), 0.0
        while now < 200.0:
            now += rng.expovariate(rate)
            averages.observe(now, 1)
        # Looked at between arrivals: at one, the average is higher by its weight.
        found.append(averages.estimate(now + rng.uniform(0, 1 / rate)).long_rate)
    deviation = math.sqrt(rate / 40 / 20)
    assert abs(sum(found) / len(found) - rate) <= 4 * deviation + 0.03


@pytest.mark.parametrize("rate", RATES)
def test_steady_arrivals_are_seldom_taken_for_a_burst(rate: float) -> None:
    """At most 10 false alarms per 1,000 arrivals (perf/arrivals.py: 3.5 to 6.5)."""
    assert onsets(poisson(rate), 3_000, seed=1)[0] <= 30


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("factor", "at_most"), [(100, 4), (30, 5)])
def test_a_burst_is_seen_within_a_few_arrivals(rate: float, factor: int, at_most: int) -> None:
    seen = [noticed(rate, factor, seed) for seed in range(NUM_RUNS)]
    assert all(num is not None for num, _ in seen)
    assert median([float(num or 0) for num, _ in seen]) <= at_most
    assert median([seconds for _, seconds in seen]) <= 0.5


@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_on_a_quiet_server_the_third_of_arrivals_that_come_together_is_a_burst(rate: float) -> None:
    averages, now = learned(rate, 300.0)
    bursts = []
    for i in range(4):
        averages.observe(now + 5.0 + 0.02 * i, 3)
        bursts.append(averages.estimate(now + 5.0 + 0.02 * i).burst)
    assert bursts == [False, False, True, True]


@pytest.mark.parametrize("rate", RATES)
def test_a_burst_is_forgotten_within_seconds(rate: float) -> None:
    ends = [forgotten_s(rate, 100, seed) for seed in range(NUM_RUNS)]
    known = sorted(end for end in ends if end is not None)
    assert len(known) == NUM_RUNS
    assert known[-1] <= 4.0
    assert median(known) <= 2.5


def test_a_crowd_of_four_hundred_is_forgotten_within_seconds() -> None:
    averages, now = learned(0.5, 60.0)
    for i in range(400):
        averages.observe(now + 0.001 * i, 3)
    assert averages.estimate(now + 0.5).burst
    assert not averages.estimate(now + 0.4 + 8.0).burst


@pytest.mark.parametrize("rate", RATES)
def test_gamma_arrivals_are_bursts_most_of_the_time(rate: float) -> None:
    """With a coefficient of variation of 4 most arrivals come in clusters, and most of them are
    seen as such; the gaps between are long enough to forget."""
    num_onsets, num_inside = onsets(gamma(rate), 2_000, seed=2)
    assert 0.4 <= num_inside / 2_000 <= 0.8
    assert num_onsets >= 60


@pytest.mark.parametrize("rate", RATES)
def test_every_burst_of_on_off_arrivals_is_seen_anew(rate: float) -> None:
    seen = list(on_off(rate, 30, seed=3))
    assert all(num is not None for num in seen)
    assert median([float(num or 0) for num in seen]) <= 5


def test_a_lasting_rise_becomes_what_is_usual() -> None:
    averages, start = learned(0.5, 60.0)
    rng, now, bursts = random.Random(6), start, []
    while now < start + 90.0:
        now += rng.expovariate(10.0)
        averages.observe(now, 3)
        bursts.append((now, averages.estimate(now).burst))
    assert any(burst for at, burst in bursts if at < start + 1.0)
    last = [burst for at, burst in bursts if at > start + 45.0]
    assert sum(last) <= 0.1 * len(last)


def test_blocks_per_arrival_are_those_of_the_burst_while_it_lasts() -> None:
    averages, now = learned(1.0, 60.0, num_blocks=2)
    assert averages.estimate(now).blocks_per_arrival == pytest.approx(2.0)
    for i in range(8):
        averages.observe(now + 3.0 + 0.02 * i, 10)
    burst = averages.estimate(now + 3.2)
    assert burst.burst
    assert burst.blocks_per_arrival == pytest.approx(10.0, rel=0.1)
    later = averages.estimate(now + 15.0)
    assert not later.burst
    assert 2.0 < later.blocks_per_arrival < 6.0


def test_rates_fade_without_arrivals_and_the_mean_of_the_blocks_stays() -> None:
    averages, now = learned(2.0, 60.0)
    soon, late = averages.estimate(now + 1.0), averages.estimate(now + 1e6)
    assert 0 < soon.short_rate < averages.estimate(now).short_rate
    assert late.short_rate == late.long_rate == 0.0
    assert late.blocks_per_arrival == pytest.approx(3.0)
    assert not late.burst


arrival_lists = st.lists(
    st.tuples(st.floats(-0.5, 30) | st.floats(0, 0.05), st.integers(0, 50)), max_size=60
)


@settings(deadline=None, max_examples=60)
@given(arrivals=arrival_lists, looks=st.lists(st.floats(-5, 100), max_size=5))
def test_estimates_are_finite_bounded_and_change_nothing(arrivals, looks) -> None:
    averages, untouched, now = ArrivalAverages(), ArrivalAverages(), 10.0
    for gap, num_blocks in arrivals:
        now += gap
        averages.observe(now, num_blocks)
        untouched.observe(now, num_blocks)
        for look in looks:
            estimate = averages.estimate(now + look)
            values = dataclasses.astuple(estimate)
            assert all(math.isfinite(v) and v >= 0 for v in values)
            assert estimate.blocks_per_arrival <= 50 + 1e-9
    assert averages.estimate(now) == untouched.estimate(now)


@settings(deadline=None, max_examples=60)
@given(arrivals=arrival_lists, later=st.lists(st.floats(0, 20), min_size=2, max_size=6))
def test_without_arrivals_a_burst_ends_once_and_rates_only_fall(arrivals, later) -> None:
    averages, now = ArrivalAverages(), 10.0
    for gap, num_blocks in arrivals:
        now += gap
        averages.observe(now, num_blocks)
    looks = [averages.estimate(now + at) for at in sorted(later)]
    for before, after in itertools.pairwise(looks):
        assert after.short_rate <= before.short_rate
        assert after.long_rate <= before.long_rate
        assert before.burst or not after.burst


def test_the_table_has_every_figure() -> None:
    row = measure(1.0, num=200, num_runs=5)
    assert all(math.isfinite(value) for value in row.values())
    assert {"false_alarms", "x10_arrivals", "forgotten_s", "gamma_share", "on_off_seen"} <= set(row)
