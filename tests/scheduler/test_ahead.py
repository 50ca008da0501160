"""Ahead of need: room for announced arrivals, write-through, prefetch. Row i has slot i + 10."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimResult
from perf.virtual.workloads import demo
from tests.scheduler.build import COSTS, MAX_UTIL, paused, running, snapshot, waiting
from tests.scheduler.decisions import POLICY, decide
from tests.scheduler.outcomes import throughput_ratio, worst_stall_s
from tokenflow.config import ServingConfig
from tokenflow.policies import TokenflowPolicy, policy_from_config
from tokenflow.scheduler import plan
from tokenflow.types import ArrivalEstimate, Decision, SessionState

COPIES = dataclasses.replace(COSTS, offload_block_s=0.002, onboard_block_s=0.002)
BURST = ArrivalEstimate(short_rate=12.0, long_rate=0.2, blocks_per_arrival=2.0, burst=True)
"""1.3 arrivals, 2.6 blocks, in the 0.11 s that a pause takes with the wait for its plan."""


# -- announced arrivals ------------------------------------------------------------------------


def ahead(**changes: Any) -> dict[str, Any]:
    """Paused, with 120 of 256 tokens unread."""
    return paused(30.0, **changes)


@pytest.mark.parametrize(("max_batch_size", "resumed"), [(3, ()), (4, (11,)), (5, (11, 12))])
def test_room_for_announced_arrivals_is_not_given_to_those_well_ahead(
    max_batch_size: int, resumed: tuple[int, ...]
) -> None:
    """One runs; the slots that two newcomers will want stay free."""
    rows = [running(0.1), ahead(), ahead()]
    limits = {"max_batch_size": max_batch_size}
    assert decide(rows, arrivals=BURST, **limits).resume == resumed
    calm = dataclasses.replace(BURST, burst=False)
    for arrivals, policy in ((calm, POLICY), (BURST, TokenflowPolicy(anticipate=False))):
        free = decide(rows, policy, arrivals=arrivals, **limits)
        assert free.resume == (11, 12)


def test_blocks_are_kept_too() -> None:
    """Of 12 free blocks newcomers will want 3; two streams of 5 would leave 2."""
    rows = [running(0.1), *(ahead(num_blocks_needed=5) for _ in range(2))]
    limits = {"max_batch_size": 16, "num_total_blocks": 16}
    assert decide(rows, arrivals=BURST, **limits).resume == (11,)
    assert decide(rows, **limits).resume == (11, 12)


@pytest.mark.parametrize("needy", [paused(0.4), paused(3.0)])
def test_streams_in_need_come_back_whoever_is_announced(needy: dict[str, Any]) -> None:
    assert decide([running(0.1), needy], arrivals=BURST, max_batch_size=2).resume == (11,)


def test_newcomers_take_the_room_that_was_kept_for_them() -> None:
    rows = [running(0.1), ahead(), waiting(), waiting()]
    assert decide(rows, arrivals=BURST, max_batch_size=4).admit == (12, 13)


def test_no_exchange_while_victims_will_be_wanted() -> None:
    rows = [running(25.0), paused(2.0)]
    assert decide(rows, max_batch_size=1).resume == (11,)
    assert not decide(rows, max_batch_size=1, arrivals=BURST)


def test_no_room_is_kept_for_arrivals_that_could_not_start() -> None:
    """A newcomer waits for whom the load is too high already: those to come would wait too."""
    fast = {"read_rate": 12.0, "max_tokens": 1000}
    rows = [running(0.1, **fast), paused(60.0, **fast), waiting(read_rate=24.0, max_tokens=1000)]
    full = {"max_batch_size": 2, "num_total_blocks": 12}
    assert decide(rows, arrivals=BURST, **full).resume == (11,)
    assert not decide(rows[:2], arrivals=BURST, **full).resume


def test_nobody_is_paused_for_somebody_who_is_only_announced() -> None:
    rows = [running(40.0), running(40.0), ahead()]
    assert not decide(rows, arrivals=BURST, max_batch_size=2)


def test_the_configuration_switches_it_off() -> None:
    policy = policy_from_config(ServingConfig(anticipate_arrivals=False))
    assert isinstance(policy, TokenflowPolicy)
    assert not policy.anticipate


def run(policy: TokenflowPolicy, seed: int, engine: SimEngine) -> SimResult:
    return Simulation(demo(seed=seed), lambda snap: plan(snap, policy), engine).run()


@pytest.mark.parametrize("seed", [1, 2])
def test_anticipation_stalls_nobody_and_keeps_the_throughput(seed: int) -> None:
    engine = SimEngine(capacity_policy="max_utilization", num_total_blocks=64, max_batch_size=16)
    with_it = run(POLICY, seed, engine)
    without = run(TokenflowPolicy(anticipate=False), seed, engine)
    assert worst_stall_s(with_it) == 0.0
    assert with_it.num_forced == with_it.num_internal_pauses == 0
    assert with_it.num_pauses <= 1.2 * without.num_pauses
    assert throughput_ratio(with_it, without) >= 0.98


# -- write-through -----------------------------------------------------------------------------


def tiered(rows: list[dict[str, Any]], policy: TokenflowPolicy = POLICY, **limits: Any) -> Decision:
    base = {
        "costs": COPIES,
        "num_total_blocks": 16,
        "num_host_blocks": 64,
        "has_tiering": True,
        "capacity_policy": MAX_UTIL,
        "max_batch_size": 8,
    }
    return plan(snapshot(rows, **{**base, **limits}), policy)


def writers() -> list[dict[str, Any]]:
    """12 blocks of 16 filled; 4 of 132 tokens each have 4 full blocks and a token in a fifth."""
    size = {"num_blocks_held": 5, "num_blocks_needed": 5, "num_blocks_final": 5}
    return [running(slack, **size, num_generated=101) for slack in (4.0, 9.0, 6.0)]


def test_oldest_blocks_of_those_with_most_slack_go_first_within_the_budget() -> None:
    """12 blocks in half of 0.05 s at 2 ms each: 4 of each stream would be 12."""
    decision = tiered(writers())
    assert decision == Decision(
        offload=((11, 4), (12, 4), (10, 4)),
        why=dict.fromkeys((10, 11, 12), "write-through"),
    )
    slow = dataclasses.replace(COPIES, offload_block_s=0.004)
    assert tiered(writers(), costs=slow).offload == ((11, 4), (12, 2))
    slowest = dataclasses.replace(COPIES, offload_block_s=4.0)
    assert tiered(writers(), costs=slowest).offload == ((11, 1),)
    useless = dataclasses.replace(COPIES, onboard_block_s=0.02)  # computing takes 12 ms a block
    assert not tiered(writers(), costs=useless)
    unknown = dataclasses.replace(COPIES, offload_block_s=0.0)
    assert tiered(writers(), costs=unknown).offload == ((11, 4), (12, 4))


def test_only_full_blocks_without_a_copy_are_copied() -> None:
    rows = writers()
    rows[1] |= {"num_copied_blocks": 4}
    rows[2] |= {"num_copied_blocks": 1, "num_generated": 96}  # 128 tokens, 127 of them in KV
    assert tiered(rows).offload == ((12, 2), (10, 4))


def test_an_idle_server_copies_nothing_unless_a_burst_comes() -> None:
    """15 blocks of KV: nine tenths of a pool of 16, half of one of 32."""
    assert tiered(writers()).offload
    assert not tiered(writers(), num_total_blocks=32)
    assert tiered(writers(), num_total_blocks=32, arrivals=BURST).offload


@pytest.mark.parametrize(
    "limits",
    [
        {"has_tiering": False},
        {"num_host_blocks": 0},
        {"policy": TokenflowPolicy(write_through=False)},
    ],
)
def test_no_write_through_where_nobody_takes_it(limits: dict[str, Any]) -> None:
    assert not tiered(writers(), **limits)


@pytest.mark.parametrize(
    "change", [{"pausable": False}, {"slack_s": 0.3}, {"max_tokens": 103}, {"state": 1}]
)
def test_streams_that_cannot_be_paused_are_not_copied(change: dict[str, Any]) -> None:
    rows = writers()
    rows[1] |= change
    if change.get("state") == SessionState.PREFILLING:
        rows[1] |= {"started": False}
    assert [slot for slot, _ in tiered(rows).offload] == [12, 10]


def test_write_through_goes_on_while_nobody_waits_and_blocks_are_reserved() -> None:
    rows = [{**row, "num_blocks_held": 5} for row in writers()]
    decision = tiered(rows, capacity_policy=0)
    assert decision.offload
    assert (decision.pause, decision.resume, decision.admit) == ((), (), ())


# -- prefetch ----------------------------------------------------------------------------------


def crowded(*slacks: float, num_host_blocks: int = 10, **changes: Any) -> list[dict[str, Any]]:
    """Two that run and keep their slots, and paused streams with blocks on the host. 20 ms of
    loading: due at 0.67 s, and at 0.64 s without it; loading begins at 0.64 + 2 · 0.02 + 0.1 s."""
    base = {"num_prompt_tokens": 250, "num_blocks_needed": 11, "num_host_blocks": num_host_blocks}
    rows = [running(0.3, num_blocks_needed=4, num_blocks_held=4) for _ in range(2)]
    return [*rows, *(paused(slack, **{**base, **changes}) for slack in slacks)]


def prefetched(rows: list[dict[str, Any]], **limits: Any) -> tuple[int, ...]:
    return tiered(rows, **{"max_batch_size": 2, "num_total_blocks": 64, **limits}).prefetch


@pytest.mark.parametrize(("slack_s", "begun"), [(0.7, True), (0.76, True), (0.77, False)])
def test_blocks_are_brought_back_shortly_before_the_stream_is_due(
    slack_s: float, begun: bool
) -> None:
    assert prefetched(crowded(slack_s)) == ((12,) if begun else ())


def test_more_urgent_loads_come_first_and_make_others_begin_earlier() -> None:
    """0.78 s is too early for one alone; behind another it is not."""
    assert prefetched(crowded(0.78)) == ()
    assert prefetched(crowded(0.78, 0.75)) == (13, 12)


def test_prefetch_takes_only_free_room() -> None:
    """8 blocks are held; each has one on the device and wants 10 more."""
    assert prefetched(crowded(0.72, 0.75), num_total_blocks=8 + 2 * 11) == (12, 13)
    assert prefetched(crowded(0.72, 0.75), num_total_blocks=8 + 2 * 11 - 1) == (12,)
    assert prefetched(crowded(0.72), num_total_blocks=8 + 11 - 1) == ()


def test_blocks_on_the_device_of_those_due_earlier_are_no_room() -> None:
    """The first has all of its 11 blocks there, the other has one and wants 10 more."""
    rows = crowded(0.72, 0.75)
    rows[2] |= {"num_host_blocks": 0}
    assert prefetched(rows, num_total_blocks=8 + 11 + 11) == (13,)
    assert prefetched(rows, num_total_blocks=8 + 11 + 10) == ()


def test_room_for_announced_arrivals_is_left() -> None:
    assert prefetched(crowded(0.72), num_total_blocks=8 + 11 + 2, arrivals=BURST) == ()
    assert prefetched(crowded(0.72), num_total_blocks=8 + 11 + 3, arrivals=BURST) == (12,)


def test_what_is_resumed_or_computed_is_not_prefetched() -> None:
    assert prefetched(crowded(0.6), max_batch_size=3) == ()  # resumed at once
    slow = dataclasses.replace(COPIES, onboard_block_s=1.0)
    assert prefetched(crowded(0.7), costs=slow) == ()  # cheaper to compute


@pytest.mark.parametrize(
    "limits", [{"has_tiering": False}, {"policy": TokenflowPolicy(prefetch=False)}]
)
def test_no_prefetch_where_nobody_takes_it(limits: dict[str, Any]) -> None:
    assert prefetched(crowded(0.7), **limits) == ()


def test_held_streams_and_those_without_a_reader_are_not_prefetched() -> None:
    assert prefetched(crowded(0.7, held=True)) == ()
    assert prefetched(crowded(float("inf"), has_reader=False)) == ()
