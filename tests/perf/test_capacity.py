"""The capacity planner: its search, its loads, its verdicts, and answers on a small machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.lab import capacity_report, capacity_text
from perf.lab.capacity import (
    MOST_SHARE,
    Answer,
    Machine,
    Question,
    answer,
    decode_tokens_per_s,
    estimated_load,
    first_token_s,
    prefill_s,
)
from perf.lab.load_probe import Limits, Probe, SeedRun, Watch, probe
from perf.lab.planned_loads import (
    InTurns,
    LoadKind,
    OneBurst,
    PlannedWork,
    Readers,
    Steady,
    behind_full_machine,
)
from perf.lab.policies import FCFS_MAX_UTILIZATION, FCFS_RESERVE, TOKENFLOW, PolicyRow
from perf.lab.search import FARTHEST, Bracket, largest_load
from tokenflow.metrics import ttft_s

READERS = Readers(rate=6.0, prompt_tokens=64, answer_tokens=32)
LIMITS = Limits(ttft_target_s=1.5, max_share_stalled=0.01)
SMALL = Question(
    machine=Machine(gpu="4090", model="llama3-8b", max_batch_size=4, host_bytes=1e9),
    readers=READERS,
    kind=Steady(),
    limits=LIMITS,
    seeds=(1, 2),
    num_measured=20,
)
# Short of pool, not of slots: 3 to 5 streams fit.
TIGHT = replace(
    SMALL,
    machine=Machine(gpu="4090", model="llama3-8b", memory_fraction=0.69, host_bytes=4e9),
    readers=Readers(rate=6.0, prompt_tokens=512, answer_tokens=256),
    seeds=(1,),
    num_measured=40,
)


@pytest.fixture(scope="module")
def small_answers() -> list[Answer]:
    return [answer(SMALL, row) for row in (TOKENFLOW, FCFS_RESERVE)]


@settings(max_examples=200, deadline=None)
@given(
    limit=st.floats(0.02, 5000),
    first=st.floats(0.5, 200),
    tolerance=st.floats(0.01, 0.3),
    is_whole=st.booleans(),
)
def test_the_search_ends_with_two_close_loads_around_the_limit(
    limit: float, first: float, tolerance: float, is_whole: bool
) -> None:
    tried: list[float] = []

    def passes(load: float) -> bool:
        tried.append(load)
        return load <= limit

    bracket = largest_load(passes, first, tolerance=tolerance, is_whole=is_whole)
    assert len(tried) == len(set(tried)) <= 20
    assert all(load > 0 and (not is_whole or load == round(load)) for load in tried)
    if bracket.passed is not None:
        assert bracket.passed in tried
        assert bracket.passed <= limit
    if bracket.failed is not None:
        assert bracket.failed in tried
        assert bracket.failed > limit
    if bracket.passed is None:
        assert limit < max(first / FARTHEST * 1.01, 1.0 if is_whole else 0.0)
    elif bracket.failed is None:
        assert limit >= min(tried) * FARTHEST * 0.99
    else:
        is_next = is_whole and bracket.failed == bracket.passed + 1
        # Three digits: the middle of two loads may be rounded by half of the last one.
        assert is_next or bracket.failed <= bracket.passed * (1 + tolerance)


def test_a_search_refuses_what_it_cannot_tell_apart() -> None:
    for first, tolerance in ((0.0, 0.06), (1.0, 0.001)):
        with pytest.raises(ValueError, match="first must be > 0"):
            largest_load(lambda load: True, first, tolerance=tolerance, is_whole=False)


@pytest.mark.parametrize("kind", [Steady(), Steady(cv=2.0)])
def test_a_larger_steady_load_is_the_same_requests_closer_together(kind: LoadKind) -> None:
    slow = kind.work(2.0, READERS, 7, num_warm_up=10, num_measured=40)
    fast = kind.work(8.0, READERS, 7, num_warm_up=10, num_measured=40)
    assert (slow.num_warm_up, len(slow.requests), slow.look_time) == (10, 50, 25.0)
    assert slow.requests[-1].arrival_time == pytest.approx(25.0)
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert other.arrival_time == pytest.approx(one.arrival_time / 4)
        assert replace(other, arrival_time=0) == replace(one, arrival_time=0)


def test_turns_have_the_mean_load_and_end_quietly() -> None:
    kind = InTurns(off_s=20.0, on_s=10.0, peak=3.0)
    work = kind.work(5.0, READERS, 3, num_warm_up=0, num_measured=400)
    times = np.array([r.arrival_time for r in work.requests])
    assert work.look_time == 3 * 30.0 + 20.0
    assert len(times) == 3 * 30 * 5
    assert np.all(times % 30 >= 20)  # nothing is left for the quiet times
    assert times[-1] < work.look_time
    assert work.num_warm_up == 0
    half = replace(kind, peak=2.0).work(5.0, READERS, 3, num_warm_up=0, num_measured=400)
    assert half.num_warm_up == sum(r.arrival_time < 20 for r in half.requests) > 0
    for wrong in ({"peak": 3.1}, {"peak": 0.5}, {"on_s": 0.0}, {"off_s": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            replace(kind, **wrong)


def test_those_who_are_there_already_stand_somewhere_in_their_answers() -> None:
    work = Steady().work(2.0, READERS, 7, num_warm_up=5, num_measured=20)
    full = behind_full_machine(work, READERS, 7, num=400, span_s=3.0)
    fill, rest = full.requests[:400], full.requests[400:]
    assert (full.num_warm_up, full.look_time) == (405, 12.5 + 3.0)
    assert all(r.arrival_time <= 3.0 for r in fill)
    assert all(r.max_tokens >= 1 for r in fill)
    assert np.mean([r.max_tokens for r in fill]) == pytest.approx(16, rel=0.1)
    whole = [r.num_prompt_tokens + r.max_tokens for r in fill]
    assert np.mean(whole) == pytest.approx(96, rel=0.05)
    for one, other in zip(work.requests, rest, strict=True):
        assert other == replace(one, arrival_time=one.arrival_time + 3.0)


def test_what_is_watched_of_a_run() -> None:
    watch = Watch(num_total_blocks=100, look_time=5.0)
    iteration = {"num_queued": 1, "num_active": 4, "num_scheduled": 3}
    for rid, num_prompt in (("a", 10), ("b", 20)):
        watch.record("arrival", 0.0, request_id=rid, num_prompt_tokens=num_prompt, max_tokens=9)
    watch.record("iteration", 4.9, **iteration, num_waiting=50, num_preempted=0, free_num_blocks=40)
    watch.record("pause", 5.0, request_id="a", num_tokens=5)
    watch.record("pause", 5.0, request_id="b", num_tokens=1)
    watch.record("resume", 5.1, request_id="b")
    watch.record("pause", 5.2, request_id="b", num_tokens=2)
    watch.record("iteration", 5.3, **iteration, num_waiting=6, num_preempted=2, free_num_blocks=70)
    watch.record("iteration", 5.4, **iteration, num_waiting=0, num_preempted=0, free_num_blocks=90)
    watch.record("finish", 5.5, request_id="a")
    watch.record("pause", 5.6, request_id="a", num_tokens=1)
    assert watch.num_used_blocks_peak == 60
    assert watch.num_held_back == 6 + 2 + 2
    assert watch.paused_tokens_peak == 15 + 22


def work_of(question: Question, load: float, row: PolicyRow = FCFS_RESERVE) -> list:
    return [lambda seed=seed: question.work(load, seed, row) for seed in question.seeds]


def test_a_small_load_passes_and_a_large_one_says_why_not() -> None:
    machine, large = SMALL.engine(), 3 * estimated_load(SMALL, FCFS_RESERVE)
    small = probe(0.5, work_of(SMALL, 0.5), FCFS_RESERVE, machine, LIMITS)
    assert small.passes
    assert len(small.runs) == small.num_seeds == 2
    assert small.total("num_requests") == 2 * (4 + 2 + 20)
    assert len(small.ttfts_s) == 2 * 20
    too_much = probe(large, work_of(SMALL, large), FCFS_RESERVE, machine, LIMITS)
    assert set(too_much.reasons) == {"ttft", "held back"}
    assert len(too_much.runs) == 1  # certain after the first seed
    patient = replace(LIMITS, ttft_target_s=1e6)
    assert probe(large, work_of(SMALL, large), FCFS_RESERVE, machine, patient).reasons == (
        "held back",
    )


def test_buffers_do_not_hide_that_more_is_asked_than_made() -> None:
    """Slow readers notice nothing for minutes; what is held back shows it at once."""
    patient = replace(TIGHT, readers=replace(TIGHT.readers, rate=2.0), num_measured=60)
    load = 1.5 * estimated_load(patient, TOKENFLOW)
    found = probe(load, work_of(patient, load, TOKENFLOW), TOKENFLOW, patient.engine(), LIMITS)
    assert found.reasons == ("held back",)


def test_a_failed_request_fails_the_load() -> None:
    work = OneBurst().work(3.0, READERS, 1, num_warm_up=0, num_measured=0)
    huge = replace(work.requests[0], num_prompt_tokens=1 << 15)
    with_huge = PlannedWork([huge, *work.requests], 0, None)
    found = probe(4.0, [lambda: with_huge], FCFS_RESERVE, SMALL.engine(), LIMITS)
    assert "failed" in found.reasons


def test_the_nearest_rank_decides() -> None:
    """Of 100 first tokens one may be late."""
    question = replace(SMALL, kind=OneBurst(), seeds=(1,))
    ttfts = probe(100.0, work_of(question, 100.0), FCFS_RESERVE, question.engine(), LIMITS).ttfts_s
    second, first = sorted(ttfts)[-2:]
    for target, passes in ((second, True), (math.nextafter(second, 0), False), (first, True)):
        limits = Limits(ttft_target_s=target, max_share_stalled=1.0)
        found = probe(100.0, work_of(question, 100.0), FCFS_RESERVE, question.engine(), limits)
        assert found.passes is passes


def test_the_estimate_counts_prefill_and_decoding() -> None:
    decode = decode_tokens_per_s(SMALL, 4)
    per_request = prefill_s(SMALL, 4) + 32 / decode
    assert estimated_load(SMALL, TOKENFLOW) == pytest.approx(1 / per_request)
    long = replace(SMALL, readers=replace(READERS, prompt_tokens=512))
    chunked = replace(long, machine=replace(long.machine, max_num_tokens=120))
    assert prefill_s(chunked, 4) < 0.1 * prefill_s(long, 4)  # hides behind the reading of weights
    assert first_token_s(chunked) > first_token_s(long) > prefill_s(long, 4)
    reserving = estimated_load(TIGHT, FCFS_RESERVE)
    assert reserving < estimated_load(TIGHT, FCFS_MAX_UTILIZATION)
    burst = replace(SMALL, kind=OneBurst())
    assert estimated_load(burst, FCFS_RESERVE) == 4
    hasty = replace(burst, limits=replace(LIMITS, ttft_target_s=2.5 * prefill_s(burst, 4)))
    assert estimated_load(hasty, FCFS_RESERVE) == pytest.approx(2.5)


@pytest.mark.parametrize("row", [FCFS_RESERVE, FCFS_MAX_UTILIZATION], ids=lambda row: row.name)
def test_who_fills_the_machine_waits_for_no_room(row: PolicyRow) -> None:
    """Short of pool, not of slots: first tokens come as with ten times the pool. An engine that
    reserves holds fewer; with as many as the other it lets some wait."""
    question = replace(
        SMALL,
        machine=Machine(gpu="4090", model="llama3-8b"),
        readers=Readers(rate=6.0, prompt_tokens=256, answer_tokens=256),
    )
    engine = replace(question.engine(), is_warm=False)
    wide = replace(engine, num_total_blocks=10 * engine.num_total_blocks)

    def num_late(filled_for: PolicyRow, seed: int) -> int:
        num = question.num_filling(filled_for)
        assert 50 < num < question.machine.max_batch_size
        fill = question.work(5.0, seed, filled_for).requests[:num]
        streams = [row.run(fill, machine).streams() for machine in (engine, wide)]
        ttfts = [np.array([ttft_s(stream) for stream in some]) for some in streams]
        return int((ttfts[0] > ttfts[1] + 0.05).sum())

    assert [num_late(row, seed) for seed in (1, 2)] == [0, 0]
    assert (num_late(FCFS_MAX_UTILIZATION, 1) > 10) == (row is FCFS_RESERVE)


def test_answers_hold_what_was_tried(small_answers: list[Answer]) -> None:
    for one in small_answers:
        loads = {p.load: p.passes for p in one.probes}
        assert len(loads) == len(one.probes)
        passed, failed = one.bracket.passed, one.bracket.failed
        assert loads[passed] is True
        assert failed <= passed * (1 + SMALL.tolerance)
        assert one.best.load == passed
        assert max(loads) <= MOST_SHARE * one.estimate
        if one.too_much is None:
            assert failed > MOST_SHARE * one.estimate
        else:
            assert loads[failed] is False


def test_same_question_same_record(small_answers: list[Answer]) -> None:
    again = [answer(SMALL, row) for row in (TOKENFLOW, FCFS_RESERVE)]
    record = capacity_report.to_record(SMALL, small_answers)
    assert record == capacity_report.to_record(SMALL, again)
    assert "wall" not in json.dumps(record, allow_nan=False)


def test_the_record_says_what_the_load_means(small_answers: list[Answer]) -> None:
    record = capacity_report.to_record(SMALL, small_answers)
    machine, (_, ours) = record["machine"], record["answers"]
    assert machine["kv_bytes_per_token"] == 131_072
    assert machine["kv_pool_bytes"] == machine["kv_pool_tokens"] * 131_072
    assert ours["ratio_to_fcfs_reserve"] == 1.0
    assert ours["sum_rate"] == ours["load"] * 32
    # A reader is there for its first token's wait and for 32 tokens at 6 a second.
    assert ours["num_readers"] == pytest.approx(ours["load"] * (ours["ttft_mean_s"] + 32 / 6), 0.05)
    assert 0 < ours["kv_used_peak_tokens"] <= 4 * 256
    assert record["simulated"]["num_measured_requests"] == sum(
        one["num_measured"] for answer in record["answers"] for one in answer["probes"]
    )


def test_a_host_tier_keeps_what_is_paused() -> None:
    """A tight pool, and arrivals in clumps: pauses, copies, and more kept than without."""
    question = replace(TIGHT, kind=OneBurst(), limits=replace(LIMITS, ttft_target_s=2.0))
    found = [answer(question, row) for row in (TOKENFLOW, FCFS_RESERVE)]
    ours, theirs = capacity_report.to_record(question, found)["answers"]
    assert ours["load"] > theirs["load"] == theirs["num_readers"]
    assert ours["num_pauses"] > 0
    assert 0 < ours["paused_peak_bytes"] == ours["paused_peak_tokens"] * 131_072
    assert ours["offload_bytes"] > 0
    assert 0 < ours["host_peak_bytes"] <= 4e9
    assert theirs["num_pauses"] == theirs["host_peak_bytes"] == 0


def test_the_table_shows_answers_and_their_absence(small_answers: list[Answer]) -> None:
    none = replace(small_answers[0], bracket=Bracket(None, 0.001), probes=())
    endless = replace(small_answers[1], bracket=Bracket(small_answers[1].bracket.passed, None))
    record = capacity_report.to_record(SMALL, [*small_answers, none, endless])
    assert all(one.keys() == record["answers"][0].keys() for one in record["answers"])
    text = capacity_text.text(record)
    kept = next(line for line in text.splitlines() if line.startswith("arrivals/s kept"))
    shown = f"{small_answers[1].bracket.passed:g} (1.00×)"
    assert kept.split("  ")[-1].strip() == f"≥ {shown}"
    assert shown in kept
    assert "none" in kept
    assert "none tried" in text
    failed = next(line for line in text.splitlines() if line.startswith("first that fails"))
    capped = [a for a in record["answers"] if a["failed_by"] == [capacity_report.CAPACITY]]
    assert failed.count("not tried (cap)") == len(capped) >= 1
    assert "not tried (cap): over 1.05 x the estimate" in text
    host = next(line for line in text.splitlines() if line.startswith("uses the host tier"))
    assert host.split()[-4:] == ["yes", "no", "yes", "no"]
    assert "Arrivals: poisson. Readers of 6 tok/s" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_probe_sums_and_peaks_over_its_seeds() -> None:
    counts = dict.fromkeys((name for name in SeedRun.__slots__ if name.startswith("num_")), 0) | {
        "paused_tokens_peak": 3,
        "virtual_s": 1.5,
    }
    one = SeedRun(ttfts_s=(1.0,), reader_s=(2.0,), **counts)
    two = replace(one, ttfts_s=(math.inf,), num_pauses=4, paused_tokens_peak=9)
    both = Probe(load=1.0, num_seeds=3, runs=(one, two), reasons=("ttft",))
    assert (both.total("num_pauses"), both.peak("paused_tokens_peak")) == (4, 9)
    assert both.virtual_s == 3.0
    assert both.ttfts_s == [1.0, math.inf]
    assert not both.passes
