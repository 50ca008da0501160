"""What plans and commands say of a host tier: when they are due, what a resume is taken to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.core.harness import CONFIG, VOCAB_SIZE, Harness
from tests.scheduler.build import COSTS
from tests.support.stepped import SteppedExecutor
from tests.support.tracer import ListTracer
from tokenflow.answers import Answers
from tokenflow.config import ServingConfig
from tokenflow.costs import CostModel
from tokenflow.engine_side import EngineSide
from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN, ScriptedRunner
from tokenflow.inflight.scripts import pseudo_random
from tokenflow.output_lengths import OutputLengths
from tokenflow.policies import TokenflowPolicy, policy_from_config
from tokenflow.scheduler import plan
from tokenflow.scheduler_forecast import PrefillBudget
from tokenflow.scheduler_tiers import resume_ways
from tokenflow.scheduler_view import view_of
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.types import (
    Decision,
    GenerateRequest,
    KvView,
    SessionColumns,
    SessionState,
    Snapshot,
)

HOST = dataclasses.replace(CONFIG, kv_cache_host_memory_bytes=64 * 4 * KV_BYTES_PER_TOKEN)
TIERED = dataclasses.replace(HOST, kv_tiering=True)
_S = SessionState


# -- when a plan is due --------------------------------------------------------------------------


@pytest.mark.parametrize("batch_policy", ["guaranteed_no_evict", "max_utilization"])
def test_plans_go_on_while_all_run_if_there_is_something_to_copy(batch_policy: str) -> None:
    config = dataclasses.replace(TIERED, batch_scheduler_policy=batch_policy)
    policy = policy_from_config(config)
    h = Harness(config, lambda snapshot: plan(snapshot, policy))
    for first in (1, 30, 60):
        h.submit(tuple(range(first, first + 32)), 21, read_rate=0.1)
    for _ in range(7):
        h.step()
    assert h.coordinator.table.count(_S.RUNNING) == 3
    copied: list[int] = []
    for _ in range(12):
        due = h.coordinator.next_plan_time()
        assert due <= h.now + config.plan_interval_s
        if due <= h.now:
            h.plan()
        h.begin()
        h.end()
        copied.append(h.coordinator.counters.num_offloads_completed)
    assert copied[-1] >= copied[0] + 3, "as blocks fill"


def test_without_anything_to_copy_nothing_is_due_while_all_run() -> None:
    h = Harness(HOST)
    h.submit(max_tokens=20)
    for _ in range(3):
        h.step()
    assert h.coordinator.table.count(_S.RUNNING) == 1
    assert h.coordinator.next_plan_time() == float("inf")


# -- what a resume is taken to do ----------------------------------------------------------------


class RecordedCosts(CostModel):
    """Remembers what it was told of resumes: seconds, tokens computed, blocks loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.resumes: list[tuple[float, int, int]] = []

    def observe_resume(
        self, seconds: float, num_tokens: int, num_onboarded_blocks: int = 0
    ) -> None:
        self.resumes.append((seconds, num_tokens, num_onboarded_blocks))
        super().observe_resume(seconds, num_tokens, num_onboarded_blocks)


class Side:
    """The engine's side alone, told what to do."""

    def __init__(self, config: ServingConfig) -> None:
        engine = config.executor_config()
        self.executor = SteppedExecutor(ScriptedRunner(pseudo_random(97), VOCAB_SIZE), engine)
        self.table = SessionTable(
            capacity_policy=engine.scheduler_config.capacity_scheduler_policy,
            tokens_per_block=engine.tokens_per_block,
            default_read_rate=config.default_read_rate,
            max_seq_len=engine.max_seq_len,
            max_input_len=engine.max_input_len,
        )
        self.costs = RecordedCosts()
        lengths = OutputLengths()
        answers = Answers(lambda event: None, ListTracer(), lengths)
        self.side = EngineSide(self.executor, config, self.table, answers, self.costs, lengths)
        self.now = 0.0

    def add(self, handle: int, **fields: Any) -> Session:
        request = GenerateRequest(
            request_id=str(handle),
            input_token_ids=tuple(range(handle, handle + 20)),
            max_tokens=30,
            arrival_time=self.now,
        )
        session = self.table.add(handle, request, self.now)
        self.side.arrived(session, self.now)
        return session

    def apply(self, **decision: Any) -> None:
        self.side.commands.apply(Decision(**decision), self.now)

    def step(self, step_s: float = 0.1) -> None:
        self.executor.begin(self.now)
        self.now += step_s
        self.executor.end(self.now)
        self.side.feedback.on_responses(self.executor.await_responses(), self.now)
        self.side.feedback.on_stats(self.executor.get_latest_iteration_stats(), self.now)

    def paused(self, handle: int) -> Session:
        """One of 24 tokens or so: 6 blocks."""
        session = self.add(handle)
        self.apply(admit=(session.slot,))
        while session.num_tokens < 24:
            self.step()
        self.apply(pause=(session.slot,))
        self.step()
        assert session.state is _S.PREEMPTED
        return session


