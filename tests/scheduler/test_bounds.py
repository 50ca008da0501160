"""Bounds that hold over whole runs: growth, load, kinds that cannot be paused, machines."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from perf.virtual.values import SimEngine, SimRequest
from perf.virtual.workloads import demo, machines, sustained
from tests.scheduler.build import MAX_UTIL as MAX_UTIL_POLICY
from tests.scheduler.build import NOW, paused, running, snapshot, waiting
from tests.scheduler.outcomes import MAX_UTIL, NO_EVICT, Outcome, all_served, worst_stall_s
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import SessionState

POLICY = TokenflowPolicy()


@pytest.mark.parametrize("num_total_blocks", [40, 64])
@pytest.mark.parametrize("load", ["burst", "steady", "busy"])
def test_growth_never_takes_anybody_by_surprise(num_total_blocks: int, load: str) -> None:
    """MAX_UTILIZATION takes blocks as streams grow. While the load can be carried the engine never
    has to pause on its own, nobody is paused against its slack, and nobody stalls."""
    requests = {"burst": demo(), "steady": sustained(0.3), "busy": sustained(0.5, seed=9)}[load]
    engine = SimEngine(
        capacity_policy=MAX_UTIL, num_total_blocks=num_total_blocks, max_batch_size=16
    )
    run = Outcome(requests, engine)
    assert run.result.num_pauses > 0
    assert run.result.num_internal_pauses == 0
    assert run.result.num_forced == 0
    assert worst_stall_s(run.result) <= 0.25
    assert all_served(run.result)


def test_free_blocks_that_growth_will_take_are_no_free_room() -> None:
    """Two streams hold 4 of 20 blocks now and 18 in the end: beyond the schedulable load nobody is
    let in beside them, although 16 blocks are free."""
    fast = {"read_rate": 40.0, "max_tokens": 260, "num_generated": 30}
    held = {"num_blocks_held": 2, "num_blocks_needed": 2, "num_blocks_final": 9}
    rows = [running(0.5, **fast, **held) for _ in range(2)]
    newcomer = waiting(read_rate=40.0, max_tokens=400, num_blocks_needed=1)
    limits = {"max_batch_size": 8, "num_total_blocks": 20, "capacity_policy": MAX_UTIL_POLICY}
    assert not plan(snapshot([*rows, {**newcomer, "num_blocks_final": 13}], **limits), POLICY)
    small = plan(snapshot([*rows, {**newcomer, "num_blocks_final": 2}], **limits), POLICY)
    assert small.admit == (12,)


def test_capacity_is_bounded_by_what_can_be_written_at_full_length() -> None:
    """A set that starts together grows old together. Readers of 12 tokens/s fit at mid-life, with
    the margin; at full length they do not, even without one."""
    old = {"read_rate": 12.0, "num_prompt_tokens": 32, "num_blocks_final": 4}

    def decide(max_tokens: int) -> bool:
        rows = [running(3.0, **old, max_tokens=max_tokens) for _ in range(3)]
        newcomer = waiting(**old, max_tokens=max_tokens)
        return bool(plan(snapshot([*rows, newcomer], max_batch_size=3), POLICY))

    assert decide(256)
    assert not decide(6000)


def test_a_pause_leaves_time_to_compute_again_what_the_pool_cannot_keep() -> None:
    """Nobody yields to a newcomer if what has to be computed again before the next deadline takes
    more than its share of the time until then, though slots and blocks would be there."""
    generous = dataclasses.replace(POLICY, recompute_share=0.5)

    def decide(num_prompt_tokens: int, policy: TokenflowPolicy = POLICY) -> bool:
        size = {"num_prompt_tokens": num_prompt_tokens, "num_blocks_needed": 20}
        rows = [running(12.0, **size, read_rate=0.5) for _ in range(4)]
        newcomer = waiting(num_blocks_needed=20, num_blocks_final=20, read_rate=0.5)
        limits = {"max_batch_size": 4, "num_total_blocks": 80}
        return bool(plan(snapshot([*rows, newcomer], **limits), policy).pause)

    assert decide(300)  # the pool keeps everything: nothing is computed again
    assert not decide(2900)  # 3,000 tokens within 12 s, of which 1.15 s are prefill
    assert decide(2900, generous)


def test_newcomers_leave_room_for_the_growth_of_those_who_are_there() -> None:
    """Four streams take a block each before one of them could be paused: those are not free."""
    rows = [
        running(0.1, num_generated=20, num_blocks_held=2, num_blocks_needed=2, num_blocks_final=9)
    ] * 4
    newcomer = waiting(num_blocks_needed=1, num_blocks_final=2)

    def decide(num_free_blocks: int) -> tuple[int, ...]:
        total = 8 + num_free_blocks
        limits = {
            "max_batch_size": 8,
            "num_total_blocks": total,
            "capacity_policy": MAX_UTIL_POLICY,
        }
        return plan(snapshot([*rows, newcomer], **limits), POLICY).admit

    assert decide(5) == ()
    assert decide(6) == (14,)


def test_kinds_that_cannot_be_paused_hold_at_most_half_at_any_time() -> None:
    """A flood of them, and readers who come later: at each step they have at most half of the slots
    and of the blocks, so the readers get their first tokens at once."""
    rng = random.Random(4)
    fixed = [
        SimRequest(
            arrival_time=0.05 * i,
            num_prompt_tokens=rng.randint(40, 120),
            max_tokens=rng.randint(150, 350),
            pausable=False,
            kind="fixed",
        )
        for i in range(24)
    ]
    readers = [
        SimRequest(arrival_time=6.0 + i, num_prompt_tokens=50, max_tokens=60, kind="newcomer")
        for i in range(12)
    ]
    run = Outcome([*fixed, *readers], SimEngine(num_total_blocks=96), watch=True)
    blocks = [-(-(r.num_prompt_tokens + r.max_tokens - 1) // 32) for r in fixed]
    for step in run.steps:
        inside = [handle for handle in step.handles if handle <= len(fixed)]
        assert 2 * len(inside) <= 8
        assert 2 * sum(blocks[handle - 1] for handle in inside) <= 96
    assert max(run.ttft("newcomer")) <= 1.5
    assert all(seq.num_pauses == 0 for seq in run.result.seqs if not seq.request.pausable)
    assert all_served(run.result)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_the_paused_time_of_streams_without_a_reader_is_bounded(
    capacity_policy: str, every: int
) -> None:
    """Machines, and requests that get one answer at the end: due again after `max_machine_pause_s`
    and in the way of others soon after; paused at most `max_machine_pauses` times but for readers
    that would stall, and never for longer in all."""
    requests = machines(sustained(1.0, num=40), every)
    run = Outcome(requests, SimEngine(capacity_policy=capacity_policy))
    # Passed over once due, a stream keeps the next room that comes free: some seconds at most.
    longest_s = POLICY.max_machine_pause_s + POLICY.max_bypass_s + 5.0
    found = [seq for seq in run.result.seqs if seq.request.read_rate is None]
    assert any(seq.num_pauses for seq in found)
    for seq in found:
        assert seq.usage is not None
        assert seq.num_pauses <= POLICY.max_machine_pauses or every > 1
        assert seq.usage.paused_s <= longest_s * min(seq.num_pauses, POLICY.max_machine_pauses)
    assert all_served(run.result)


def test_the_bounds_on_machine_pauses_are_the_policys() -> None:
    policy = dataclasses.replace(POLICY, max_machine_pauses=1, max_machine_pause_s=3.0)
    for every in (1, 2):
        run = Outcome(machines(demo(), every), SimEngine(), policy)
        found = [seq for seq in run.result.seqs if seq.request.read_rate is None]
        assert every > 1 or max(seq.num_pauses for seq in found) == 1
        if every > 1:  # readers among them come back in time, and make room for the others
            longest_s = 3.0 + policy.max_bypass_s + 1.0
            assert all(q.usage.paused_s <= q.num_pauses * longest_s for q in found if q.usage)


@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_kinds_that_find_no_blocks_left_of_their_half_are_in_nobody_s_way(
    capacity_policy: str,
) -> None:
    """Two of them have 46 of the 48 blocks that their kind may hold: however many wait, whoever
    comes later starts at once."""
    fixed = [
        SimRequest(
            arrival_time=0.01 * i,
            num_prompt_tokens=380,
            max_tokens=350,
            pausable=False,
            kind="fixed",
        )
        for i in range(40)
    ]
    readers = [
        SimRequest(arrival_time=3.0 + i, num_prompt_tokens=50, max_tokens=60, kind="newcomer")
        for i in range(12)
    ]
    engine = SimEngine(num_total_blocks=96, capacity_policy=capacity_policy)
    run = Outcome([*fixed, *readers], engine)
    assert max(run.ttft("newcomer")) <= 1.5
    assert all_served(run.result)


@pytest.mark.parametrize("capacity_policy", [NO_EVICT, MAX_UTIL])
def test_a_large_one_of_such_a_kind_is_not_overtaken_by_small_ones_for_ever(
    capacity_policy: str,
) -> None:
    """It wants 44 of the 48 blocks that its kind may hold, and there is always a small one."""
    fixed = {"pausable": False, "kind": "small"}
    small = [
        SimRequest(arrival_time=2.0 * i, num_prompt_tokens=60, max_tokens=100, **fixed)
        for i in range(60)
    ]
    large = SimRequest(
        arrival_time=3.0, num_prompt_tokens=900, max_tokens=500, pausable=False, kind="large"
    )
    engine = SimEngine(num_total_blocks=96, capacity_policy=capacity_policy)
    run = Outcome([*small, large], engine)
    assert run.ttft("large")[0] <= 15.0
    assert all_served(run.result)


def test_one_that_its_kind_leaves_no_blocks_holds_up_its_kind_alone() -> None:
    """Once it has waited for as long as others may overtake it."""

    def decide(waited_s: float) -> tuple[int, ...]:
        rows = [
            running(1.0, pausable=False, num_blocks_held=20, num_blocks_final=20),
            waiting(arrival_time=NOW - waited_s, pausable=False, num_blocks_final=40),
            waiting(pausable=False),
            waiting(),
        ]
        return plan(snapshot(rows, max_batch_size=8, num_total_blocks=100), POLICY).admit

    assert set(decide(POLICY.max_bypass_s - 1.0)) == {12, 13}
    assert decide(POLICY.max_bypass_s + 1.0) == (13,)


def test_of_those_that_are_due_a_reader_that_runs_dry_comes_before_a_machine() -> None:
    machine = paused(math.inf, has_reader=False, wait_since_time=NOW - 100)
    rows = [running(30.0), machine, paused(0.0)]
    assert plan(snapshot(rows, max_batch_size=1), POLICY).resume == (12,)


def test_what_is_about_to_start_counts_against_the_half() -> None:
    """Those that were handed to the engine and have no token yet count too."""
    starting = {"state": SessionState.PREFILLING, "pausable": False, "num_blocks_held": 4}
    rows = [starting, dict(starting), waiting(pausable=False), waiting()]
    assert plan(snapshot(rows, max_batch_size=4), POLICY).admit == (13,)
