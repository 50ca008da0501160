"""The worth of rules: the table of variants, the verdicts, and the command on a tiny set-up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from perf import report, rules
from perf.lab import rule_outcomes, rule_setups, rule_tables, runs, setups
from perf.lab.lengths import Normal
from perf.lab.measures import Effort, Load, Record, measure
from perf.lab.rules import TIERING, VARIANTS, Variant, cells, find, tried_on
from perf.lab.runs import ENGINE_PARAMETERS, ROW_PARAMETERS, Cell
from perf.lab.timeline import Timeline
from perf.virtual.values import SimRequest, SimResult, SimSeq
from tokenflow.policies import TokenflowPolicy
from tokenflow.types import EndReason

VARIANT = Variant(name="v", rule="r", instead="i", changes=(("load_limit", 1.0),))
BASE = {
    "setup": "s",
    "arrivals": "burst",
    "read_rate": 6.0,
    "host_gb": 128.0,
    "num_requests": 9,
    "load": 0.5,
    "is_schedulable": True,
    "ttft_p99_s": 10.0,
    "ttft_mean_s": 4.0,
    "end_to_end_mean_s": 50.0,
    "effective_throughput": 300.0,
    "raw_throughput": 600.0,
    "share_stalled": 0.0,
    "stall_s": 0.0,
    "num_pauses": 7,
    "num_forced_pauses": 0,
    "num_recomputed_tokens": 0,
    "urgent_ttft_mean_s": None,
    "machine_end_to_end_mean_s": None,
}


def row(*changed: dict[str, object], default: dict[str, object] | None = None) -> dict:
    """The outcome of a variant whose runs, one for each seed, differ from the default so."""
    records = []
    for seed, change in enumerate(changed, 1):
        theirs = {**BASE, **(default or {}), "seed": seed, "policy": "tokenflow"}
        records += [theirs, {**theirs, **change, "policy": VARIANT.label}]
    ((only,),) = [cell["rows"] for cell in rule_outcomes.outcomes(records, [VARIANT])["cells"]]
    return only


def test_every_variant_can_be_run_and_every_value_is_tried() -> None:
    default, tried = TokenflowPolicy(), set()
    for variant in VARIANTS:
        changes = dict(variant.changes)
        tried |= changes.keys()
        engine = {k: changes.pop(k) for k in ENGINE_PARAMETERS if k in changes}
        row = {k: changes.pop(k) for k in ROW_PARAMETERS if k in changes}
        assert engine or row or dataclasses.replace(default, **changes) != default, variant.name
        assert not variant.own or variant.own in rule_setups.OWN
        for name, value in changes.items():
            assert type(value) is type(getattr(default, name)), variant.name
    assert {field.name for field in dataclasses.fields(default)} - tried == set()
    assert len({v.name for v in VARIANTS}) == len({v.label for v in VARIANTS}) == len(VARIANTS)


def test_where_what_is_tried() -> None:
    with_host, without = rule_setups.setup_of("4090-b"), rule_setups.setup_of("4090-b:6:0")
    assert tried_on(with_host, VARIANTS) == list(VARIANTS)
    assert {v.policy for v in tried_on(without, VARIANTS)} == {"tokenflow"}
    for name, setup in rule_setups.OWN.items():
        assert [v for v in tried_on(setup, VARIANTS) if v.own != name] == []
    asked = cells([with_host], find(["no-margin", "no-prefetch"]), [1, 2])
    labels = ["tokenflow", TIERING, "tokenflow slack_margin_s=0.0", f"{TIERING} prefetch=False"]
    assert [cell.label for cell in asked] == [label for label in labels for _ in range(2)]
    with pytest.raises(ValueError, match="no rule is tried"):
        cells([without], find(["no-prefetch"]), [1])


def test_set_ups_by_name() -> None:
    changed = rule_setups.setup_of("mixed-readers:20:32")
    assert (changed.read_rate, changed.host_bytes) == (20.0, 32 * 10**9)
    assert rule_setups.setup_of("classes") is rule_setups.OWN["classes"]
    assert rule_setups.setup_of("machines::0") == setups.with_host(setups.find("machines"), 0)
    burst = rule_setups.setup_of("late-burst:9")
    assert {r.read_rate for r in setups.requests(burst, 1)} == {9.0}
    instants = [r.arrival_time for r in setups.requests(burst, 1)]
    assert instants == sorted(instants)
    assert setups.requests(burst, 1) == setups.requests(burst, 1) != setups.requests(burst, 2)
    assert runs.labels(Cell(setup=burst, policy="tokenflow", seed=1))["arrivals"] == "other"


def test_a_loss_is_more_than_two_percent_on_the_wrong_side() -> None:
    assert row({"ttft_p99_s": 10.3})["losses"] == ["ttft_p99_s"]
    assert row({"ttft_p99_s": 10.1})["losses"] == []
    assert row({"effective_throughput": 280.0, "end_to_end_mean_s": 52.0})["losses"] == [
        "effective_throughput",
        "end_to_end_mean_s",
    ]
    better = row({"raw_throughput": 620.0, "ttft_mean_s": 3.0})
    assert (better["losses"], better["gains"]) == ([], ["ttft_mean_s", "raw_throughput"])
    same, paused = row({}), row({"num_pauses": 900})
    assert same["is_same"]
    assert (paused["is_same"], paused["losses"], paused["gains"]) == (False, [], [])


def test_a_difference_that_nobody_notices_counts_for_nothing() -> None:
    assert row({"ttft_mean_s": 0.11}, default={"ttft_mean_s": 0.10})["losses"] == []
    assert row({"ttft_mean_s": 0.13}, default={"ttft_mean_s": 0.10})["losses"] == ["ttft_mean_s"]


def test_over_seeds_the_whole_interval_decides() -> None:
    steady = row(*({"ttft_p99_s": value} for value in (10.5, 10.6, 10.4)))
    assert steady["losses"] == ["ttft_p99_s"]
    assert steady["figures"]["ttft_p99_s"] == pytest.approx(10.5)
    assert 1.03 < steady["ratios"]["ttft_p99_s"]["low"] < 1.05
    spread = row(*({"ttft_p99_s": value} for value in (9.0, 13.0, 9.9)))
    assert spread["ratios"]["ttft_p99_s"]["value"] > 1.02
    assert spread["losses"] == []


def test_stalls_that_appear_are_a_loss_and_take_a_gain_away() -> None:
    stalled = row({"stall_s": 3.0, "share_stalled": 0.05, "effective_throughput": 900.0})
    assert (stalled["losses"], stalled["gains"]) == (["stall_s"], [])
    assert stalled["ratios"]["stall_s"] is None
    cured = row({"stall_s": 0.0}, default={"stall_s": 3.0, "share_stalled": 0.05})
    assert cured["gains"] == ["stall_s"]


def test_a_verdict_is_over_all_set_ups() -> None:
    same, nothing = row({}), row({"num_pauses": 8})
    loses, gains = row({"ttft_p99_s": 20.0}), row({"ttft_p99_s": 5.0})
    assert rule_tables.verdict([same, same]) == "nothing changes"
    assert rule_tables.verdict([same, nothing]) == "costs nothing"
    assert rule_tables.verdict([same, loses]) == "loses"
    assert rule_tables.verdict([gains, nothing]) == "gains"
    assert rule_tables.verdict([gains, loses]) == "loses and gains"


def test_the_command_says_what_a_rule_is_worth(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rules.json"
    arguments = ["--setups", "classes", "--rules", "no-classes", "--output", str(path)]
    assert rules.main([*arguments, "--json"]) == 0
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == result
    (cell,) = result["cells"]
    (only,) = cell["rows"]
    assert (only["name"], only["seeds"], cell["seeds"]) == ("no-classes", [1], [1])
    assert "urgent_ttft_mean_s" in only["losses"]
    urgent = only["figures"]["urgent_ttft_mean_s"]
    assert urgent > 1.2 * cell["defaults"]["tokenflow"]["urgent_ttft_mean_s"]
    shown = rule_tables.terminal([result])
    assert f"urgent mean {only['ratios']['urgent_ttft_mean_s']['value'] - 1:+.0%}" in shown
    assert f"{urgent:,.2f} s" in shown
    block = "<!-- generated: rules -->\n<!-- end -->\n"
    made = report.regenerate(block, results=tmp_path)
    assert "| classes shift the priority | no classes | ✗ " in made
    assert "make rules" in report.regenerate(block, results=tmp_path / "nothing")


def test_some_rules_leave_the_results_of_all_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published = tmp_path / "rules.json"
    monkeypatch.setattr(rules, "RESULTS", published)
    assert rules.main(["--setups", "classes", "--rules", "no-classes"]) == 0
    assert not published.exists()
    assert "written" not in capsys.readouterr().out


def test_a_set_up_that_is_named_twice_is_run_once() -> None:
    chosen = [rule_setups.setup_of(text) for text in ("4090-a", "4090-a:6", "4090-a:6:128")]
    assert cells(chosen, VARIANTS, [1]) == cells(chosen[:1], VARIANTS, [1])


def test_retention_can_be_turned_off() -> None:
    whole = rule_setups.OWN["classes"]
    workload = dataclasses.replace(
        whole.workload, num_requests=4, prompts=Normal(mean=64), answers=Normal(mean=8)
    )
    cell = Cell(
        setup=dataclasses.replace(whole, workload=workload),
        policy="tokenflow",
        seed=1,
        changes=(("has_retention", False),),
    )
    record = runs.run_cell(cell).record
    assert (record["policy"], record["num_completed"]) == ("tokenflow has_retention=False", 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--setups", "h100-z"), ["'h100-z'", *setups.SETUPS]),
        (("--setups", "4090-b:fast"), ["'4090-b:fast'"]),
        (("--setups", "4090-b:0"), ["'4090-b:0'", "rate must be in"]),
        (("--setups", "4090-b:6:1e9"), ["'4090-b:6:1e9'", "host gigabytes must be in"]),
        (("--setups", "4090-b:6:0:1"), ["NAME:RATE:HOST_GB"]),
        (("--rules", "no-rules"), ["'no-rules'", "no-margin", "plan-1"]),
        (("--setups", "classes", "--rules", "no-margin"), ["no rule is tried"]),
        (("--output", "/proc/no/file.json"), ["/proc/no"]),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        rules.main(arguments)
    assert error.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in words if word not in message] == []


def test_urgent_ones_and_machines_are_measured_apart() -> None:
    def seq(ttft: float, **who: object) -> SimSeq:
        request = SimRequest(arrival_time=1.0, num_prompt_tokens=4, max_tokens=2, **who)
        end = EndReason.LENGTH
        return SimSeq(request, token_times=[1.0 + ttft, 2.0 + ttft], end=end, end_time=2.0 + ttft)

    load = Load(
        ttft_bound_mean_s=0.1, ttft_bound_p99_s=0.1, raw_bound=None, sum_rate=1.0, capacity=2.0
    )
    effort = Effort(num_plans=1, plan_wall_s=0.1, wall_s=0.1)

    def record(*seqs: SimSeq) -> Record:
        return measure(SimResult(seqs=list(seqs)), Timeline(), load, effort, block_bytes=1)

    mixed = record(
        seq(0.5, priority=0.9), seq(1.5, priority=0.9), seq(7.0), seq(3.0, read_rate=None)
    )
    assert (mixed["urgent_ttft_mean_s"], mixed["urgent_ttft_p99_s"]) == (1.0, 1.5)
    assert mixed["machine_end_to_end_mean_s"] == mixed["machine_end_to_end_p99_s"] == 4.0
    alike = record(seq(0.5), seq(1.5))
    assert alike["urgent_ttft_mean_s"] is alike["machine_end_to_end_p99_s"] is None