def column(columns: SessionColumns, name: str, session: Session) -> int:
    return int(getattr(columns, name)[columns.slot.tolist().index(session.slot)])


def test_a_loaded_resume_is_learned_with_its_blocks() -> None:
    """Else the load counts twice: in the round trip, and by the block."""
    s = Side(HOST)
    session = s.paused(1)
    s.table.set_kept(session, 3, 4)
    s.apply(resume=(session.slot,))
    assert column(s.table.columns(s.now), "num_host_blocks", session) == 4, "under way"
    start_time = s.now
    s.step(0.7)
    assert session.state is _S.RUNNING
    assert s.costs.resumes == [(s.now - start_time, 3, 4)]
    columns = s.table.columns(s.now)
    assert (session.num_host_blocks, column(columns, "num_host_blocks", session)) == (0, 0)


def test_a_resume_that_computes_by_choice_is_learned_as_such() -> None:
    """2 of 6 blocks are on the host and given up: 8 tokens more to compute, and none to load."""
    s = Side(TIERED)
    session = s.paused(1)
    s.table.set_kept(session, 2, 2)
    s.apply(resume=(session.slot,), recompute=(session.slot,))
    columns = s.table.columns(s.now)
    assert session.state is _S.RESUMING
    assert column(columns, "num_resume_tokens", session) == 10
    assert column(columns, "num_host_blocks", session) == 0
    view = view_of(snapshot_of(columns), TokenflowPolicy())
    row = columns.slot.tolist().index(session.slot)
    assert PrefillBudget(view).seconds(row) == pytest.approx(10 / COSTS.prefill_tokens_per_s)
    s.step()
    assert [tokens_and_blocks for _, *tokens_and_blocks in s.costs.resumes] == [[10, 0]]


def test_what_is_given_up_is_never_more_than_there_is() -> None:
    s = Side(TIERED)
    session = s.paused(1)
    s.table.set_kept(session, 1, 6)  # the last of 6 blocks is not full
    s.apply(resume=(session.slot,), recompute=(session.slot,))
    assert session.num_resume_tokens == session.num_tokens < 1 + 6 * 4 + 1


def test_an_engine_that_loads_what_it_finds_is_not_taken_to_compute() -> None:
    s = Side(HOST)
    session = s.paused(1)
    s.table.set_kept(session, 1, 5)
    s.apply(resume=(session.slot,), recompute=(session.slot,))
    assert (session.num_resume_tokens, session.num_host_blocks) == (1, 5)


def snapshot_of(columns: SessionColumns, **costs: float) -> Snapshot:
    return Snapshot(
        now=10.0,
        sessions=columns,
        kv=KvView(
            capacity_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
            tokens_per_block=4,
            num_total_blocks=40,
            num_free_blocks=20,
            max_batch_size=3,
            num_host_blocks=64,
            has_tiering=True,
        ),
        costs=dataclasses.replace(COSTS, **costs),
    )


