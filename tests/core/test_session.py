"""Sessions: transitions, columns, block counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.invariants import check_waits_and_holds
from tokenflow.errors import InternalError
from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.session import IN_ENGINE, TRANSITIONS, Session
from tokenflow.session_table import SessionTable
from tokenflow.types import GenerateRequest, SessionState

S = SessionState


def make_table(
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
) -> SessionTable:
    return SessionTable(
        capacity_policy=policy,
        tokens_per_block=4,
        default_read_rate=6.0,
        max_seq_len=64,
        max_input_len=63,
        initial_rows=2,
    )


def make_request(number: int = 0, *, num_prompt: int = 5, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        input_token_ids=tuple(range(1, num_prompt + 1)),
        max_tokens=max_tokens,
        arrival_time=float(number),
        read_rate=2.0,
    )


PATHS: dict[SessionState, tuple[SessionState, ...]] = {
    S.WAITING: (),
    S.PREFILLING: (S.PREFILLING,),
    S.RUNNING: (S.PREFILLING, S.RUNNING),
    S.PAUSING: (S.PREFILLING, S.RUNNING, S.PAUSING),
    S.PREEMPTED: (S.PREFILLING, S.RUNNING, S.PAUSING, S.PREEMPTED),
    S.RESUMING: (S.PREFILLING, S.RUNNING, S.PAUSING, S.PREEMPTED, S.RESUMING),
    S.CANCELLING: (S.PREFILLING, S.CANCELLING),
}


def session_in(table: SessionTable, state: SessionState) -> Session:
    session = table.add(1, make_request(), 0.0)
    for step in PATHS[state]:
        table.transition(session, step, 1.0)
    return session


@pytest.mark.parametrize(("old", "new"), list(itertools.product(PATHS, SessionState)))
def test_only_listed_transitions_are_possible(old: SessionState, new: SessionState) -> None:
    table = make_table()
    session = session_in(table, old)
    if new in TRANSITIONS[old]:
        table.transition(session, new, 2.0)
        assert session.state is new
        assert table.count(new) == (0 if new is S.FINISHED else 1)
    else:
        with pytest.raises(InternalError, match=f"{old.name} -> {new.name}"):
            table.transition(session, new, 2.0)
        assert session.state is old


def test_rows_grow_keep_arrival_order_and_are_reused() -> None:
    table = make_table()
    sessions = [table.add(n, make_request(n), float(n)) for n in range(7)]
    assert table.columns(9.0).arrival_time.tolist() == [0, 1, 2, 3, 4, 5, 6]
    table.transition(sessions[3], S.FINISHED, 9.0)
    again = table.add(50, make_request(50), 50.0)
    assert again.slot == sessions[3].slot
    columns = table.columns(51.0)
    assert columns.arrival_time.tolist() == [0, 1, 2, 4, 5, 6, 50]
    assert columns.num_generated[-1] == 0
    assert np.isnan(columns.slack_s).all()
    assert len(table) == 7


def test_a_handle_is_never_taken_twice() -> None:
    table = make_table()
    table.add(1, make_request(), 0.0)
    with pytest.raises(InternalError):
        table.add(1, make_request(), 0.0)


def test_columns_follow_a_stream_through_pause_and_resume() -> None:
    table = make_table()
    session = table.add(1, make_request(num_prompt=5, max_tokens=8), 0.0)
    row = table.columns(0.0)
    # 5 + 8 tokens, the last one's KV is never written: 12 tokens, 3 blocks of 4.
    assert (row.num_blocks_needed[0], row.num_blocks_held[0]) == (3, 0)
    table.enter_engine(session, 77, 1.0)
    assert table.by_executor_id(77) is session
    assert table.columns(1.0).num_blocks_held[0] == 3
    table.transition(session, S.RUNNING, 2.0)
    table.deliver(session, [9, 9, 9, 9], 2.0)
    row = table.columns(3.0)
    assert row.started[0]
    assert row.num_generated[0] == 4
    assert row.slack_s[0] == pytest.approx(1.0)  # 4 tokens at 2/s, one second ago
    assert row.num_blocks_held[0] == 3  # the reservation does not shrink
    table.transition(session, S.PAUSING, 3.0)
    table.transition(session, S.PREEMPTED, 3.5)
    row = table.columns(3.5)
    assert row.num_blocks_held[0] == 0
    assert row.num_blocks_needed[0] == 3
    assert row.num_pauses[0] == 1
    assert row.wait_since_time[0] == 3.5
    assert table.by_executor_id(77) is None
    table.enter_engine(session, 78, 5.0)
    assert session.state is S.RESUMING
    assert session.num_enqueued_tokens == 9
    assert session.usage(6.0).paused_s == pytest.approx(1.5)


def test_who_waits_again_has_waited_since_its_arrival() -> None:
    table = make_table()
    session = table.add(1, make_request(1), 1.5)
    assert table.columns(2.0).wait_since_time[0] == 1.0
    table.enter_engine(session, 77, 3.0)
    assert table.columns(3.0).wait_since_time[0] == 3.0
    table.transition(session, S.WAITING, 4.0)
    assert table.columns(5.0).wait_since_time[0] == 1.0


PICKS = st.integers(0, 30)
MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "move", "move", "move", "hold", "answer"]), PICKS, PICKS),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(moves=MOVES)
def test_who_waits_and_who_is_held_is_known_without_a_walk(
    moves: list[tuple[str, int, int]],
) -> None:
    table = make_table()
    table.add(0, make_request(), 0.0)
    for now, (what, pick, how) in enumerate(moves, start=1):
        sessions = list(table)
        if what == "add" or not sessions:
            table.add(now, make_request(now), float(now))
            continue
        session = sessions[pick % len(sessions)]
        if what == "move":
            states = sorted(TRANSITIONS[session.state])
            table.transition(session, states[how % len(states)], float(now))
        elif what == "hold" and not session.answered:
            until = now + 1.0 + how if session.held_until is None else None
            table.hold(session, until, float(now))
        elif what == "answer" and session.state in IN_ENGINE:
            session.answered = True
            table.answered(session)
        check_waits_and_holds(table)


def test_max_utilization_counts_what_is_filled() -> None:
    table = make_table(CapacitySchedulerPolicy.MAX_UTILIZATION)
    session = table.add(1, make_request(num_prompt=5, max_tokens=8), 0.0)
    table.enter_engine(session, 1, 0.0)
    assert table.columns(0.0).num_blocks_held[0] == 2
    table.transition(session, S.RUNNING, 0.0)
    table.deliver(session, [1] * 4, 0.0)
    row = table.columns(0.0)
    assert (row.num_blocks_held[0], row.num_blocks_final[0]) == (3, 3)


def test_a_session_without_reader_never_runs_dry() -> None:
    table = make_table()
    request = GenerateRequest(
        request_id="m", input_token_ids=(1,), max_tokens=4, arrival_time=0.0, has_reader=False
    )
    session = table.add(1, request, 0.0)
    table.enter_engine(session, 1, 0.0)
    table.transition(session, S.RUNNING, 0.0)
    table.deliver(session, [1], 0.0)
    assert table.columns(1e6).slack_s[0] == np.inf
