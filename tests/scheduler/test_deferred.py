"""What is written down later, or worked out when somebody asks, is what it would have been."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.test_costs import iteration
from tokenflow.costs import CostModel
from tokenflow.reader import Reader


def state(reader: Reader) -> tuple[object, ...]:
    later = reader.state.unread_time + 1.7
    return (reader.state, reader.num_delivered, reader.stall_s(later), reader.rate)


@given(
    rate=st.floats(0.5, 40.0),
    gaps=st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.0625, 0.1, 0.3, 2.0]), max_size=60),
    is_declared=st.booleans(),
    num_acknowledged=st.integers(0, 60),
)
def test_tokens_delivered_one_by_one_or_together(
    rate: float, gaps: list[float], is_declared: bool, num_acknowledged: int
) -> None:
    """To the bit, also where a token comes at the very instant at which the reader runs dry."""
    one_by_one, together = (Reader(rate if is_declared else None, rate) for _ in range(2))
    now, times = 3.0, []
    for reader in (one_by_one, together):
        reader.deliver(1, now)
    for gap in gaps:
        now += gap
        times.append(now)
        one_by_one.deliver(1, now)
    together.deliver_each(times)
    assert state(together) == state(one_by_one)
    for reader in (one_by_one, together):
        reader.acknowledge(num_acknowledged, now + 0.6)
    assert state(together) == state(one_by_one)


@pytest.mark.parametrize("num", [0, 1, 29, 30, 31, 63, 64, 263, 264, 500, 2500])
def test_the_costs_do_not_depend_on_who_asked_when(num: int) -> None:
    rng = random.Random(num)
    asked_often, asked_once = CostModel(), CostModel()
    for i in range(num):
        num_gen = rng.randint(1, 8)
        prefill = rng.choice([0, 64, 256]) if i % 90 < 20 else 0
        entry = iteration(
            num_gen, num_gen * rng.randint(50, 400), prefill, extra=rng.random() * 0.01
        )
        for model in (asked_often, asked_once):
            model.observe_iteration(entry)
        asked_often.estimate(0.05)
    assert asked_once.estimate(0.05) == asked_often.estimate(0.05)
    assert asked_once.num_observed == num


@pytest.mark.parametrize("num_more", [1, 5, 7])
def test_the_shape_is_that_of_every_eighth_iteration(num_more: int) -> None:
    """Of the same ones, whoever asks in between; only the level follows each iteration."""
    rng = random.Random(num_more)
    model, asked_later = CostModel(), CostModel()
    proportions: list[float] = []
    for i in range(400 + num_more):
        num_gen = rng.randint(1, 8)
        entry = iteration(num_gen, num_gen * rng.randint(50, 400), 64, extra=rng.random() * 0.01)
        model.observe_iteration(entry)
        asked_later.observe_iteration(entry)
        if i + 1 == 400:
            proportions.append(_proportion(model))
    assert [_proportion(model), _proportion(asked_later)] == pytest.approx(
        2 * proportions, rel=1e-12
    )
    for _ in range(8 - num_more):
        model.observe_iteration(entry)
    assert _proportion(model) != pytest.approx(proportions[0], rel=1e-9)


def _proportion(model: CostModel) -> float:
    costs = model.estimate(0.05)
    return costs.step_per_sequence_s / costs.step_base_s
