"""plan() with a host tier: what a way back costs, who may be paused, what can be carried.

Row i has slot i + 10. COPIES: a block takes 10 ms each way, a token 0.38 ms to compute; so loading
a block of 32 tokens is a little cheaper than computing it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.scheduler.build import COSTS, MAX_UTIL, NOW, paused, running, snapshot, waiting
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import due_rows, victims
from tokenflow.scheduler_view import view_of
from tokenflow.types import CostEstimate, Decision

POLICY = TokenflowPolicy()
COPIES = dataclasses.replace(COSTS, offload_block_s=0.01, onboard_block_s=0.01)
SLOW = dataclasses.replace(COSTS, offload_block_s=0.02, onboard_block_s=0.02)


def decide(rows: list[dict[str, Any]], **limits: Any) -> Decision:
    limits.setdefault("num_host_blocks", 256)
    return plan(snapshot(rows, **limits), POLICY)


def view(rows: list[dict[str, Any]], *, costs: CostEstimate = COPIES, **limits: Any):
    return view_of(snapshot(rows, costs=costs, **limits), POLICY)


# -- the way back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_tiering", "costs", "recomputes"),
    [(True, SLOW, True), (True, COPIES, False), (False, SLOW, False), (True, COSTS, False)],
)
def test_load_or_recompute(has_tiering: bool, costs: CostEstimate, recomputes: bool) -> None:
    """Four blocks: 128 tokens take 49 ms to compute and 40 or 80 ms to load. Only an engine that
    can be told gives up what it could load; and nothing is given up before a load was measured."""
    row = paused(0.4, num_prompt_tokens=28, num_host_blocks=4)  # 128 tokens
    decision = decide([row], costs=costs, has_tiering=has_tiering)
    assert decision.resume == (10,)
    assert decision.recompute == ((10,) if recomputes else ())


def test_what_neither_tier_has_is_computed_either_way() -> None:
    """Of 328 tokens 100 are lost, 4 blocks are on the host: the choice is about those 4 alone."""
    row = paused(0.4, num_prompt_tokens=228, num_host_blocks=4, num_resume_tokens=100)
    slow, fast = (view([row], costs=c, has_tiering=True).ways for c in (SLOW, COPIES))
    assert (slow.recomputes[0], slow.num_tokens[0], slow.num_blocks[0]) == (True, 228, 0)
    assert (fast.recomputes[0], fast.num_tokens[0], fast.num_blocks[0]) == (False, 100, 4)


def test_loads_under_way_are_waited_for() -> None:
    """Another resume's blocks cross the link first: computing is faster than queueing behind it."""
    row = paused(0.4, num_prompt_tokens=28, num_host_blocks=4)
    before = {**running(0.3), "state": 5, "num_host_blocks": 4}
    assert not decide([row], costs=COPIES, has_tiering=True).recompute
    assert decide([row, before], costs=COPIES, has_tiering=True).recompute == (10,)


@pytest.mark.parametrize(("num_host_blocks", "due"), [(0, False), (40, True)])
def test_what_must_be_loaded_makes_a_stream_due_earlier(num_host_blocks: int, due: bool) -> None:
    """Due at 0.64 s with all on the device; 40 blocks take 0.4 s more, 1.5 times of it is kept."""
    row = paused(1.2, num_prompt_tokens=1200, num_host_blocks=num_host_blocks)
    assert bool(due_rows(view([row], num_total_blocks=64))) is due


# -- who may be paused -------------------------------------------------------------------------


def crowd(slack_s: float, **changes: Any) -> list[dict[str, Any]]:
    """Four streams of 8 blocks that fill a pool of 32, and one whose pause is asked about."""
    size = {"num_prompt_tokens": 150, "num_generated": 100, "num_blocks_held": 8}
    return [running(slack_s, **{**size, "num_blocks_needed": 8, **changes}) for _ in range(4)]


