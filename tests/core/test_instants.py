"""Instants by handle: against a plain dictionary, and how much is kept of what is over."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow.instants import Instants

HANDLES = st.integers(0, 5)
TIMES = st.integers(0, 9).map(float)
ACTIONS = st.one_of(
    st.tuples(st.just("set"), HANDLES, TIMES),
    st.tuples(st.just("discard"), HANDLES, st.just(0.0)),
    st.tuples(st.just("pop"), st.just(0), TIMES),
)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=60))
def test_they_are_what_was_set_last(actions: list[tuple[str, int, float]]) -> None:
    instants, model = Instants(), dict[int, float]()
    for what, handle, time in actions:
        if what == "set":
            instants.set(handle, time)
            model[handle] = time
        elif what == "discard":
            instants.discard(handle)
            model.pop(handle, None)
        else:
            due = sorted((at, of) for of, at in model.items() if at <= time)
            assert instants.pop_due(time) == [of for _, of in due]
            for _, of in due:
                del model[of]
        assert len(instants) == len(model)
        assert instants.next_time() == min(model.values(), default=math.inf)
        assert [instants.get(of) for of in range(6)] == [model.get(of) for of in range(6)]
    assert instants.pop_due(math.inf) == sorted(model, key=lambda of: (model[of], of))


def test_many_that_end_early_leave_nothing_behind() -> None:
    instants = Instants()
    for handle in range(10_000):
        instants.set(handle, 1e6 + handle)
        instants.discard(handle - 3)
        assert len(instants._heap) <= 64
    assert instants.next_time() == 1e6 + 9_997
    assert instants.pop_due(2e6) == [9_997, 9_998, 9_999]
    assert instants.next_time() == math.inf


def test_what_ends_all_at_once_is_forgotten_without_anything_new() -> None:
    instants = Instants()
    for handle in range(10_000):
        instants.set(handle, 1e6 + handle)
    for handle in range(1, 10_000):
        instants.discard(handle)
        assert len(instants._heap) <= max(64, 2 * len(instants))
    assert instants.next_time() == 1e6


def test_an_instant_that_is_moved_again_and_again_is_one() -> None:
    instants = Instants()
    for n in range(10_000):
        instants.set(7, 1e6 + n)
        assert len(instants._heap) <= 64
    assert instants.pop_due(2e6) == [7]


def test_those_that_are_over_go_too_when_the_others_come_due() -> None:
    instants = Instants()
    for n in range(100):
        instants.set(n, 2.0)
        instants.set(n, 1.0)
    assert len(instants.pop_due(1.0)) == 100
    assert len(instants._heap) == 0 == len(instants)
