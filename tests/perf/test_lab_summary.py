"""Summaries, goals and tables from made-up records."""

from __future__ import annotations

import json

import pytest

from perf.lab import summary, tables
from perf.lab.measures import Effort, Load, Record, measure
from perf.lab.timeline import Timeline
from perf.virtual.values import SimRequest, SimResult, SimSeq
from tokenflow.types import EndReason

BURST = {"setup": "h200-a", "arrivals": "burst", "read_rate": 6.0, "host_gb": 128.0}


def record(policy: str, seed: int = 1, **changed) -> Record:
    request = SimRequest(arrival_time=0.0, num_prompt_tokens=4, max_tokens=3, read_rate=6.0)
    seq = SimSeq(request, token_times=[1.0, 1.1, 1.2], end=EndReason.LENGTH)
    load = Load(
        ttft_bound_mean_s=0.4, ttft_bound_p99_s=1.0, raw_bound=10.0, sum_rate=6.0, capacity=9.0
    )
    effort = Effort(num_plans=3, plan_wall_s=0.001, wall_s=0.5)
    measured = measure(SimResult(seqs=[seq]), Timeline(), load, effort, block_bytes=1)
    labels = {"policy": policy, "seed": seed, "uses_host": policy == "tokenflow"}
    return {**BURST, **labels, **measured, **changed}


def figures(ttft: float, effective: float, raw: float = 100.0, end: float = 10.0) -> Record:
    return {
        "ttft_mean_s": ttft / 2,
        "ttft_p99_s": ttft,
        "effective_throughput": effective,
        "raw_throughput": raw,
        "end_to_end_mean_s": end,
    }


RUNS = [
    record("fcfs-reserve", **figures(10.0, 100.0)),
    record("fcfs-max-utilization", **figures(9.0, 120.0, raw=110.0)),
    record("sglang-like", **figures(8.0, 110.0)),
    record("tokenflow", **figures(1.25, 170.0, raw=109.0, end=11.9)),
]


def test_the_goals_of_a_burst() -> None:
    (cell,) = summary.by_cell(summary.summarise(RUNS))
    goals = summary.goals(cell)
    limits = [round(goal["limit"], 6) for goal in goals]
    # P99: 1.5 = 0.15 x 10, mean 0.45 x 5; sglang: 1.3 = the bound is more than 1.2, 0.45 x 4
    assert limits == [1.5, 2.25, 1.3, 1.8, 160.0, 168.0, 108.9, 12.0]
    assert [goal["met"] for goal in goals] == [True] * 8
    assert [goal["value"] for goal in goals] == [1.25, 0.625, 1.25, 0.625, 170, 170, 109.0, 11.9]


def test_goals_are_missed_beyond_their_limits() -> None:
    missed = [*RUNS[:3], record("tokenflow", **figures(4.1 * 2, 159.0, raw=108.0, end=12.1))]
    (cell,) = summary.by_cell(summary.summarise(missed))
    assert not any(goal["met"] for goal in summary.goals(cell))


def test_throughput_beside_stalls_does_not_count() -> None:
    runs = [*RUNS[:3], record("tokenflow", **figures(1.0, 500.0, raw=109.0), share_stalled=0.02)]
    (cell,) = summary.by_cell(summary.summarise(runs))
    goals = {goal["goal"]: goal for goal in summary.goals(cell)}
    throughput = [g for words, g in goals.items() if words.startswith("effective")]
    assert [(g["met"], g["counts"]) for g in throughput] == [(False, False)] * 2
    assert "does not count" in tables.terminal(cell, list(goals.values()))
    assert "* counts only" in tables.terminal(cell, list(goals.values()))


def test_goals_depend_on_load_host_and_arrivals() -> None:
    def goals(**changed) -> list[Record]:
        (cell,) = summary.by_cell(summary.summarise([{**run, **changed} for run in RUNS]))
        return summary.goals(cell)

    assert goals(is_schedulable=False) == []
    assert not any(goal["goal"].startswith("raw") for goal in goals(host_gb=0.0))
    (effective,) = [g for g in goals(arrivals="poisson") if g["goal"].startswith("effective")]
    assert effective["limit"] == pytest.approx(190.0)


def test_where_the_load_is_too_much_the_pair_is_shown() -> None:
    (cell,) = summary.by_cell(summary.summarise([{**r, "is_schedulable": False} for r in RUNS]))
    shown = tables.terminal(cell, summary.goals(cell))
    assert "not schedulable" in shown
    assert "no goals but the pair" in shown


def test_seeds_are_averaged_and_paired() -> None:
    runs = [record("fcfs-reserve", seed, ttft_p99_s=10.0 * seed) for seed in (1, 2, 3)]
    runs += [record("tokenflow", seed, ttft_p99_s=2.0 * seed) for seed in (1, 2, 3)]
    base, ours = summary.summarise(runs)
    assert (base["seeds"], ours["seeds"]) == ([1, 2, 3], [1, 2, 3])
    assert ours["ttft_p99_s"] == pytest.approx(4.0)
    low, high = ours["intervals"]["ttft_p99_s"]
    assert 2.0 <= low < 4.0 < high <= 6.0
    assert ours["ratios"]["ttft_p99_s"] == pytest.approx({"value": 0.2, "low": 0.2, "high": 0.2})
    assert "ratios" not in base
    # the baseline lacks a seed: no ratio rather than one of different work
    assert "ratios" not in summary.summarise(runs[1:])[1]


def test_none_in_a_run_is_none_in_the_summary() -> None:
    runs = [record("fcfs-reserve", 1, ttft_p99_s=None), record("fcfs-reserve", 2)]
    (only,) = summary.summarise(runs)
    assert only["ttft_p99_s"] is None
    assert "ttft_p99_s" not in only["intervals"]
    assert "–" in tables.format_table(tables.rows({"fcfs-reserve": only}))


def test_set_ups_do_not_mix() -> None:
    runs = [*RUNS[:1], {**RUNS[3], "host_gb": 0.0}]
    assert [list(cell) for cell in summary.by_cell(summary.summarise(runs))] == [
        ["fcfs-reserve"],
        ["tokenflow"],
    ]


def test_tables_are_rectangular_and_show_only_what_the_json_has() -> None:
    summaries = json.loads(json.dumps(summary.summarise(RUNS), allow_nan=False))
    (cell,) = summary.by_cell(summaries)
    for table in (tables.rows(cell), tables.variant_rows(cell), tables.pair_rows(cell)):
        assert len({len(row) for row in table}) == 1
        assert len({line.count("|") for line in tables.markdown(table).splitlines()}) == 1
    ratio = next(row for row in tables.rows(cell) if row[0] == "first token, P99")
    assert ratio[1:] == ["10.00 s", "9.00 s (0.900×)", "8.00 s (0.800×)", "1.25 s (0.125×)"]
    host = next(row for row in tables.rows(cell) if row[0] == "uses the host tier")
    assert host[1:] == ["no", "no", "no", "yes"]
    assert tables.rows(cell)[:-1] == tables.rows(cell, with_wall=False)
    assert tables.rows(cell)[-1][:2] == ["wall seconds", "0.5 s"]
    document = tables.document(cell, summary.goals(cell))
    assert document.count("| met |") == 8
    (row,) = tables.overview_rows([(cell, summary.goals(cell))])[1:]
    assert (row[0], row[-1]) == ("h200-a", "8 of 8")
