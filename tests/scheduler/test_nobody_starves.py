"""Nobody starves: what is promised of every load that can be carried, and of every other one.

A load can clearly be carried if everybody who may be there at once asks for at most half of the
engine's time at mid-life, by its true costs (schedulable.py). Then each request has its first token
within a bound that is known beforehand, no reader sees a stall, nobody is paused against its slack,
everybody gets everything, and a stream without a reader stands still for a bounded time.

Beyond that newcomers wait; those who started do not pay for them, and every request still ends.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from perf.virtual.values import SimEngine, SimRequest, SimSeq
from tests.scheduler.outcomes import MAX_UTIL, NO_EVICT, Outcome
from tests.scheduler.pauses import returns
from tests.scheduler.schedulable import (
    POLICY,
    first_token_bound_s,
    num_blocks,
    peak_share,
    rate,
    schedulable_part,
    step_s,
    turn_s,
)
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, stalls
from tokenflow.types import EndReason

SOAK = int(os.environ.get("TOKENFLOW_SOAK", "1"))
# A run takes a second, and a smaller work is another story more often than the same one: the
# counterexample is shown as it was found.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

COSTS = (
    {},  # the fitted CPU engine
    {
        "step_base_s": 0.01,
        "step_per_sequence_s": 3e-4,
        "step_per_context_token_s": 4e-7,
        "prefill_tokens_per_s": 15_000.0,
    },
    {
        "step_base_s": 0.02,
        "step_per_sequence_s": 2e-3,
        "step_per_context_token_s": 1e-5,
        "prefill_tokens_per_s": 4000.0,
    },
)
HOSTS = (
    {},
    {"num_host_blocks": 24, "copy_bytes_per_s": 1e9},
    {"num_host_blocks": 300, "copy_bytes_per_s": 2e9},
    {"num_host_blocks": 24, "copy_bytes_per_s": 1e9, "kv_tiering": True},
    {"num_host_blocks": 300, "copy_bytes_per_s": 2e9, "kv_tiering": True},
)
ODDITIES = (
    {},
    {},
    {"lease_tokens": 24},
    {"response_delays_s": (0.002, 0.04, 0.001)},
    {"has_kv_events": False},
    {"max_num_tokens": 128},
)


@st.composite
def engines(draw: st.DrawFn) -> SimEngine:
    """Small engines of every kind; all are cold, the first requests meet one that knows nothing."""
    return SimEngine(
        max_batch_size=draw(st.sampled_from([4, 6, 12])),
        num_total_blocks=draw(st.sampled_from([32, 48, 150])),
        capacity_policy=draw(st.sampled_from([NO_EVICT, MAX_UTIL])),
        **draw(st.sampled_from(COSTS)),
        **draw(st.sampled_from(HOSTS)),
        **draw(st.sampled_from(ODDITIES)),
    )


@st.composite
def works(draw: st.DrawFn, rates: Sequence[float]) -> list[SimRequest]:
    """A burst, Poisson arrivals, or bursts with pauses between them."""
    mean_gap_s = draw(st.sampled_from([0.003, 0.1, 0.4, 0.8]))
    longest_prompt = draw(st.sampled_from([40, 150, 600]))
    longest_answer = draw(st.sampled_from([60, 150, 400]))
    asked = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "chance": st.floats(0.01, 1.0),
                    "quiet_s": st.sampled_from([0.0] * 11 + [6.0]),
                    "num_prompt_tokens": st.integers(4, longest_prompt),
                    "max_tokens": st.integers(longest_answer // 4, longest_answer),
                    "read_rate": st.sampled_from([*rates, None]),
                    "priority": st.sampled_from([0.5, 0.5, 0.1, 0.9]),
                    "pausable": st.sampled_from([True] * 9 + [False]),
                    "cancel_after_s": st.sampled_from([None] * 8 + [0.3, 4.0]),
                }
            ),
            min_size=24,
            max_size=48,
        )
    )
    now, work = 0.0, []
    for fields in asked:
        now += fields.pop("quiet_s") - mean_gap_s * math.log(fields.pop("chance"))
        work.append(SimRequest(arrival_time=now, **fields))
    return work


def visible(seq: SimSeq) -> list[tuple[float, float]]:
    """(begin, end) of every stall that its reader saw."""
    found = stalls(seq.stream, CLIENT_VISIBLE_STALL_S)
    return [(stall.wanted_time, stall.end_time) for stall in found]


def assert_all_end(run: Outcome) -> None:
    """Everybody got everything, unless its client left: then the end came in that instant."""
    for seq in run.result.seqs:
        leave_after_s = seq.request.cancel_after_s
        if seq.end is EndReason.CANCELLED:
            assert leave_after_s is not None
            assert seq.end_time == pytest.approx(seq.request.arrival_time + leave_after_s)
        else:
            assert len(seq.token_times) == seq.request.max_tokens


def assert_never_idle(run: Outcome) -> None:
    """The engine is not without work for half a second while somebody is there."""
    times = [event["time"] for event in run.tracer.named("iteration")]
    for seq in run.result.seqs:
        begin, end = seq.request.arrival_time, seq.end_time
        inside = [begin, *(t for t in times if begin < t < end), end]
        assert all(b - a <= 0.5 for a, b in itertools.pairwise(inside)), seq.request


@settings(
    max_examples=20 * SOAK,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(engines(), works([1.0, 2.0, 3.0, 4.0, 6.0, 8.0]))
def test_nobody_starves_while_the_load_can_be_carried(
    engine: SimEngine, work: list[SimRequest]
) -> None:
    work = schedulable_part(work, engine)
    run = Outcome(work, engine)
    assert_all_end(run)
    assert_never_idle(run)
    for seq in run.result.seqs:
        bound_s = first_token_bound_s(seq.request, work, engine)
        first = seq.token_times[0] if seq.token_times else seq.end_time
        assert first - seq.request.arrival_time <= bound_s, (seq.request, bound_s)
        assert not visible(seq), seq.request
    assert run.result.num_forced == run.result.num_internal_pauses == 0
    longest_s = POLICY.max_machine_pause_s + POLICY.max_bypass_s + turn_s(work, engine)
    for seq in run.result.seqs:
        if seq.request.read_rate is None:
            assert seq.usage is not None
            assert seq.usage.paused_s <= seq.num_pauses * longest_s


def possible_alone(work: Sequence[SimRequest], engine: SimEngine) -> list[SimRequest]:
    """Those that the engine could serve if only few others were there."""
    return [
        r
        for r in work
        if num_blocks(r, engine) <= engine.num_total_blocks
        and rate(r) * step_s(engine, engine.max_batch_size, 300.0) <= 0.5
    ]


@settings(
    max_examples=8 * SOAK,
    phases=PHASES,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
@given(engines(), works([6.0, 8.0, 9.0, 16.0]))
def test_nobody_who_started_starves_for_newcomers_in_any_load(
    engine: SimEngine, work: list[SimRequest]
) -> None:
    """Up to several times what the engine can do: nobody is let in while a paused reader has run
    dry and was not asked back. What a newcomer's place costs a reader is bounded, but with a few
    slots more than where the load can be carried: streams that are due at once may take each
    other's."""
    work = possible_alone(work, engine)
    assume(len(work) >= 4 and peak_share(work, engine) > 1.0)
    run = Outcome(work, engine)
    assert_all_end(run)
    assert_never_idle(run)
    admit_times = [event["time"] for event in run.tracer.named("admit")]
    for pause, late_s in returns(run):
        dry_time, asked_time = pause["time"] + pause["slack_s"], pause["asked_time"]
        until_time = min(asked_time, dry_time + late_s)
        assert not any(dry_time < time < until_time for time in admit_times), pause
        if pause["why"] == "for waiting":
            assert late_s <= 2.0, pause
    assert run.result.num_internal_pauses == 0
