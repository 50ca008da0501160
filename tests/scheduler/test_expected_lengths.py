"""What answers are expected to have acts as a limit would; what has to fit does not go by it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.scheduler.build import LENGTHS, MAX_UTIL, known_lengths, running, waiting
from tests.scheduler.decisions import decide
from tests.scheduler.test_fast_paths import crowds, unbalanced
from tests.scheduler.test_plan_properties import snapshots
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import excess_order, is_low, victims
from tokenflow.scheduler_view import view_of
from tokenflow.types import LengthEstimate, Snapshot

EXPECTED = [lengths for lengths in LENGTHS if lengths is not None]


def limited(snap: Snapshot) -> Snapshot:
    """The same with what is expected as limits; blocks at full length are what they were."""
    assert snap.lengths is not None
    s = snap.sessions
    expected = snap.lengths.expected(s.num_generated, s.max_tokens)
    return dataclasses.replace(
        snap, sessions=dataclasses.replace(s, max_tokens=expected), lengths=None
    )


@given(
    snap=crowds() | unbalanced() | snapshots(),
    lengths=st.sampled_from(EXPECTED),
    tail_share=st.sampled_from([0.0, 0.5, 1e6]),
)
@settings(max_examples=250, deadline=None)
def test_orders_shares_and_the_load_go_by_what_is_expected(
    snap: Snapshot, lengths: LengthEstimate, tail_share: float
) -> None:
    snap = dataclasses.replace(snap, lengths=lengths)
    policy = TokenflowPolicy(tail_share=tail_share, max_arrival_gaps=0.0, load_by_expectation=True)
    known, alike = view_of(snap, policy), view_of(limited(snap), policy)
    assume(len(known.running) == len(alike.running))  # nobody would end by the next step
    assert known.num_left == alike.num_left
    rows = np.arange(len(snap.sessions))
    assert is_low(known, rows).tolist() == is_low(alike, rows).tolist()
    assert excess_order(known, rows).tolist() == excess_order(alike, rows).tolist()
    both = set(victims(known).rows) & set(victims(alike).rows)
    orders = [[row for row in victims(view).rows if row in both] for view in (known, alike)]
    assert orders[0] == orders[1]
    if len(known.waiting) and known.snapshot.kv.capacity_policy is MAX_UTIL:
        admitted = [Load(view).num_admitted(view.waiting) for view in (known, alike)]
        assert admitted[0] == admitted[1]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_nobody_yields_to_one_that_may_not_end_in_time(lengths: LengthEstimate | None) -> None:
    """The pool holds one of them; what is admitted can never be paused. Most such answers would
    have ended before the reader has read everything; but not all."""
    reads = running(20.0, num_generated=100, max_tokens=2000, num_blocks_held=8, read_rate=2.0)
    fixed = waiting(pausable=False, max_tokens=2000, num_blocks_needed=8, num_blocks_final=66)
    decision = decide(
        [reads, fixed],
        max_batch_size=4,
        num_total_blocks=70,
        num_free_blocks=2,
        capacity_policy=MAX_UTIL,
        lengths=lengths,
    )
    assert not decision.pause


def test_one_that_is_expected_to_end_may_still_yield() -> None:
    """All that were seen had 101 tokens. It has 100, and a newcomer waits."""
    rich = running(25.0, num_generated=100)
    rows, known = [rich, waiting()], known_lengths((101, 1e-9))
    decision = decide(rows, max_batch_size=1, lengths=known)
    assert (decision.pause, decision.admit) == ((10,), (11,))
    assert decision == decide(rows, max_batch_size=1)