def spare_s(num_total_blocks: int, num_host_blocks: int, **changes: Any) -> float:
    limits = {"num_total_blocks": num_total_blocks, "num_host_blocks": num_host_blocks}
    has_tiering = changes.pop("has_tiering", False)
    costs = changes.pop("costs", COPIES)
    rows = crowd(9.0, **changes)
    found = victims(view(rows, costs=costs, has_tiering=has_tiering, **limits))
    return float(min(found.others[1]))


def away_s(num_total_blocks: int) -> float:
    """The pool goes out and comes back in 35 % of the time."""
    return num_total_blocks * 2 * 0.01 / 0.35


def losing_s(num_lost_of_8: int) -> float:
    """So many blocks of each of 4 streams of 250 tokens are computed in 80 % of the time."""
    return num_lost_of_8 / 8 * 4 * 250 / 2600 / 0.8


def test_copies_are_charged_only_where_the_pool_needs_the_blocks() -> None:
    """32 blocks of KV: in a pool of 32 a pause moves nothing; in one of 28, 4 blocks go out and
    back; in one of 16 all 8 of a stream do. κ = 1.5. And whoever goes is away for a while."""
    free = spare_s(32, 64)
    assert spare_s(28, 64) == pytest.approx(free - 1.5 * 8 * 0.01 - away_s(28))
    assert spare_s(16, 64) == pytest.approx(free - 1.5 * 16 * 0.01 - away_s(16))


def test_what_overflows_both_tiers_is_computed_again() -> None:
    free = spare_s(32, 64)
    without = spare_s(28, 0)
    assert without == pytest.approx(free - 1.5 * 249 / 2600 - losing_s(4))
    without += losing_s(4)  # one block is computed sooner than the pool is copied
    assert spare_s(16, 15) == pytest.approx(without - 1.5 * 8 * 0.01 - away_s(16))
    assert spare_s(16, 16) > without - 1.5 * 8 * 0.01 - away_s(16)


@pytest.mark.parametrize(
    ("slack_s", "ran_s", "yields"), [(1.0, 0.1, False), (1.0, 0.5, True), (9.0, 0.1, True)]
)
def test_turns_are_not_shorter_than_computing_again_takes(
    slack_s: float, ran_s: float, yields: bool
) -> None:
    """1,000 tokens of KV that pauses lose take the engine 0.38 s, 80 % of 0.48: whoever came back
    since then, and has nothing ahead, does not even go for a reader that would stall; only for
    growth."""
    rows = crowd(slack_s, running_since_time=NOW - ran_s)
    able = victims(view(rows, num_total_blocks=16, num_host_blocks=0))
    assert len(able.for_due) == (4 if yields else 0)
    assert len(able.for_growth) == 4


def test_due_streams_beyond_the_pool_find_nobody_in_the_engine_to_yield() -> None:
    """All are paused and due, and the pool has room for one."""
    size = {"num_prompt_tokens": 400, "num_blocks_needed": 20}
    rows = [paused(0.0, **size, num_host_blocks=8) for _ in range(4)]
    decision = decide(rows, costs=COPIES, num_total_blocks=24)
    assert (decision.resume, decision.pause) == ((10,), ())


def test_what_is_computed_sooner_than_it_is_loaded_makes_turns_longer_too() -> None:
    """A block of 32 tokens takes 12 ms to compute: with loads of 10 ms only the link counts."""
    slow = dataclasses.replace(COPIES, onboard_block_s=0.02)
    limits = {"num_total_blocks": 16, "num_host_blocks": 64, "has_tiering": True}
    shares = [view(crowd(9.0), costs=c, **limits).overflow.lost_share for c in (COPIES, slow)]
    assert shares == [0.0, 1.0]


