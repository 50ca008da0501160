"""What copies cost, learned from the engine's running totals."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from tests.scheduler.test_costs import feed, iteration
from tokenflow.copy_costs import CopyCostModel
from tokenflow.costs import CostModel
from tokenflow.executor.kv_api import KvTierStats

OFFLOAD_S, ONBOARD_S = 0.002, 0.003


def totals(**counts: float) -> KvTierStats:
    base = {
        "block_bytes": 1024,
        "num_device_blocks": 64,
        "num_device_used_blocks": 8,
        "num_device_cached_blocks": 8,
        "num_device_in_transit_blocks": 0,
        "num_host_blocks": 64,
        "num_host_cached_blocks": 8,
        "num_host_in_transit_blocks": 0,
    }
    return KvTierStats(**{**base, **counts})


class Link:
    """Running totals of an engine that copies."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def add(self, **more: float) -> KvTierStats:
        for name, value in more.items():
            self.counts[name] = self.counts.get(name, 0) + value
        return totals(**self.counts)

    def copy(self, num_out: int, num_back: int, *, wait_share: float = 1.0) -> KvTierStats:
        out_s, back_s = num_out * OFFLOAD_S, num_back * ONBOARD_S
        return self.add(
            num_offloads_completed=num_out,
            num_onboards_completed=num_back,
            offload_s=out_s,
            onboard_s=back_s,
            wait_s=wait_share * (out_s + back_s),
        )


def test_nothing_is_known_before_the_first_copy() -> None:
    costs = CopyCostModel()
    assert costs.observe(totals()) == 0.0
    assert (costs.offload_block_s, costs.onboard_block_s, costs.wait_share) == (0.0, 0.0, 1.0)


def test_learns_both_directions_by_the_block() -> None:
    costs, link = CopyCostModel(), Link()
    for i in range(10):
        costs.observe(link.copy(1 + i % 4, i % 3))
    assert costs.offload_block_s == pytest.approx(OFFLOAD_S)
    assert costs.onboard_block_s == pytest.approx(ONBOARD_S)


def test_the_way_back_costs_what_the_way_out_did_until_it_is_known() -> None:
    costs, link = CopyCostModel(), Link()
    costs.observe(link.copy(4, 0))
    assert costs.onboard_block_s == pytest.approx(OFFLOAD_S)
    costs.observe(link.copy(0, 1))
    assert costs.onboard_block_s == pytest.approx(ONBOARD_S)


def test_a_hiccup_of_the_link_does_not_count() -> None:
    costs, link = CopyCostModel(), Link()
    for i in range(20):
        costs.observe(link.copy(4, 0))
        if i % 5 == 4:
            costs.observe(link.add(num_offloads_completed=1, offload_s=2.0, wait_s=2.0))
    assert costs.offload_block_s == pytest.approx(OFFLOAD_S)


def test_a_link_of_half_the_speed_is_believed_soon() -> None:
    costs, link = CopyCostModel(), Link()
    for _ in range(40):
        costs.observe(link.copy(4, 0))
    for _ in range(17):
        costs.observe(link.add(num_offloads_completed=4, offload_s=8 * OFFLOAD_S))
    assert costs.offload_block_s == pytest.approx(2 * OFFLOAD_S)


def test_totals_that_fall_are_a_new_engines() -> None:
    """What was learned stays, and the first totals of the new engine count in full."""
    costs, link = CopyCostModel(), Link()
    for _ in range(5):
        costs.observe(link.copy(4, 4))
    fresh = Link()
    assert costs.observe(fresh.copy(2, 1)) == pytest.approx(2 * OFFLOAD_S + ONBOARD_S)
    assert costs.offload_block_s == pytest.approx(OFFLOAD_S)
    assert costs.onboard_block_s == pytest.approx(ONBOARD_S)
    assert costs.observe(fresh.copy(0, 0)) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_how_much_of_the_copies_steps_waited_for(share: float) -> None:
    costs, link = CopyCostModel(), Link()
    for i in range(10):
        costs.observe(link.copy(i % 3, 1, wait_share=share))
    assert costs.wait_share == pytest.approx(share)


def test_a_short_time_without_waiting_changes_the_share_little() -> None:
    """Whom that lets in stays."""
    costs, link = CopyCostModel(), Link()
    for share, num_blocks in [(0.5, 4000), (0.0, 200)]:  # 8 s of copying, then 0.4
        costs.observe(link.copy(num_blocks, 0, wait_share=share))
    assert costs.wait_share == pytest.approx(0.46, abs=0.02)
    for _ in range(8):
        costs.observe(link.copy(1000, 0, wait_share=0.0))
    assert costs.wait_share < 0.1


def test_failed_copies_teach_nothing_about_speed() -> None:
    costs, link = CopyCostModel(), Link()
    costs.observe(link.copy(4, 4))
    costs.observe(link.add(num_offloads_started=3, num_offloads_failed=3, offload_s=5.0))
    assert costs.offload_block_s == pytest.approx(OFFLOAD_S)


def test_waits_for_copies_do_not_make_the_engine_look_slow() -> None:
    plain, model = CostModel(), CostModel()
    feed(plain, 120)
    rng, link = random.Random(1), Link()
    for i in range(120):
        num_gen = rng.randint(0, 8)
        prefill = rng.choice([0, 0, 64, 256]) if num_gen else 64
        context = num_gen * rng.randint(50, 400)
        copied = link.copy(20 if i % 4 == 0 else 0, 0)
        waited_s = 20 * OFFLOAD_S if i % 4 == 0 else 0.0
        stats = iteration(num_gen, context, prefill, extra=waited_s)
        model.observe_iteration(msgspec.structs.replace(stats, kv_tier_stats=copied))
    estimate, without = model.estimate(0.05), plain.estimate(0.05)
    assert estimate.offload_block_s == pytest.approx(OFFLOAD_S)
    assert estimate.copy_wait_share == pytest.approx(1.0)
    assert estimate.step_s(8, 2400) == pytest.approx(without.step_s(8, 2400), rel=1e-3)
    unknown = dataclasses.replace(
        estimate, offload_block_s=0.0, onboard_block_s=0.0, copy_wait_share=1.0
    )
    assert dataclasses.astuple(unknown) == pytest.approx(dataclasses.astuple(without), rel=0.01)


def test_a_resume_is_learned_without_what_it_loaded() -> None:
    model, link = CostModel(), Link()
    feed(model, 50)
    model.observe_iteration(
        msgspec.structs.replace(iteration(8, 2400, 0), kv_tier_stats=link.copy(0, 10))
    )
    for _ in range(8):
        model.observe_resume(0.1 + 50 * ONBOARD_S, 1, 50)
    assert model.estimate(0.05).resume_s == pytest.approx(0.1)
