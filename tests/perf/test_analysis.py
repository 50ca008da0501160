"""From records and traces to numbers: causes of stalls, the honest baseline, summaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf import analysis
from perf.analysis import BenchmarkError, Cause, Run, attribute
from perf.client import ClientRecord
from perf.trace_view import Iteration, Pause, Trace, build_trace, capacity, check_batch
from tokenflow import metrics
from tokenflow.metrics import Stall

# The reader wants a token at 10.0 and gets it at 11.0; the one before came at 6.0.
STALL = Stall(token_index=5, wanted_time=10.0, duration_s=1.0)


def step(start: float, end: float, number: int = 0, **fields: int) -> Iteration:
    values = {"num_scheduled": 8, "num_active": 8, "num_ctx_tokens": 0, "free_num_blocks": 0}
    return Iteration(number=number, start_time=start, end_time=end, **{**values, **fields})


def cause(**parts: Any) -> Cause:
    given_parts = {"pauses": (), "iterations": (), "lags": (), **parts}
    return attribute(STALL, previous_time=6.0, **given_parts)


def test_still_paused_when_the_reader_ran_dry() -> None:
    late = Pause(pause_time=7.0, resume_time=10.5, resumed_time=10.9)
    assert cause(pauses=[late]) is Cause.PAUSE
    assert cause(pauses=[Pause(pause_time=7.0)]) is Cause.PAUSE


def test_resume_was_asked_for_but_came_too_late() -> None:
    slow = Pause(pause_time=7.0, resume_time=9.9, resumed_time=10.9)
    assert cause(pauses=[slow]) is Cause.LATE_RESUME


def test_a_pause_that_was_over_is_not_blamed() -> None:
    over = Pause(pause_time=3.0, resume_time=5.0, resumed_time=5.5)
    assert cause(pauses=[over], iterations=[step(9.8, 10.9)]) is Cause.ENGINE_STEP


def test_slow_steps_late_client_or_nobody() -> None:
    assert cause(iterations=[step(9.0, 10.4), step(10.4, 10.8)]) is Cause.ENGINE_STEP
    assert cause(iterations=[step(9.0, 10.2)]) is Cause.MACHINE
    assert cause(lags=[(10.95, 0.8)], iterations=[step(9.8, 10.9)]) is Cause.MACHINE
    assert cause() is Cause.MACHINE


def client(times: list[float], rate: float = 2.0, kind: str = "newcomer") -> ClientRecord:
    return ClientRecord(
        request_id="a",
        kind=kind,
        read_rate=rate,
        max_tokens=len(times),
        num_prompt_tokens=4,
        send_time=0.0,
        token_times=times,
        finish_reason="length",
    )


@given(st.lists(st.floats(0, 2), min_size=1, max_size=30))
def test_every_visible_stall_has_one_cause(gaps: list[float]) -> None:
    record = client([float(t) for t in np.cumsum(gaps)])
    found = analysis.visible_stalls([record], Trace(requests={}, iterations=()), ())
    stalls = metrics.stalls(analysis.to_stream(record), 0.25)
    assert [one.stall for one in found] == list(stalls)
    summary = analysis.summarise(
        [Run(policy="x", clients=[record], visible_stalls=found, num_pauses=2)]
    )
    assert sum(summary["stalls_by_cause"].values()) == summary["stalls_over_250ms"] == len(stalls)


def test_summary_pools_latencies_and_weighs_throughput_by_time() -> None:
    quick = Run(policy="x", clients=[client([1.0, 2.0])], visible_stalls=[], num_pauses=1, load=0.5)
    slow = Run(policy="x", clients=[client([3.0, 8.0])], visible_stalls=[], num_pauses=2)
    summary = analysis.summarise([quick, slow])
    assert summary["ttft_p50_s"] == 1.0
    assert summary["ttft_p99_s"] == summary["ttft_worst_s"] == 3.0
    assert summary["raw_throughput"] == pytest.approx(4 / 10)
    assert summary["num_pauses"] == 3
    assert summary["load"] == 0.5
    assert summary["num_requests"] == 2


def test_ratios_leave_out_what_the_baseline_has_none_of() -> None:
    base = analysis.summarise(
        [Run(policy="fcfs", clients=[client([4.0, 5.0])], visible_stalls=[], num_pauses=0)]
    )
    ours = {**base, "ttft_p50_s": 1.0, "num_pauses": 7}
    ratio = analysis.ratios(ours, base)
    assert ratio["ttft_p50_s"] == 0.25
    assert ratio["num_pauses"] is None


def test_a_run_with_a_failed_or_short_request_says_nothing() -> None:
    good = client([1.0, 2.0])
    analysis.require_complete([good])
    assert analysis.failure(good) is None
    failed = client([1.0])
    failed.error = "boom"
    with pytest.raises(BenchmarkError, match="a failed: boom"):
        analysis.require_complete([good, failed])
    short = client([1.0])
    short.max_tokens = 3
    with pytest.raises(BenchmarkError, match="got 1 tokens of 3"):
        analysis.require_complete([short])


def event(name: str, time: float, request_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "request_id": request_id, **fields}


def arrival(request_id: str, time: float, num_tokens: int = 64) -> dict[str, Any]:
    return event("arrival", time, request_id, num_prompt_tokens=1, max_tokens=num_tokens)


def iteration(number: int, end: float, latency_ms: float = 100.0, **fields: int) -> dict[str, Any]:
    values = {"num_scheduled": 2, "num_active": 2, "num_ctx_tokens": 0, "free_num_blocks": 0}
    return {
        "event": "iteration", "time": end, "iter": number, "latency_ms": latency_ms,
        **values, **fields,
    }  # fmt: skip


def test_a_pause_is_blamed_whatever_ids_the_sending_program_gave() -> None:
    """perf_analyzer has ids of its own, and its export does not say which."""
    first, second, longer = client([1.0, 9.0]), client([1.5, 2.0]), client([1.0, 1.5, 2.0])
    clients = [second, longer, first]
    for index, (record, sent_time) in enumerate(((first, 0.0), (second, 0.5), (longer, 0.4))):
        record.request_id, record.send_time = f"reader-{index}", sent_time
        record.num_prompt_tokens = 1
    lines = [
        arrival("281474976710656", 0.1, 2), arrival("1", 0.6, 2), arrival("0", 0.5, 3),
        event("pause", 1.1, "281474976710656"), event("resume", 8.8, "281474976710656"),
        event("resumed", 8.9, "281474976710656"),
    ]  # fmt: skip
    trace = analysis.under_client_ids(build_trace(lines, tokens_per_block=32), clients)
    times = {name: request.arrival_time for name, request in trace.requests.items()}
    assert times == {"reader-0": 0.1, "reader-1": 0.6, "reader-2": 0.5}
    (stall,) = analysis.visible_stalls(clients, trace, ())
    assert (stall.request_id, stall.cause) == ("reader-0", Cause.PAUSE)
    assert analysis.under_client_ids(trace, clients) is trace
    with pytest.raises(BenchmarkError, match="no request like a"):
        analysis.under_client_ids(trace, [client([1.0])])


def test_trace_tells_pauses_and_ends() -> None:
    lines = [
        arrival("a", 1.0),
        event("admit", 1.0),
        event("pause", 2.0),
        event("paused", 2.1),
        event("resume", 3.0),
        event("resumed", 3.2),
        event("pause", 4.0),
        event("finish", 5.0),
        event("finish", 0.5, "warm-up"),
        {"event": "plan", "time": 2.0, "pause": 1},
    ]
    trace = build_trace(lines[::-1], tokens_per_block=32)
    (request,) = trace.requests.values()
    assert request.pauses == (
        Pause(pause_time=2.0, resume_time=3.0, resumed_time=3.2),
        Pause(pause_time=4.0),
    )
    assert request.end_time == 5.0
    assert request.num_blocks == 2
    assert trace.num_pauses == 2


def test_capacity_is_measured_on_full_steps_without_prefill() -> None:
    steps = [
        iteration(1, 1.0),
        iteration(2, 1.1),
        iteration(3, 1.2),
        iteration(4, 2.0, num_ctx_tokens=50),
        iteration(5, 2.1),
        iteration(7, 9.0),
        iteration(8, 9.5, num_scheduled=1),
    ]
    assert capacity(build_trace(steps, tokens_per_block=32), 2) == pytest.approx(20.0)
    assert np.isnan(capacity(build_trace([], tokens_per_block=32), 2))


def check(num_active: int, num_blocks: int = 100, **request_fields: Any):
    lines = [arrival("a", 0.0), arrival("b", 0.1), arrival("c", 0.2)]
    lines.append(iteration(1, 2.0, num_active=num_active))
    lines += request_fields.get("more", [])
    return check_batch(
        build_trace(lines, tokens_per_block=32), max_batch_size=2, num_blocks=num_blocks
    )


def test_batch_is_honest_when_full_or_out_of_room() -> None:
    assert (check(num_active=2).num_full, check(num_active=2).idle_times) == (1, ())
    # three requests of two blocks: one is in, the next does not fit in three blocks
    assert check(num_active=1, num_blocks=3).num_no_room == 1


def test_an_empty_slot_while_one_waits_is_found() -> None:
    assert check(num_active=1).idle_times == (2.0,)


def test_a_request_that_only_just_came_or_goes_does_not_count() -> None:
    ends = [event("finish", 2.2, "b"), event("finish", 2.2, "c")]
    assert check(num_active=1, more=ends).idle_times == ()
    lines = [arrival("a", 0.0), arrival("b", 1.8), iteration(1, 2.0, num_active=1)]
    trace = build_trace(lines, tokens_per_block=32)
    assert check_batch(trace, max_batch_size=2, num_blocks=9).idle_times == ()
