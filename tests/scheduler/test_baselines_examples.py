"""Decisions of the baselines worked out by hand, from their sources."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.scheduler.build import COSTS, MAX_UTIL, NOW, paused, running, snapshot, waiting
from tokenflow.baselines import guide
from tokenflow.baselines.andes import AndesPlanner, AndesPolicy, expected_gains
from tokenflow.baselines.guide import GuidePolicy
from tokenflow.baselines.paper import PaperPlanner
from tokenflow.baselines.paper_rules import PaperPolicy
from tokenflow.baselines.room import Room
from tokenflow.baselines.sglang import SglangPlanner, SglangPolicy
from tokenflow.types import ArrivalEstimate, Decision, Snapshot


def at(time: float, snap: Snapshot) -> Snapshot:
    """The same situation at another instant."""
    return dataclasses.replace(snap, now=NOW + time)


# -- SGLang ----------------------------------------------------------------------------------------


def one_beside_another() -> Snapshot:
    """128 tokens of 288 run in a pool of 512; a newcomer asks for 32 + 224."""
    return snapshot(
        [
            running(2.0, num_generated=96, max_tokens=256, num_blocks_final=9),
            waiting(max_tokens=224, num_blocks_needed=1, num_blocks_final=8),
        ],
        num_total_blocks=16,
        capacity_policy=MAX_UTIL,
    )


@pytest.mark.parametrize(("ratio", "admitted"), [(0.7, True), (0.9, False)])
def test_sglang_counts_a_share_of_what_runs_on(ratio: float, admitted: bool) -> None:
    """384 tokens free, 160 still to come: 384 − 0.7·160 = 272 ≥ 256 > 240 = 384 − 0.9·160."""
    decision = SglangPlanner(SglangPolicy(init_ratio=ratio)).plan(one_beside_another())
    assert bool(decision.admit) is admitted


def test_sglang_ratio_falls_with_decode_steps_and_stops_at_its_least() -> None:
    planner = SglangPlanner()
    snap = snapshot([running(2.0)])
    step_s = Room(snap).step_s
    for num_steps, expected in ((0, 0.7), (300, 0.7 * (1 + 0.14) / 2), (600, 0.098), (900, 0.098)):
        planner.plan(at(num_steps * step_s, snap))
        assert planner.ratio == pytest.approx(expected)


def test_sglang_retracts_the_fewest_generated_and_then_the_longest_prompt() -> None:
    rows = [
        running(9.0, num_generated=60, num_prompt_tokens=68, num_blocks_final=12),
        running(9.0, num_generated=28, num_prompt_tokens=100, num_blocks_final=12),
        running(9.0, num_generated=28, num_prompt_tokens=36, num_blocks_final=12),
        running(9.0, num_generated=124, num_prompt_tokens=68, num_blocks_final=12),
    ]
    snap = snapshot(rows, num_total_blocks=16, capacity_policy=MAX_UTIL)
    planner = SglangPlanner()
    decision = planner.plan(snap)
    # Row 1 gives 4 blocks, and the 3 left want 60 tokens: 2 blocks.
    assert decision.pause == decision.forced == (11,)
    assert planner.ratio == pytest.approx((60 + 28 + 124 + 3 * 20) / (3 * 256))


def test_sglang_stops_at_the_first_that_does_not_fit_and_the_retracted_wait_behind() -> None:
    rows = [
        paused(0.0, num_blocks_needed=1),  # since 5 s
        waiting(wait_since_time=NOW - 6.0, num_blocks_needed=1),
        waiting(wait_since_time=NOW - 4.0, num_blocks_needed=40),
        waiting(wait_since_time=NOW - 3.0, num_blocks_needed=1),
    ]
    snap = snapshot(rows, num_total_blocks=40, capacity_policy=MAX_UTIL)
    decision = SglangPlanner().plan(snap)
    assert (decision.admit, decision.resume) == ((11,), (10,))


# -- Andes -----------------------------------------------------------------------------------------


def test_andes_gain_of_a_newcomer_and_of_a_stream_with_text_left() -> None:
    rows = [waiting(), running(6.0, arrival_time=NOW - 20.0)]
    policy = AndesPolicy()
    gains = expected_gains(Room(snapshot(rows)), np.array([0, 1]), 1, policy)
    prefill_s = 32 / 2600
    newcomer = 0.5 * 4 * (10 - prefill_s) ** 2 / (0.5 * 4 * (0.2 + 10 - 1) ** 2)
    stream = 0.5 * 4 * (10 - 6) ** 2 / (0.5 * 4 * (20 + 10 - 1) ** 2)
    assert gains == pytest.approx([newcomer, stream])


def test_andes_a_batch_slower_than_the_reader_gives_only_what_it_writes() -> None:
    """Reader of 25 tokens/s, decoding at v < 25 from now on, nothing unread: area v·h²/2."""
    snap = snapshot([running(0.0, read_rate=25.0, arrival_time=NOW - 1.0, max_tokens=4096)])
    room = Room(snap)
    gains = expected_gains(room, np.array([0]), 8, AndesPolicy())
    speed = 1 / COSTS.step_s(8, 8 * 132)
    assert speed < 25
    assert gains[0] == pytest.approx(0.5 * speed * 100 / (0.5 * 25 * 10**2))


def full_house(*slacks_s: float) -> Snapshot:
    return snapshot(
        [*(running(slack_s) for slack_s in slacks_s), waiting()],
        max_batch_size=len(slacks_s),
        capacity_policy=MAX_UTIL,
    )


def test_andes_takes_the_slot_of_whoever_has_text_for_the_whole_horizon() -> None:
    decision = AndesPlanner().plan(full_house(12.0, 0.5))
    assert (decision.pause, decision.admit) == ((10,), (12,))


def test_andes_never_passes_its_cap_on_pauses() -> None:
    assert not AndesPlanner(AndesPolicy(preemption_cap=0.0)).plan(full_house(12.0, 11.0))
    planner = AndesPlanner(AndesPolicy(preemption_cap=0.4))  # 3 requests: one pause
    assert planner.plan(full_house(12.0, 11.0)).pause
    assert not planner.plan(at(5.0, full_house(12.0, 11.0))).pause


def test_andes_reschedules_once_per_interval() -> None:
    planner = AndesPlanner(AndesPolicy(preemption_cap=9.0))
    snap = full_house(12.0, 0.5)
    assert planner.plan(snap).pause
    assert not planner.plan(at(0.9, snap)).pause
    assert planner.plan(at(1.0, snap)).pause


# -- the paper -------------------------------------------------------------------------------------


def toy(
    time: float, r1: tuple[str, float], r2: tuple[str, float], r3: tuple[str, float] | None
) -> Snapshot:
    """Section 4.1: two slots of 40 tokens/s each; R1 reads 20, R2 30 and R3 25 tokens/s.

    (state, tokens unread) of each at `time`.
    """
    rows = []
    for state_of, rate in ((r1, 20.0), (r2, 30.0), (r3, 25.0)):
        if state_of is None:
            continue
        state, num_unread = state_of
        common = {"read_rate": rate, "max_tokens": 2000, "num_blocks_final": 64}
        if state == "waits":
            rows.append(waiting(**common, wait_since_time=NOW + 2.0, num_blocks_needed=1))
        elif state == "runs":
            rows.append(running(num_unread / rate, **common))
        else:
            rows.append(paused(num_unread / rate, **common, num_blocks_needed=5))
    costs = dataclasses.replace(
        COSTS, step_base_s=1 / 40, step_per_sequence_s=0.0, step_per_context_token_s=0.0
    )
    snap = snapshot(
        rows, max_batch_size=2, num_total_blocks=200, capacity_policy=MAX_UTIL, costs=costs
    )
    return at(time, snap)


def test_paper_toy_example() -> None:
    """R3 comes just after a pass and waits for the next; R1, with the largest buffer, makes room;
    when R1 is low, R2, by then the one with most to read, does."""
    plan = PaperPlanner().plan
    assert not plan(toy(2.0, ("runs", 40), ("runs", 20), None))
    assert not plan(toy(2.05, ("runs", 41), ("runs", 20), ("waits", 0)))
    third = plan(toy(3.0, ("runs", 60), ("runs", 30), ("waits", 0)))
    assert (third.pause, third.admit) == ((10,), (12,))
    assert not plan(toy(4.0, ("paused", 40), ("runs", 40), ("runs", 15)))
    fifth = plan(toy(5.0, ("paused", 20), ("runs", 50), ("runs", 30)))
    assert (fifth.pause, fifth.resume) == ((11,), (10,))
    assert not fifth.forced


def test_paper_a_larger_conservativeness_keeps_whoever_runs() -> None:
    snap = toy(3.0, ("runs", 60), ("runs", 30), ("waits", 0))
    assert not PaperPlanner(PaperPolicy(conservativeness=20.0)).plan(snap)


@pytest.mark.parametrize(("num_prompt_tokens", "swaps"), [(2600, False), (32, True)])
def test_paper_local_search_keeps_who_gains_more(num_prompt_tokens: int, swaps: bool) -> None:
    """The paused one is first in line (1 s < 1.95 s), but computing 2,700 tokens would take the
    whole interval, and the other serves its reader meanwhile."""
    away = paused(1.0, num_prompt_tokens=num_prompt_tokens)
    snap = snapshot([running(1.95), away], max_batch_size=1, num_total_blocks=200)
    decision = PaperPlanner().plan(snap)
    assert bool(decision.resume) is bool(decision.pause) is swaps


def test_paper_beyond_the_capacity_nobody_new_and_no_pauses() -> None:
    """Σ R = 3·30 > 80 tokens/s of two slots: who is paused comes back in order of arrival."""
    fast = {"read_rate": 30.0, "max_tokens": 2000, "num_blocks_final": 64}
    costs = toy(3.0, ("runs", 60), ("runs", 30), None).costs
    rows = [
        running(3.0, **fast),
        paused(1.9, **fast, num_blocks_needed=5),
        paused(0.1, **fast, num_blocks_needed=5),
        waiting(**fast, num_blocks_needed=1),
    ]
    over = snapshot(
        rows, max_batch_size=2, num_total_blocks=200, capacity_policy=MAX_UTIL, costs=costs
    )
    decision = PaperPlanner().plan(over)
    assert (decision.pause, decision.resume, decision.admit) == ((), (11,), ())


def test_paper_loads_or_computes_whichever_is_faster() -> None:
    """132 tokens compute in 0.05 s; 4 blocks load in 0.04 s or in 0.08 s."""
    row = paused(0.5, num_host_blocks=4, num_resume_tokens=4)
    for onboard_block_s, computes in ((0.01, False), (0.02, True)):
        costs = dataclasses.replace(COSTS, onboard_block_s=onboard_block_s, offload_block_s=0.01)
        snap = snapshot([row], costs=costs, num_host_blocks=99, has_tiering=True)
        decision = PaperPlanner().plan(snap)
        assert decision.resume == (10,)
        assert bool(decision.recompute) is computes


def test_paper_writes_the_largest_buffer_first() -> None:
    rows = [running(2.0), running(9.0), running(4.0, num_copied_blocks=4)]
    snap = snapshot(rows, num_host_blocks=99, has_tiering=True)
    assert PaperPlanner().plan(snap).offload == ((11, 4), (10, 4))


# -- the guide -------------------------------------------------------------------------------------


def by_guide(snap: Snapshot, **changes: float) -> Decision:
    return guide.plan(snap, GuidePolicy(**changes))


def test_guide_pauses_most_slack_over_its_threshold() -> None:
    assert not by_guide(full_house(1.9, 1.0))
    assert by_guide(full_house(1.9, 1.0), min_slack_s=1.5).pause == (10,)
    decision = by_guide(full_house(2.1, 7.0, 3.0))
    assert (decision.pause, decision.admit) == ((11,), (13,))


def test_guide_slack_must_cover_the_prefill() -> None:
    """A prompt of 5,200 tokens prefills for 2 s: 2.4 s of slack are not enough, 2.6 s are."""
    prompt = waiting(num_prompt_tokens=5200, num_resume_tokens=5200, num_blocks_needed=4)
    for slack_s, yields in ((2.4, False), (2.6, True)):
        snap = snapshot([running(slack_s), prompt], max_batch_size=1)
        assert bool(by_guide(snap).pause) is yields


def test_guide_brings_back_first_whoever_is_down_to_the_margin() -> None:
    rows = [running(5.0), paused(0.4), waiting()]
    decision = by_guide(snapshot(rows, max_batch_size=1))
    assert (decision.pause, decision.resume, decision.admit) == ((10,), (11,), ())
    rows[1] = paused(0.6)
    decision = by_guide(snapshot(rows, max_batch_size=1))
    assert (decision.pause, decision.resume, decision.admit) == ((10,), (), (12,))


def test_guide_copies_ahead_only_in_a_burst() -> None:
    rows = [running(5.0), running(1.0)]
    burst = ArrivalEstimate(short_rate=9.0, long_rate=0.5, blocks_per_arrival=2.0, burst=True)
    for arrivals, offload in ((None, ()), (burst, ((10, 4),))):
        snap = snapshot(rows, num_host_blocks=99, has_tiering=True, arrivals=arrivals)
        assert by_guide(snap).offload == offload
