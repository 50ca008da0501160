"""Ways to decide in less time decide the same as the plain ones, which are written down here."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.build import (
    COSTS,
    LENGTHS,
    MAX_UTIL,
    NO_EVICT,
    paused,
    running,
    snapshot,
    waiting,
)
from tests.scheduler.test_plan_properties import snapshots
from tokenflow.policies import TokenflowPolicy, WaitForm, rank
from tokenflow.scheduler_balance import exchange
from tokenflow.scheduler_crowd import place_crowd
from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_fixed import FixedShare
from tokenflow.scheduler_forecast import PrefillBudget
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import Pool, is_low, victims
from tokenflow.scheduler_view import View, view_of
from tokenflow.types import CostEstimate, Snapshot

POLICY = TokenflowPolicy()


def costs_of(speed: float, prefill_speed: float, offload_block_s: float = 0.0) -> CostEstimate:
    return dataclasses.replace(
        COSTS,
        prefill_tokens_per_s=COSTS.prefill_tokens_per_s * prefill_speed,
        step_base_s=COSTS.step_base_s / speed,
        step_per_sequence_s=COSTS.step_per_sequence_s / speed,
        step_per_context_token_s=COSTS.step_per_context_token_s / speed,
        offload_block_s=offload_block_s,
    )


@st.composite
def crowds(draw) -> Snapshot:
    """All slots taken, some paused, many newcomers; most of them can be placed."""
    num_slots = draw(st.integers(4, 20))
    blocks = st.sampled_from([3, 4, 4, 4, 6])
    most_s, num_fixed = draw(st.sampled_from([4, 60])), draw(st.sampled_from([0, 1, 12]))
    rows = []
    for _ in range(num_slots):
        slack, num = draw(st.floats(1, most_s)), draw(blocks)
        extra = {"num_blocks_held": num, "num_blocks_needed": num, "num_blocks_final": num}
        rows.append(running(slack, pausable=draw(st.integers(0, 9)) > 0, **extra))
    for _ in range(draw(st.integers(0, 8))):
        rows.append(paused(draw(st.floats(3, 60))))
    for _ in range(draw(st.integers(1, 30))):
        num, is_pausable = draw(blocks), draw(st.integers(0, 19)) >= num_fixed
        extra = {"num_blocks_needed": num, "num_blocks_final": num, "pausable": is_pausable}
        reader = {"has_reader": draw(st.integers(0, 8)) > 0, "read_rate": draw(st.floats(1, 12))}
        prompt = {"num_resume_tokens": draw(st.sampled_from([8, 32, 32, 64]))}
        rows.append(waiting(**extra, **prompt, **reader))
    speeds = draw(st.sampled_from([1.0, 5.0, 500.0])), draw(st.sampled_from([0.01, 0.2, 1, 99]))
    held = sum(row.get("num_blocks_held", 0) for row in rows)
    return snapshot(
        rows,
        max_batch_size=num_slots,
        num_total_blocks=held + draw(st.integers(0, 40)),
        capacity_policy=draw(st.sampled_from([NO_EVICT, MAX_UTIL])),
        costs=costs_of(*speeds, draw(st.sampled_from([0.0, 0.001]))),
        num_host_blocks=draw(st.sampled_from([0, 50])),
        lengths=draw(st.sampled_from(LENGTHS)),
    )


@st.composite
def unbalanced(draw) -> Snapshot:
    """Running streams that are far ahead, paused ones that are nearly read out or farther ahead,
    no room."""
    sizes = st.sampled_from([2, 4, 4, 4, 5])
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        num = draw(sizes)
        extra = {"num_blocks_held": num, "num_blocks_needed": num}
        extra["priority"] = draw(st.sampled_from([0.5, 0.5, 0.5, 0.8]))
        extra["num_generated"] = draw(st.sampled_from([60, 100]))
        rows.append(
            running(draw(st.floats(5, 30)), has_reader=draw(st.integers(0, 5)) > 0, **extra)
        )
    held, num_slots = sum(row["num_blocks_held"] for row in rows), len(rows)
    for _ in range(draw(st.integers(1, 8))):
        resume = {"num_resume_tokens": draw(st.sampled_from([1, 1, 1, 33, 100]))}
        size = {"num_blocks_needed": draw(sizes), "max_tokens": draw(st.sampled_from([150, 256]))}
        is_far = draw(st.integers(0, 2)) == 0
        if is_far:
            resume["num_generated"] = draw(st.integers(100, 140))
        rows.append(
            paused(draw(st.floats(8, 25) if is_far else st.floats(0.5, 5)), **resume, **size)
        )
    return snapshot(
        rows,
        max_batch_size=num_slots + draw(st.integers(0, 1)),
        num_total_blocks=held + draw(st.integers(0, 3)),
        costs=costs_of(draw(st.sampled_from([1.0, 5.0])), draw(st.sampled_from([1, 20]))),
        lengths=draw(st.sampled_from(LENGTHS)),
    )


@given(crowds())
@settings(max_examples=250, deadline=None)
def test_a_crowd_is_placed_as_one_by_one(snap: Snapshot) -> None:
    view = view_of(snap, POLICY)
    able, rows = victims(view), view.waiting
    together, load, prefill = Draft(view), Load(view), PrefillBudget(view)
    steps = place_crowd(view, together, able, rows, load, prefill)

    one_by_one, plain_load, plain_prefill = Draft(view), Load(view), PrefillBudget(view)
    pool = Pool(one_by_one, able)
    assert [row for row, _ in steps] == rows[: len(steps)].tolist()
    for row, chosen in steps:
        assert plain_load.admits(row)
        assert plain_prefill.allows(row)
        assert FixedShare(view, one_by_one).allows(row)
        assert pool.for_row(one_by_one, row, plain_prefill.seconds(row)) == list(chosen)
        one_by_one.place(row, "waiting", chosen)
        pool.take_out(chosen)
        plain_load.add(row)
        plain_prefill.take(row)
    assert together.decision() == one_by_one.decision()
    assert (together.slots, together.blocks) == (one_by_one.slots, one_by_one.blocks)
    for row in rows[len(steps) :].tolist():  # what follows is judged alike
        assert load.admits(row) == plain_load.admits(row)
        assert load.capacity(row).tolist() == plain_load.capacity(row).tolist()
        assert prefill.allows(row) == plain_prefill.allows(row)


def test_a_crowd_that_fits_is_placed_as_a_whole() -> None:
    rows = [running(50.0) for _ in range(12)] + [waiting() for _ in range(12)]
    costs = dataclasses.replace(COSTS, step_base_s=0.001, step_per_sequence_s=1e-5)
    costs = dataclasses.replace(costs, prefill_tokens_per_s=1e5)
    view = view_of(snapshot(rows, max_batch_size=12, num_total_blocks=48, costs=costs), POLICY)
    draft = Draft(view)
    steps = place_crowd(view, draft, victims(view), view.waiting, Load(view), PrefillBudget(view))
    assert len(steps) == len(draft.pause) == len(draft.admit) == 12


def test_nobody_yields_to_a_crowd_whose_prefill_it_cannot_spare() -> None:
    rows = [running(2.0, num_generated=90) for _ in range(8)]
    rows += [waiting(num_resume_tokens=64) for _ in range(8)]
    costs = costs_of(20.0, 0.015)
    view = view_of(snapshot(rows, max_batch_size=8, num_total_blocks=32, costs=costs), POLICY)
    load, prefill, able = Load(view), PrefillBudget(view), victims(view)
    assert 0 < min(able.others[1]) < prefill.seconds(8) < 2.0
    assert load.admits(8)
    assert prefill.allows(8)
    assert place_crowd(view, Draft(view), able, view.waiting, load, prefill) == []


@given(snap=crowds(), by_expectation=st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_readers_need_is_summed_stream_by_stream(snap: Snapshot, by_expectation: bool) -> None:
    """The load by plain loops: what each stream needs and holds at each instant, against what a
    full batch of those that are left makes."""
    view = view_of(snap, TokenflowPolicy(load_by_expectation=by_expectation))
    load, s, kv = Load(view), snap.sessions, snap.kv
    served = [*view.running.tolist(), *view.starting.tolist(), *view.paused.tolist()]
    served = [row for row in served if s.started[row] or row in view.starting]
    ends = [(begin + left, rate) for begin, rate, left in (needs(view, row) for row in served)]
    ends += [needs(view, row)[2:0:-1] for row in view.waiting.tolist()]
    if not ends:
        return
    times = borders(sorted(ends))
    for row in view.waiting.tolist()[:4]:
        busy_s = most = 0.0
        capacity = load.capacity(row)
        for before, after, gamma in zip(times[:-1], times[1:], capacity, strict=True):
            now, rates, tokens = (before + after) / 2, 0.0, []
            for other in [*served, row]:
                begin, rate, left = needs(view, other)
                if now < begin + left:
                    read = rate * min(max(now - begin, 0.0), left)
                    tokens.append(float(s.num_prompt_tokens[other] + s.num_generated[other]) + read)
                    rates += rate if now > begin else 0.0
            if tokens and sum(tokens) <= kv.num_total_blocks * kv.tokens_per_block:
                batch = max(1, min(len(tokens), kv.max_batch_size))
                step_s = snap.costs.step_s(batch, batch * sum(tokens) / len(tokens))
                if kv.capacity_policy is not NO_EVICT:
                    assert gamma == pytest.approx(batch / step_s)
            busy_s += rates * (after - before) / max(float(gamma), 1e-9)
            most = max(most, busy_s / (POLICY.load_limit * after) if after else 0.0)
        if abs(most - 1) > 1e-6:
            assert load.admits(row) == (most < 1)
        load.add(row)
        served.append(row)


def borders(ends: list[tuple[float, float]]) -> list[float]:
    """Of the spans that are looked at; ends: (seconds until its end, tokens/s) of each stream."""
    squares, rates = [(k / 6) ** 2 for k in range(7)], list(accumulate(rate for _, rate in ends))
    half_s, last_s = ends[len(ends) // 2][0], ends[-1][0]
    soon_s, late_s = (
        next(end for (end, _), read in zip(ends, rates, strict=True) if read >= share * rates[-1])
        for share in (0.125, 0.875)
    )
    rest_s = min(last_s - half_s, 4 * max(late_s - half_s, 0.0))
    first = [half_s * x for x in squares]
    first[1] = min(first[1], soon_s)
    return first + [half_s + rest_s * x for x in squares[3:-1]] + [last_s]


def needs(view: View, row: int) -> tuple[float, float, float]:
    """Seconds until `row` needs tokens; tokens/s from then on; for how many seconds."""
    s, policy = view.snapshot.sessions, view.policy
    margin_s = policy.bridge_margins * (
        policy.slack_margin_s + policy.conservativeness * view.round_trip_s
    )
    rate = min(float(s.read_rate[row]), 1.0 / view.step_s)
    unread = s.started[row] and s.has_reader[row]
    begin = max(0.0, float(s.slack_s[row]) - margin_s) if unread else 0.0
    num_tokens = view.num_expected if policy.load_by_expectation else s.max_tokens
    return begin, rate, int(num_tokens[row] - s.num_generated[row]) / rate


@given(unbalanced() | snapshots(), st.floats(0, 25))
@settings(max_examples=250, deadline=None)
def test_exchanges_are_those_found_one_by_one(snap: Snapshot, min_gain: float) -> None:
    policy = dataclasses.replace(POLICY, min_exchange_gain=min_gain)
    view = view_of(snap, policy)
    fast, plain = Draft(view), Draft(view)
    if fast.blocks < 0:
        return
    able = victims(view)
    exchange(view, fast, able)
    plain_exchange(view, plain, able.for_others)
    assert fast.decision() == plain.decision()


def plain_exchange(view: View, draft: Draft, others: list[tuple[int, float]]) -> None:
    plain_yield_to_low(view, draft, others)
    has_excess = len(draft.admit) == len(view.waiting) and not view.overflow.lost_share
    if has_excess and view.load <= view.policy.max_excess_load:
        plain_yield_to_farthest(view, draft, others)


def share_unread(view: View, row: int) -> float:
    s = view.snapshot.sessions
    return float(s.slack_s[row] * s.read_rate[row] / view.num_expected[row])


def round_trip_tokens(view: View, row: int) -> float:
    costs = view.snapshot.costs
    lost_s = view.engine_s(row) + costs.copy_wait_share * view.overflow.mean_copy_s
    return 1.0 + (len(view.running) + len(view.starting)) * lost_s / view.step_s


def plain_yield_to_farthest(view: View, draft: Draft, others: list[tuple[int, float]]) -> None:
    s, policy = view.snapshot.sessions, view.policy
    high, worthless = policy.high_share, policy.worthless_share
    half = (worthless - high) / 2
    now = view.snapshot.now
    readers = [
        row
        for row in view.paused.tolist()
        if s.has_reader[row] and now - s.wait_since_time[row] >= view.quantum_s
    ]
    takers = [row for row in readers if share_unread(view, row) >= high + half]
    givers = [
        (row, spare_s)
        for row, spare_s in others
        if s.has_reader[row] and high <= share_unread(view, row) < worthless
    ]
    givers.sort(key=lambda giver: share_unread(view, giver[0]))
    for taker in sorted(takers, key=lambda row: -s.num_generated[row]):
        if draft.named(taker) or draft.fits(taker):
            continue
        willing = [
            row
            for row, spare_s in givers
            if not draft.named(row)
            and spare_s >= view.engine_s(taker)
            and (worthless - share_unread(view, row)) * view.num_expected[row]
            > 0.5 * round_trip_tokens(view, taker)
            and s.priority[row] <= s.priority[taker]
            and s.num_generated[row] < s.num_generated[taker] - half * view.num_expected[taker]
        ]
        chosen = draft.victims_for(taker, willing)
        if chosen is not None and len(chosen) <= 2:
            draft.place(taker, "balance", chosen)


def plain_yield_to_low(view: View, draft: Draft, others: list[tuple[int, float]]) -> None:
    s, policy = view.snapshot.sessions, view.policy

    def share(row: int) -> float:
        return share_unread(view, row)

    def gain(taker: int, giver: int) -> float:
        num_tokens = (policy.high_share - share(taker)) * float(view.num_expected[taker])
        worth = 0.0
        if s.has_reader[giver]:
            middle = share(giver) + 0.5 * num_tokens / float(view.num_expected[giver])
            span = policy.worthless_share - policy.high_share
            worth = min(1.0, max(0.0, (policy.worthless_share - middle) / span))
        cost = policy.min_exchange_gain * round_trip_tokens(view, taker)
        return num_tokens * (1.0 - worth) - cost

    low = view.paused[is_low(view, view.paused)].tolist()
    takers = sorted(low, key=share)[: view.snapshot.kv.max_batch_size]
    ahead = [
        (row, spare_s)
        for row, spare_s in others
        if not s.has_reader[row] or share(row) >= policy.high_share
    ]
    for taker in takers:
        engine_s = view.engine_s(taker)
        willing = (row for row, spare_s in ahead if spare_s >= engine_s and not draft.named(row))
        chosen = draft.victims_for(taker, willing)
        if chosen is not None and len(chosen) == 1 and gain(taker, chosen[0]) > 0:
            draft.place(taker, "balance", chosen)


@given(
    st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 60), st.booleans()), max_size=12),
    st.sampled_from([0.1, 2.0]),
    st.sampled_from(list(WaitForm)),
    st.sampled_from([None, True, False]),
)
def test_priority_is_its_formula(
    rows: list[tuple[float, float, bool]], floor_s: float, form: WaitForm, all_started: bool | None
) -> None:
    policy = dataclasses.replace(POLICY, slack_floor_s=floor_s, wait_form=form)
    started = [flag if all_started is None else all_started for _, _, flag in rows]
    slack = np.array([s if flag else np.nan for (s, _, _), flag in zip(rows, started, strict=True)])
    waited = np.array([w for _, w, _ in rows], dtype=np.float64)
    got = rank(policy, slack, waited, np.array(started, dtype=np.bool_), np.full(len(rows), 0.5))
    for p, s, w, flag in zip(got, slack, waited, started, strict=True):
        form_w = w if form is WaitForm.AGEING else 1.0 / (w + floor_s)
        expected = -math.log(max(min(s, 1e6) if flag else 1.0, floor_s))
        expected += policy.wait_weight * form_w + policy.priority_shift * 0.5
        assert p == pytest.approx(expected + (0.0 if flag else policy.unstarted_bonus))
