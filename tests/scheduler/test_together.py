"""Steps made together in virtual time say what the same steps say one by one, to the byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimStep
from perf.virtual.workloads import demo
from tests.support.tracer import ListTracer
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, Snapshot


class SummedCosts:
    """A step's seconds from its sums, as DecodeCosts wants it."""

    num_asked = 0

    def __call__(self, chunks: Sequence[SequenceChunk], step: int) -> float:
        num_decode = sum(len(c.token_ids) == 1 for c in chunks)
        num_prefill = sum(len(c.token_ids) for c in chunks) - num_decode
        num_read = sum(c.start + len(c.token_ids) for c in chunks)
        return self._seconds(num_decode, num_read) + 1e-3 * num_prefill

    def decode_s(self, num_sequences: int, num_context_tokens: int) -> float:
        SummedCosts.num_asked += 1
        return self._seconds(num_sequences, num_context_tokens)

    @staticmethod
    def _seconds(num_decode: int, num_read: int) -> float:
        return 0.02 + 0.001 * num_decode + 1e-5 * num_read


def everything(
    requests: Sequence[SimRequest], engine: SimEngine, policy: Policy, together: bool, observe: bool
) -> list[Any]:
    """All that a run says: what plans were made from and decided, the trace, the result."""
    said: list[Any] = []

    def planner(snapshot: Snapshot) -> Decision:
        columns = dataclasses.asdict(snapshot.sessions)
        said.append({name: column.tobytes() for name, column in columns.items()})
        decision = plan(snapshot, policy)
        said.append((snapshot.now, snapshot.kv, snapshot.costs, snapshot.arrivals, decision))
        if snapshot.lengths is not None:
            lengths = dataclasses.asdict(snapshot.lengths)
            said.append({name: column.tobytes() for name, column in lengths.items()})
        return decision

    tracer = ListTracer()
    look: Callable[[SimStep], None] | None = said.append if observe else None
    simulation = Simulation(
        requests, planner, engine, tracer=tracer, observe=look, together=together
    )
    result = simulation.run()
    seqs = [
        (q.token_times, q.end, q.error, repr(q.end_time), q.usage, q.retryable) for q in result.seqs
    ]
    return [said, tracer.events, seqs, dataclasses.replace(result, seqs=[])]


def assert_same(
    requests: Sequence[SimRequest],
    engine: SimEngine,
    policy: Policy | None = None,
    *,
    observe: bool = False,
) -> None:
    policy = policy or TokenflowPolicy()
    one_by_one = everything(requests, engine, policy, False, observe)
    assert everything(requests, engine, policy, True, observe) == one_by_one


REQUESTS = st.lists(
    st.builds(
        SimRequest,
        arrival_time=st.floats(0, 3),
        num_prompt_tokens=st.integers(6, 40),
        max_tokens=st.integers(1, 70),
        limit_tokens=st.sampled_from([None, None, 70, 90]),
        read_rate=st.sampled_from([2.0, 6.0, 20.0, None]),
        priority=st.sampled_from([0.5, 0.5, 0.9]),
        pausable=st.sampled_from([True, True, True, False]),
        num_shared_tokens=st.sampled_from([0, 0, 6]),
        cancel_after_s=st.sampled_from([None, None, None, 0.4, 1.3]),
    ),
    min_size=1,
    max_size=9,
)
ENGINES = st.builds(
    SimEngine,
    max_batch_size=st.integers(2, 6),
    num_total_blocks=st.integers(30, 60),
    tokens_per_block=st.sampled_from([4, 8]),
    max_num_tokens=st.sampled_from([16, 64]),
    max_seq_len=st.sampled_from([112, 200]),
    capacity_policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
    lease_tokens=st.sampled_from([0, 0, 15]),
    step_base_s=st.just(0.02),
    prefill_tokens_per_s=st.just(800.0),
    response_delays_s=st.sampled_from([(0.002,), (0.002, 0.05, 0.0)]),
    step_factors=st.sampled_from([(1.0,), (1.0, 1.3, 0.7)]),
    num_host_blocks=st.sampled_from([0, 20, 60]),
    kv_tiering=st.booleans(),
    block_bytes=st.just(1 << 20),
    copy_bytes_per_s=st.sampled_from([5e7, 4e9]),
    has_kv_events=st.sampled_from([True, True, False]),
    step_cost=st.sampled_from([None, SummedCosts()]),
)


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, engine=ENGINES, is_baseline=st.booleans(), observe=st.booleans())
def test_any_load_on_any_engine(
    requests: list[SimRequest], engine: SimEngine, is_baseline: bool, observe: bool
) -> None:
    if not engine.num_host_blocks:
        engine = dataclasses.replace(engine, kv_tiering=False)
    policy = FcfsReservePolicy() if is_baseline else TokenflowPolicy()
    assert_same(requests, engine, policy, observe=observe)


POOL_BOUND = SimEngine(capacity_policy="max_utilization", num_total_blocks=48, max_batch_size=16)
TIERED = SimEngine(
    capacity_policy="max_utilization",
    num_total_blocks=64,
    num_host_blocks=200,
    copy_bytes_per_s=2e8,
)


@pytest.mark.parametrize(
    "engine",
    [
        SimEngine(step_cost=SummedCosts()),
        POOL_BOUND,
        TIERED,
        dataclasses.replace(TIERED, kv_tiering=True),
    ],
)
def test_the_demo(engine: SimEngine) -> None:
    requests = [
        dataclasses.replace(r, num_shared_tokens=20 * (i % 2)) for i, r in enumerate(demo())
    ]
    assert_same(requests, engine)


def test_most_steps_of_a_quiet_load_are_made_together() -> None:
    """Else the other tests compare a run with itself."""
    requests = [
        SimRequest(arrival_time=0.0, num_prompt_tokens=30, max_tokens=300) for _ in range(6)
    ]
    SummedCosts.num_asked = 0
    Simulation(
        requests, lambda s: plan(s, TokenflowPolicy()), SimEngine(step_cost=SummedCosts())
    ).run()
    assert SummedCosts.num_asked > 280