def test_loads_under_way_are_on_the_link_until_their_stream_runs() -> None:
    """Computing 5 blocks takes 7.7 ms. Loading them takes 5 ms, behind another's 5 blocks 10."""
    s = Side(TIERED)
    first, second = s.paused(1), s.paused(50)
    for session in (first, second):
        s.table.set_kept(session, 1, 5)

    def recomputes() -> bool:
        columns = s.table.columns(s.now)
        ways = resume_ways(snapshot_of(columns, onboard_block_s=0.001))
        return bool(ways.recomputes[columns.slot.tolist().index(second.slot)])

    assert not recomputes()
    s.apply(resume=(first.slot,))
    assert first.state is _S.RESUMING
    assert recomputes()
    s.step()
    assert first.state is _S.RUNNING
    assert not recomputes()


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_a_load_that_came_to_nothing_is_not_on_the_link(end: str) -> None:
    s = Side(TIERED)
    session = s.paused(1)
    s.table.set_kept(session, 1, 5)
    s.apply(resume=(session.slot,))
    if end == "lost":
        s.executor.lose()
        s.side.lost("it ended", s.now)
        assert session.state is _S.PREEMPTED
        assert session.num_resume_tokens == session.num_tokens
    else:
        s.table.transition(session, _S.CANCELLING, s.now)
    assert not s.table.columns(s.now).num_host_blocks.any()


def test_rows_are_used_again_without_what_they_held() -> None:
    s = Side(HOST)
    session = s.paused(1)
    s.table.set_kept(session, 1, 5)
    s.table.transition(session, _S.FINISHED, s.now)
    again = s.add(2)
    assert again.slot == session.slot
    np.testing.assert_array_equal(s.table.columns(s.now).num_host_blocks, [0])


@pytest.mark.parametrize("num_events", [0, 1000])
@pytest.mark.parametrize("config", [CONFIG, HOST], ids=["device", "host"])
def test_the_tiers_are_known_from_the_start_of_an_engine(
    config: ServingConfig, num_events: int
) -> None:
    """And the first iteration says the same of their sizes."""
    h = Harness(dataclasses.replace(config, kv_event_buffer_max_size=num_events))
    num_host_blocks = 64 if config is HOST else 0

    def sizes() -> tuple[int, int, int, int]:
        tiers = h.coordinator.tiers
        assert tiers is not None
        told = h.coordinator.snapshot(h.now).kv.num_host_blocks
        return tiers.block_bytes, tiers.num_device_blocks, tiers.num_host_blocks, told

    expected = (4 * KV_BYTES_PER_TOKEN, 40, num_host_blocks, num_host_blocks)
    assert sizes() == expected
    h.submit(tuple(range(20)), 30)
    for _ in range(8):
        h.step()
    assert sizes() == expected
    h.lose_engine()
    assert h.coordinator.tiers is None
    assert h.coordinator.snapshot(h.now).kv.num_host_blocks == 0
    h.start_engine()
    assert sizes() == expected


# -- the trace -----------------------------------------------------------------------------------


class OnePlan:
    """The given decision once, and before it whatever starts those who wait."""

    def __init__(self) -> None:
        self.next: Decision | None = None

    def __call__(self, snapshot: Snapshot) -> Decision:
        decision, self.next = self.next, None
        s = snapshot.sessions
        return decision or Decision(admit=tuple(s.slot[s.state == _S.WAITING].tolist()))


def test_plans_say_what_they_ask_of_the_tiers_if_anything() -> None:
    planner = OnePlan()
    h = Harness(TIERED, planner)
    handles = [h.submit(tuple(range(first, first + 9)), 30) for first in (1, 40)]
    for _ in range(3):
        h.step()
    slots = [session.slot for session in h.coordinator.table]
    planner.next = Decision(pause=(slots[0],))
    h.step()
    h.step()
    planner.next = Decision(prefetch=(slots[0],), offload=((slots[1], 2),))
    h.step()
    planner.next = Decision(resume=(slots[0],), recompute=(slots[0],))
    h.step()
    plans = h.tracer.named("plan")
    parts = ("recompute", "prefetch", "offload")
    said = [{part: entry[part] for part in parts if part in entry} for entry in plans]
    assert said == [{}, {}, {"prefetch": 1, "offload": 1}, {"recompute": 1}]
    h.run_to_empty()
    assert [h.end_of(handle) is not None for handle in handles] == [True, True]
