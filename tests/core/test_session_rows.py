"""SessionRows against a plain list of dicts, through gaps and growth."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from tokenflow.reader import ReaderState
from tokenflow.session_rows import SessionRows

_TAKE = st.tuples(st.just("take"), st.integers(0, 99), st.integers(0, 99))
_OTHER = st.tuples(st.sampled_from(["give", "set", "set_each"]), st.integers(0, 99), st.integers(0))


@given(st.integers(1, 6), st.lists(_TAKE | _OTHER, max_size=40))
@settings(max_examples=150, deadline=None)
def test_rows_are_listed_in_order_with_what_was_written(num: int, acts: list) -> None:
    rows, model = SessionRows(num), {}
    for act, pick, value in acts:
        look(rows, model)
        value %= 1 << 40
        if act == "take":
            slot = rows.take()
            assert slot not in model
            rows.set_float("read_rate", slot, 1.0 + value)
            rows.set_int("held", slot, value % 2)
            model[slot] = (1.0 + value, bool(value % 2), 0)
        elif model:
            slot = list(model)[pick % len(model)]
            rate, held, _ = model[slot]
            if act == "give":
                rows.give_back(slot)
                del model[slot]
            elif act == "set":
                rows.set_int("num_generated", slot, value)
                model[slot] = (rate, held, value)
            else:
                slots = list(model)[pick % len(model) :]
                states = [ReaderState(0.0, 0.0, 2.0 + s) for s in slots]
                rows.set_progress(slots, [value + s for s in slots], states)
                for s in slots:
                    model[s] = (2.0 + s, model[s][1], value + s)
    look(rows, model)


def look(rows: SessionRows, model: dict[int, tuple[float, bool, int]]) -> None:
    columns = rows.columns(0.0)
    assert columns.slot.tolist() == list(model)
    found = zip(
        columns.read_rate.tolist(),
        columns.held.tolist(),
        columns.num_generated.tolist(),
        strict=True,
    )
    assert list(found) == list(model.values())
    assert not columns.started.any()
    assert not columns.num_host_blocks.any()


def test_columns_are_copies() -> None:
    rows = SessionRows(2)
    slot = rows.take()
    rows.set_float("read_rate", slot, 4.0)
    before = rows.columns(0.0)
    rows.set_int("num_generated", slot, 7)
    rows.set_float("priority", slot, 1.0)
    assert before.num_generated.tolist() == [0]
    assert before.priority.tolist() == [0.0]
