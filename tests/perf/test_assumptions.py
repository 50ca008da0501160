"""What figures rest on: each assumption changes what it says, and the command on a tiny burst."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from perf import assumptions as command
from perf import report
from perf.lab import assumptions, setups
from perf.lab.arrivals import Burst
from perf.lab.lengths import Normal
from perf.lab.roofline import RooflineCosts, decode_totals, prefill_totals
from perf.lab.runs import Cell
from perf.lab.setups import Setup

BASE = setups.find("h200-burst-400")
WORDS = [one.words for one in assumptions.ASSUMPTIONS]


def under(words: str) -> Setup:
    """BASE under the assumption of these words."""
    (index,) = [i for i, one in enumerate(WORDS) if one == words]
    return assumptions.assumed(BASE)[index]


def costs(setup: Setup) -> RooflineCosts:
    step_cost = setups.engine(setup).step_cost
    assert isinstance(step_cost, RooflineCosts)
    return step_cost


def test_as_it_is_changes_nothing_but_the_name() -> None:
    first = assumptions.assumed(BASE)[0]
    assert dataclasses.replace(first, name=BASE.name) == BASE
    names = [setup.name for setup in assumptions.assumed(BASE)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{BASE.name}, ") for name in names)


def test_without_arithmetic_decoding_takes_its_memory_traffic() -> None:
    usual, free = costs(BASE), costs(under("decoding takes no arithmetic"))
    many, few = decode_totals(400, 400 * 600), decode_totals(10, 10 * 600)
    assert free.step_s(many) < usual.step_s(many)  # many: arithmetic takes longer than weights
    assert free.step_s(few) == usual.step_s(few)
    kv_and_weights_s = (many.num_context_tokens_read * 131_072 + 16.1e9) / (4.8e12 * 0.8)
    assert free.step_s(many) == pytest.approx(kv_and_weights_s + 1e-3, rel=0.05)
    prompt = prefill_totals(8192, samples=False)
    assert free.step_s(prompt) == usual.step_s(prompt)


@pytest.mark.parametrize(
    ("words", "factor"), [("the link is half as fast", 0.5), ("copies take no time", 1e3)]
)
def test_the_link_is_that_much_faster(words: str, factor: float) -> None:
    usual, changed = setups.engine(BASE), setups.engine(under(words))
    assert changed.copy_bytes_per_s == factor * usual.copy_bytes_per_s
    assert changed.step_cost.step_s(decode_totals(9, 999)) == usual.step_cost.step_s(
        decode_totals(9, 999)
    )


def test_the_overhead_of_each_step_is_three_times_as_long() -> None:
    work = decode_totals(9, 999)
    more_s = costs(under("3 times the overhead of a step")).step_s(work) - costs(BASE).step_s(work)
    assert more_s == pytest.approx(2e-3)


def test_all_alike_keeps_means_and_instants() -> None:
    usual = setups.requests(BASE, 3)
    alike = setups.requests(under("prompts all alike, answers all alike"), 3)
    assert {(r.num_prompt_tokens, r.max_tokens) for r in alike} == {(512, 2048)}
    assert [r.arrival_time for r in alike] == [r.arrival_time for r in usual]


def test_the_last_one_changes_all_of_it() -> None:
    setup = assumptions.assumed(BASE)[-1]
    assert costs(setup).gpu.step_overhead_s == 1.5 * costs(BASE).gpu.step_overhead_s
    assert setups.engine(setup).copy_bytes_per_s == 1e3 * setups.engine(BASE).copy_bytes_per_s
    assert not costs(setup).gpu.decode_computes
    assert len({r.max_tokens for r in setups.requests(setup, 1)}) == 1


@pytest.mark.parametrize("name", ["conversations", "burstgpt"])
def test_lengths_that_have_no_mean_cannot_be_alike(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["--setup", name])
    assert error.value.code == 2
    assert f"{name} has no lengths that could be all alike" in capsys.readouterr().err


def tiny() -> list[Setup]:
    """A burst of twelve short answers, under each assumption."""
    work = dataclasses.replace(
        BASE.workload,
        num_requests=12,
        arrivals=Burst(span_s=0.01),
        prompts=Normal(mean=256),
        answers=Normal(mean=96),
    )
    return assumptions.assumed(dataclasses.replace(BASE, name="tiny", workload=work))


@pytest.mark.parametrize("flag", ["--setup", "--policies"])
def test_nothing_to_run_is_an_error_and_leaves_the_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str
) -> None:
    with pytest.raises(SystemExit) as error:
        command.main([flag, ",", "--output", str(tmp_path / "out.json")])
    assert error.value.code == 2
    assert "need a name" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_policies_are_compared_under_each_assumption(tmp_path: Path) -> None:
    chosen, policies = tiny(), ("fcfs-reserve", "tokenflow")
    asked = [Cell(setup=setup, policy=name, seed=1) for setup in chosen for name in policies]
    result = command.run(chosen, asked)
    names = [f"tiny, {words}" for words in WORDS]
    assert list(result["decode_speeds"]) == names
    kept = {(one["setup"], one["policy"]): one for one in result["summaries"]}
    assert list(kept) == [(name, policy) for name in names for policy in policies]
    for name in names:
        ours, base = kept[name, "tokenflow"], kept[name, "fcfs-reserve"]
        ratio = ours["raw_throughput"] / base["raw_throughput"]
        assert ours["ratios"]["raw_throughput"]["value"] == pytest.approx(ratio)
    usual, slower = (
        kept[f"tiny, {words}", "fcfs-reserve"]
        for words in ("as it is", "3 times the overhead of a step")
    )
    assert slower["raw_throughput"] < usual["raw_throughput"]

    (tmp_path / "assumptions.json").write_text(json.dumps(result))
    header, *shown = assumptions.rows(result)
    assert [row[0] for row in shown] == names
    assert {row[1] for row in shown} == {"tokenflow"}
    text = report.BLOCKS["assumptions"](tmp_path)
    assert text.splitlines()[0] == f"| {' | '.join(header)} |"
    assert f"| {' | '.join(shown[-1])} |" in text