def test_a_reader_does_not_stall_beside_others_that_ran_and_can_be_away_for_long() -> None:
    """64,000 tokens of KV, of which pauses lose all, are turned in 31 s at 80 % of the engine: with
    one of 17 out, who ran 25 s and has 29 s ahead has been given more than its cycle takes."""
    size = {"num_prompt_tokens": 3900, "num_blocks_needed": 125, "num_blocks_final": 250}
    long = {**size, "num_blocks_held": 125, "max_tokens": 4000}
    rows = [running(29.0, **long, running_since_time=NOW - 25.0) for _ in range(16)]
    dry = paused(0.0, **size, max_tokens=4000, num_resume_tokens=4000)
    limits = {"max_batch_size": 16, "num_total_blocks": 16 * 125 + 1, "num_host_blocks": 0}
    decision = decide([*rows, dry], **limits)
    assert decision.resume == (26,)
    assert decision.why[decision.pause[0]] == "for due"


def test_blocks_that_have_a_copy_need_not_go_out() -> None:
    free = spare_s(32, 64)
    assert spare_s(16, 64, num_copied_blocks=6, has_tiering=True) == pytest.approx(
        free - 1.5 * (2 + 8) * 0.01 - away_s(16) / 2  # both ways at once
    )


def test_copies_of_what_is_on_the_device_take_room_on_the_host() -> None:
    """16 blocks overflow; of 32 on the host 16 are copies of what the device holds too, or 24. With
    8 of 16 lost, computing takes longer turns than the link."""
    free = spare_s(32, 64)
    kept = spare_s(16, 32, num_copied_blocks=4, has_tiering=True)
    lost = spare_s(16, 32, num_copied_blocks=6, has_tiering=True)
    assert kept == pytest.approx(free - 1.5 * (4 + 8) * 0.01 - away_s(16) / 2)
    assert lost == pytest.approx(free - 1.5 * (2 * 0.01 + 249 / 2600) - losing_s(8))


def test_where_a_pause_moves_kv_a_stream_runs_longer_before_the_next() -> None:
    """32 blocks at 20 ms both ways are 0.64 s of a waiting link; at 35 % of it 1.83 s."""
    rows = [{**row, "running_since_time": NOW - 1.5} for row in crowd(9.0)]
    newcomer = waiting(num_blocks_needed=2, num_blocks_final=4)
    limits = {"costs": COPIES, "max_batch_size": 4, "capacity_policy": MAX_UTIL}
    assert decide([*rows, newcomer], num_total_blocks=64, **limits).pause
    assert view(rows, num_total_blocks=30, num_host_blocks=64).quantum_s == pytest.approx(
        30 * 0.02 / 0.35
    )
    assert view(rows, num_total_blocks=30, num_host_blocks=64, has_tiering=True).quantum_s == 1.0
    assert not decide([*rows, newcomer], num_total_blocks=30, **limits).pause


def test_a_reader_that_would_stall_need_not_wait_until_a_victim_can_stay_away() -> None:
    """1.7 s away is asked of whoever yields to a newcomer, beside a round trip of 0.7 s."""
    limits = {"costs": COPIES, "num_total_blocks": 30, "num_host_blocks": 64}
    limits |= {"max_batch_size": 4, "capacity_policy": MAX_UTIL}
    size = {"num_blocks_needed": 2, "num_blocks_final": 4}
    due = paused(0.3, num_prompt_tokens=30, **size)
    assert len(decide([*crowd(2.2), due], **limits).pause) == 1
    assert not decide([*crowd(2.2), waiting(**size)], **limits).pause
    assert decide([*crowd(9.0), waiting(**size)], **limits).pause


# -- ways back for all -------------------------------------------------------------------------


def test_no_pause_for_a_newcomer_if_the_link_cannot_bring_everybody_back_in_time() -> None:
    """Three are due in 2.5 s. Each loads 60 blocks; the link brings 100 in a second, or 50."""
    size = {"num_prompt_tokens": 1800, "num_blocks_needed": 1, "num_host_blocks": 60}
    rows = [paused(2.5 + 0.01 * i, **size) for i in range(3)]
    rows += [running(9.0, read_rate=1.0), running(9.0, read_rate=1.0), waiting(read_rate=1.0)]
    limits = {"max_batch_size": 2, "num_total_blocks": 400}
    assert decide(rows, costs=COPIES, **limits).why == {13: "for waiting", 15: "waiting"}
    assert not decide(rows, costs=SLOW, **limits).pause
    at_once = [{**row, "num_host_blocks": 0} for row in rows]
    assert decide(at_once, costs=SLOW, **limits).why == {13: "for waiting", 15: "waiting"}


