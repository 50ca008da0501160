"""The load at a few instants: nobody hides from it behind others who are read for much longer."""

from __future__ import annotations

from typing import Any

import pytest

from perf.virtual.values import SimEngine, SimRequest
from tests.scheduler.build import LENGTHS, MAX_UTIL, running, snapshot, waiting
from tests.scheduler.outcomes import NO_EVICT, Outcome, worst_stall_s
from tests.scheduler.test_fast_paths import costs_of
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_view import view_of
from tokenflow.types import LengthEstimate


def stream(read_rate: float, max_tokens: int, num_generated: int = 0) -> dict[str, Any]:
    """Fields of one with a prompt of 128."""
    return {
        "read_rate": read_rate,
        "max_tokens": max_tokens,
        "num_generated": num_generated,
        "num_prompt_tokens": 128,
        "num_blocks_held": -(-(128 + num_generated) // 32) if num_generated else 0,
        "num_blocks_needed": -(-(128 + num_generated) // 32),
        "num_blocks_final": -(-(128 + max_tokens) // 32),
    }


def num_admitted(
    rows: list[dict[str, Any]],
    num_blocks: int = 4000,
    prefill_speed: float = 50,
    lengths: LengthEstimate | None = None,
    by_expectation: bool = False,
) -> int:
    """Of the rows that wait, one after the other."""
    sizes = {"max_batch_size": 64, "num_total_blocks": num_blocks, "capacity_policy": MAX_UTIL}
    snap = snapshot(rows, costs=costs_of(1.5, prefill_speed), lengths=lengths, **sizes)
    view = view_of(snap, TokenflowPolicy(load_by_expectation=by_expectation))
    return Load(view).num_admitted(view.waiting)


@pytest.mark.parametrize("num_slow", [0, 100, 201])
def test_short_answers_count_beside_many_that_are_read_for_long(num_slow: int) -> None:
    """200 of 5 s, far beyond what the engine makes, before slow ones of 1,000 s in the queue."""
    short = [waiting(**stream(10.0, 50)) for _ in range(200)]
    slow = [waiting(**stream(1.0, 1000)) for _ in range(num_slow)]
    assert num_admitted([*short, *slow]) == num_admitted(short) == 53


def test_answers_count_as_long_as_they_may_be_or_if_asked_for_as_expected() -> None:
    """All may have 2,000 tokens, and nearly all have 120."""
    long, short = ([waiting(**stream(4.0, num))] * 200 for num in (2000, 139))
    by_limits = num_admitted(long, 400)
    assert num_admitted(long, 400, lengths=LENGTHS[1]) == by_limits
    expected = num_admitted(long, 400, lengths=LENGTHS[1], by_expectation=True)
    assert expected == num_admitted(short, 400) > 1.5 * by_limits


@pytest.mark.parametrize("num_host_blocks", [400, 1200, 2000])
def test_as_many_as_both_tiers_hold_with_what_is_unread(num_host_blocks: int) -> None:
    """On an engine that decodes fast and prefills slowly: a little more than both tiers hold would
    make each turn compute all of its KV again."""
    rows = [waiting(**stream(4.0, 400)) for _ in range(200)]
    tiers = {"num_total_blocks": 400, "num_host_blocks": num_host_blocks}
    limits = {"max_batch_size": 64, "capacity_policy": MAX_UTIL, "costs": costs_of(3.0, 0.5)}
    view = view_of(snapshot(rows, **tiers, **limits), TokenflowPolicy())
    num_tokens = Load(view).num_admitted(view.waiting) * (128 + 400)
    assert 0.95 * sum(tiers.values()) * 32 <= num_tokens <= sum(tiers.values()) * 32


def test_nothing_is_lost_of_what_never_leaves_the_device() -> None:
    """The pool holds all in the beginning. The engine is so fast that a turn is a whole answer."""
    rows = [*(running(1.0, num_generated=100) for _ in range(5)), waiting(read_rate=1.0)]
    limits = {"max_batch_size": 5, "num_total_blocks": 22, "capacity_policy": MAX_UTIL}

    def first(num_host_blocks: int) -> float:
        snap = snapshot(
            rows, num_host_blocks=num_host_blocks, costs=costs_of(500.0, 0.01), **limits
        )
        return float(Load(view_of(snap, TokenflowPolicy())).capacity(5)[0])

    assert first(50) == first(1000)


def test_short_answers_count_beside_slow_ones_that_are_served() -> None:
    served = [running(3.0, **stream(0.25, 1000, 10)) for _ in range(60)]
    crowd = [waiting(**stream(25.0, 50)) for _ in range(59)]
    assert 0 < num_admitted([*served, *crowd]) < 55


def test_one_that_is_read_for_hours_hides_nobody() -> None:
    """Most answers are tiny, others outgrow the pool: one that comes last lets in hardly more, as
    the instants move."""
    rows = [waiting(**stream(6.0, 4)) for _ in range(60)]
    rows += [waiting(**stream(4.0, 2000)) for _ in range(50)]
    last = waiting(**stream(0.3, 8000))
    assert 60 < num_admitted([*rows, last], 400, 1) <= num_admitted(rows, 400, 1) + 3 < 110


def test_readers_of_short_answers_do_not_stall_beside_slow_ones() -> None:
    """61 slow readers of long answers are far ahead when 59 come who read ten times as fast."""
    slow = {"max_tokens": 600, "read_rate": 1.0}
    work = [SimRequest(arrival_time=0.01 * i, num_prompt_tokens=60, **slow) for i in range(61)]
    fast = {"max_tokens": 60, "read_rate": 10.0}
    work += [
        SimRequest(arrival_time=60 + 0.01 * i, num_prompt_tokens=60, **fast) for i in range(59)
    ]
    sizes = {"max_batch_size": 16, "num_total_blocks": 1000, "prefill_tokens_per_s": 20_000.0}
    run = Outcome(work, SimEngine(capacity_policy=NO_EVICT, is_warm=True, **sizes))
    assert worst_stall_s(run.result) <= CLIENT_VISIBLE_STALL_S
