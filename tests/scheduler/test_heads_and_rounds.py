"""Who is held back for a newcomer, and what blocks that are given on again and again are worth."""

from __future__ import annotations

import math
from typing import Any

from tests.scheduler.build import NOW, paused, snapshot, waiting
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision


def decide(rows: list[dict[str, Any]]) -> Decision:
    return plan(snapshot(rows, num_total_blocks=32), TokenflowPolicy())


def blocks(num: int) -> dict[str, int]:
    return {"num_blocks_needed": num, "num_blocks_final": num}


def test_a_head_that_fits_again_holds_nobody_back() -> None:
    """The second would be admitted, and the third not fit beside it. But the first would have no
    way back then; without the second everybody fits, so nobody is held back."""
    rows = [
        paused(5.0, **blocks(18)),
        waiting(wait_since_time=NOW - 10, arrival_time=NOW - 10, pausable=False, **blocks(21)),
        waiting(wait_since_time=NOW - 9, arrival_time=NOW - 9, **blocks(19)),
    ]
    assert decide(rows).resume == (10,)


def test_blocks_given_on_twice_are_there_once_at_a_time() -> None:
    """One that can never be paused would leave 11 blocks, 7 of them again and again; the first
    stream needs 18 within 3 s."""
    rows = [
        paused(3.2, **blocks(18)),
        paused(
            math.inf,
            has_reader=False,
            wait_since_time=NOW - 10.5,
            max_tokens=1000,
            read_rate=6.0,
            **blocks(7),
        ),
        paused(70.0, **blocks(12)),
        waiting(pausable=False, max_tokens=400, **blocks(21)),
    ]
    decision = decide(rows)
    assert 11 in decision.resume
    assert not decision.admit