def test_a_due_resume_takes_only_victims_that_can_wait_for_its_load() -> None:
    """Steps wait for the load of 100 blocks: a second. Beside the steps nobody waits for it."""
    due = paused(0.3, num_prompt_tokens=3100, num_host_blocks=100)
    limits = {"max_batch_size": 1, "num_total_blocks": 400}
    assert not decide([running(1.5), due], costs=COPIES, **limits)
    assert decide([running(2.5), due], costs=COPIES, **limits).resume == (11,)
    beside = dataclasses.replace(COPIES, copy_wait_share=0.0)
    assert decide([running(1.5), due], costs=beside, **limits).resume == (11,)


def test_an_exchange_pays_for_the_copies_that_steps_wait_for() -> None:
    rich, poor = running(25.0), paused(2.0, num_prompt_tokens=600, num_host_blocks=20)
    limits = {"max_batch_size": 1, "num_total_blocks": 64}
    assert decide([rich, poor], costs=COPIES, **limits).why == {10: "for balance", 11: "balance"}
    slow = dataclasses.replace(COPIES, onboard_block_s=0.03)
    assert not decide([rich, poor], costs=slow, **limits)


# -- capacity ----------------------------------------------------------------------------------


def capacity(num_host_blocks: int, costs: CostEstimate = COPIES, **limits: Any) -> float:
    """Γ in the mean of the instants: 16 streams of 7 to 16 blocks and one more, on 64 blocks."""
    rows = [
        running(5.0, num_prompt_tokens=200, max_tokens=300, num_blocks_final=16) for _ in range(16)
    ]
    newcomer = waiting(num_prompt_tokens=200, max_tokens=300, num_blocks_final=16)
    seen = view(
        [*rows, newcomer],
        costs=costs,
        max_batch_size=16,
        num_total_blocks=64,
        num_host_blocks=num_host_blocks,
        capacity_policy=MAX_UTIL,
        **limits,
    )
    return float(Load(seen).capacity(16).mean())


def test_a_host_tier_carries_more_than_recomputing_does() -> None:
    fast = dataclasses.replace(COPIES, offload_block_s=0.001, onboard_block_s=0.001)
    assert capacity(0) < capacity(256, fast)
    assert capacity(64, fast) < capacity(120, fast) < capacity(160, fast)


def test_copies_beside_the_steps_cost_no_capacity_until_the_link_is_full() -> None:
    hidden = dataclasses.replace(COPIES, copy_wait_share=0.0)
    free = dataclasses.replace(COPIES, offload_block_s=0.0, onboard_block_s=0.0)
    assert capacity(256) < capacity(256, hidden, has_tiering=True)
    assert capacity(256, hidden, has_tiering=True) == pytest.approx(
        capacity(256, free, has_tiering=True), rel=1e-3
    )
    slow = dataclasses.replace(hidden, onboard_block_s=1.0)
    assert capacity(256, slow) < 0.5 * capacity(256, free)


def test_where_computing_is_faster_the_host_carries_nothing() -> None:
    slow = dataclasses.replace(COPIES, onboard_block_s=0.02, offload_block_s=0.0)
    assert capacity(256, slow, has_tiering=True) == capacity(0)
    assert capacity(256, slow) > 0.0


def test_without_a_host_tier_nothing_changes() -> None:
    """Costs of copies that no tier makes are not looked at."""
    rows = [*crowd(3.0), paused(0.5, num_resume_tokens=200), waiting()]
    limits = {"num_total_blocks": 20, "num_host_blocks": 0, "capacity_policy": MAX_UTIL}
    assert decide(rows, costs=COPIES, **limits) == decide(rows, costs=COSTS, **limits)
