"""Answers that end before their limits, in the laboratory: what a warm server knows of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from perf.lab import setups
from perf.lab.policies import POLICIES, planner_of
from perf.lab.runs import Cell, run_cell
from perf.lab.traces import TraceError, read_trace, write_trace
from perf.lab.warm_up import learned_lengths
from perf.virtual.values import SimRequest
from tests.scheduler.build import running, snapshot
from tokenflow import metrics
from tokenflow.policies import TokenflowPolicy
from tokenflow.types import EndReason

OPEN_ENDED = setups.find("open-ended")


def request(max_tokens: int, limit_tokens: int | None = None) -> SimRequest:
    return SimRequest(
        arrival_time=0.0, num_prompt_tokens=8, max_tokens=max_tokens, limit_tokens=limit_tokens
    )


def test_everybody_names_one_limit_and_no_answer_is_longer() -> None:
    work = setups.requests(OPEN_ENDED, 1)
    assert {r.limit_tokens for r in work} == {2048}
    assert max(r.max_tokens for r in work) <= 2048
    assert sum(r.max_tokens for r in work) / len(work) == pytest.approx(512, rel=0.1)


def test_answers_that_ended_by_themselves_are_known_to_a_warm_server() -> None:
    nobody = snapshot([running(1.0, num_generated=0)]).sessions
    known = learned_lengths([request(50, 400)] * 9).estimate(nobody, 0.0)
    assert known is not None
    assert known.survival.tolist() == [1] * 50 + [1 - 9 / 13]
    for ended_at_its_limit in (request(50), request(50, 50)):
        assert learned_lengths([ended_at_its_limit] * 9).estimate(nobody, 0.0) is None


def test_a_warm_server_serves_them_better_than_one_that_does_not_learn() -> None:
    learning, not_learning = (
        run_cell(Cell(setup=OPEN_ENDED, policy="tokenflow", seed=1, changes=changes)).record
        for changes in ((), (("learn_output_lengths", False),))
    )
    assert learning["share_stalled"] == not_learning["share_stalled"] == 0
    assert learning["effective_throughput"] > 1.08 * not_learning["effective_throughput"]
    assert learning["ttft_p99_s"] <= 1.01 * not_learning["ttft_p99_s"]


def test_two_machines_end_them_where_one_does() -> None:
    work = [
        dataclasses.replace(r, arrival_time=0.1 * i)
        for i, r in enumerate(setups.requests(OPEN_ENDED, 1)[:6])
    ]
    result = POLICIES["disaggregated"].run(work, setups.engine(OPEN_ENDED), until=1e5)
    assert [len(q.token_times) for q in result.seqs] == [r.max_tokens for r in work]
    assert {q.end for q in result.seqs} == {EndReason.STOP}


@pytest.mark.parametrize("by_expectation", [False, True])
def test_a_crowd_with_longer_answers_than_others_had_stalls_only_if_that_was_chosen(
    by_expectation: bool,
) -> None:
    """54 whom the engine can just serve, after 256 answers of a seventh of the length."""
    engine = setups.engine(setups.find("4090-a"))
    crowd = [
        SimRequest(
            arrival_time=1e-3 * i,
            num_prompt_tokens=452 + (37 * i) % 120,
            max_tokens=2048,
            read_rate=20.0,
        )
        for i in range(54)
    ]
    policy = TokenflowPolicy(load_by_expectation=by_expectation)
    row = dataclasses.replace(POLICIES["tokenflow"], make_planner=planner_of(policy))
    result = row.run(crowd, engine, until=1e5, answered=[request(300, 2048)] * 256)
    waits = [metrics.waits_s(stream).max() for stream in result.streams()]
    num_stalled = sum(wait > metrics.CLIENT_VISIBLE_STALL_S for wait in waits)
    assert num_stalled == (54 if by_expectation else 0)


def test_a_limit_below_the_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_tokens must be >= max_tokens, got 9 and 10"):
        request(10, 9)
    path = tmp_path / "trace.csv"
    write_trace(path, [request(10, 10)])
    path.write_text(path.read_text().replace(",10\n", ",9\n"))
    with pytest.raises(TraceError, match=r"line 2, column limit_tokens: .* got 9 and 10"):
        read_trace(path)
