"""Intervals: they contain the figure, narrow with more of it, and are the same twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.lab import bootstrap
from tokenflow import metrics

values = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30)


@settings(max_examples=30)
@given(values, st.integers(0, 5))
def test_an_interval_lies_within_the_values_and_is_repeatable(
    sample: list[float], seed: int
) -> None:
    for statistic in (bootstrap.mean, bootstrap.percentile(99)):
        found = bootstrap.interval(sample, statistic, num_resamples=200, seed=seed)
        slack = 1e-9 * max(1.0, max(sample))
        assert min(sample) - slack <= found.low <= found.high <= max(sample) + slack
        assert found == bootstrap.interval(sample, statistic, num_resamples=200, seed=seed)


@given(values)
def test_a_percentile_is_the_one_of_the_measures(sample: list[float]) -> None:
    for q in (50, 99):
        found = bootstrap.interval(sample, bootstrap.percentile(q), num_resamples=1)
        assert found.value == metrics.percentile(sample, q)


def test_the_interval_of_a_mean_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        found = bootstrap.interval(rng.normal(10.0, 2.0, size=40), num_resamples=400)
        covered += found.low <= 10.0 <= found.high
    assert 178 <= covered <= 199  # 95 %, a little less with 40 values


def test_more_values_narrow_it_and_another_seed_moves_it() -> None:
    rng = np.random.default_rng(4)
    few, many = rng.normal(size=20), rng.normal(size=2000)
    narrow, wide = bootstrap.interval(many), bootstrap.interval(few)
    assert narrow.high - narrow.low < (wide.high - wide.low) / 5
    assert bootstrap.interval(few, seed=1).low != wide.low


def test_large_samples_are_drawn_in_parts() -> None:
    found = bootstrap.interval(np.arange(300_000.0), num_resamples=20)
    assert found.low < found.value < found.high


def test_one_value_and_none() -> None:
    assert bootstrap.interval([2.5]) == bootstrap.Interval(2.5, 2.5, 2.5)
    assert math.isnan(bootstrap.interval([]).low)
    assert math.isnan(bootstrap.paired_ratio([1.0, 2.0], [0.0, 0.0]).value)
    assert math.isnan(bootstrap.paired_ratio([], []).value)
    with pytest.raises(ValueError, match="2 values cannot be paired with 1"):
        bootstrap.paired_ratio([1.0, 2.0], [1.0])


def test_pairing_takes_out_what_the_seeds_have_in_common() -> None:
    baseline = [10.0, 20.0, 40.0, 80.0]
    exact = bootstrap.paired_ratio([v * 0.5 for v in baseline], baseline)
    assert (exact.value, exact.low, exact.high) == pytest.approx((0.5, 0.5, 0.5))
    found = bootstrap.paired_ratio([5.5, 9.0, 21.0, 39.0], baseline)
    assert 0.45 <= found.low < found.value < found.high <= 0.55
