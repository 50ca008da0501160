"""The commands that run cells: the same twice, one clear error, every figure in the JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from perf import report, simulate, sweep
from perf.lab import documents, runs, setups, summary
from perf.lab.measures import WALL_KEYS, Record, deterministic
from perf.lab.policies import HEADLINE, POLICIES
from perf.lab.runs import Cell
from perf.lab.traces import read_trace, write_trace
from perf.virtual.values import SimRequest

ACCEPTED_KEYS = {
    *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "end_to_end_mean_s"),
    *("effective_throughput", "raw_throughput", "goodput", "qos", "qoe_mean"),
    *("num_stalls", "stall_s", "share_stalled", "num_stalls_pause", "num_stalls_late_resume"),
    *("num_stalls_engine_pause", "num_stalls_engine_step", "num_planned_pauses"),
    *("num_forced_pauses", "num_internal_pauses", "offload_bytes", "onboard_bytes"),
    *("host_peak_bytes", "hidden_copy_share", "ttft_bound_mean_s", "ttft_bound_p99_s"),
    "raw_bound",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A burst that fills a 4090's pool: 36 questions, of which about 24 fit at once."""
    path = tmp_path / "small.csv"
    write_trace(
        path,
        [
            SimRequest(
                arrival_time=0.01 * i,
                num_prompt_tokens=1800,
                max_tokens=30 + 5 * (i % 7),
                read_rate=None if i % 9 == 8 else 8.0,
            )
            for i in range(36)
        ],
    )
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert simulate.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], main, *arguments: object) -> str:
    """What the command says about arguments that it refuses: one line after the usage."""
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def without_wall(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_wall(v) for key, v in value.items() if key not in WALL_KEYS}
    return [without_wall(v) for v in value] if isinstance(value, list) else value


def test_same_arguments_same_json_but_for_the_wall_times(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    arguments = ["--setup", "4090-a", "--policies", "headline", "--trace-in", trace, "--json"]
    first = json.loads(run(capsys, *arguments))
    second = json.loads(run(capsys, *arguments, "--output", tmp_path / "out.json"))
    assert without_wall(first) == without_wall(second)
    assert json.loads((tmp_path / "out.json").read_text()) == second
    (cell,) = first["cells"]
    assert [one["policy"] for one in cell["summaries"]] == [row.name for row in HEADLINE]
    for record in cell["summaries"]:
        assert {key for key in ACCEPTED_KEYS if record.get(key) is None} == set()
        assert record["num_completed"] == 36
        assert (record["setup"], record["arrivals"]) == ("4090-a (small.csv)", "trace")


def test_the_table_shows_every_policy_and_its_ratio(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    shown = run(
        capsys, "--setup", "4090-a", "--policies", "fcfs-reserve,tokenflow", "--trace-in", trace
    )
    header = next(line for line in shown.splitlines() if line.startswith("   "))
    assert header.split() == ["fcfs-reserve", "tokenflow"]
    p99 = next(line for line in shown.splitlines() if line.startswith("first token, P99"))
    assert re.search(r"s +[\d.]+ s \([\d.]+×\)$", p99)
    assert "ΣR/Γ" in shown


def test_rate_and_host_change_the_set_up(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    def labels(rate: float | None, host_gb: float | None) -> Record:
        parsed = argparse.Namespace(trace_in=None, rate=rate, host_gb=host_gb, seeds=[3])
        (cell,) = simulate.cells(parsed, ["h200-b"], [("tokenflow", ())])
        return runs.labels(cell)

    assert (labels(None, None)["read_rate"], labels(None, None)["host_gb"]) == (6.0, 128.0)
    changed = labels(20.0, 0.0)
    assert (changed["read_rate"], changed["host_gb"], changed["seed"]) == (20.0, 0.0, 3)
    assert (changed["arrivals"], changed["setup"]) == ("burst", "h200-b")
    message = fails(capsys, simulate.main, "--setup", "4090-a", "--rate", 6, "--trace-in", trace)
    assert "--rate cannot change" in message


def test_a_file_of_burstgpts_is_sampled_and_read_as_the_set_up_is(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    lines = [f"{i},ChatGPT,{100 + i},{20 + i},{120 + 2 * i},Conversation log" for i in range(300)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text("\n".join([header, *lines]))
    parsed = argparse.Namespace(trace_in=path, rate=20.0, host_gb=None, seeds=[1, 2])
    cells = simulate.cells(parsed, ["h200-b"], [("tokenflow", ()), ("fcfs-reserve", ())])
    works = [cell.requests() for cell in cells]
    assert works[0] == works[2] != works[1] == works[3]
    assert len(works[0]) == 200
    assert all(r.read_rate == 20.0 and r.max_tokens == r.num_prompt_tokens - 80 for r in works[0])


def test_what_is_named_twice_is_run_once() -> None:
    assert simulate.comma_separated("a, b,a") == ["a", "b"]
    assert sweep.changes_of(["turn_share=0.1,0.10"]) == [(), (("turn_share", 0.1),)]


def test_virtual_beside_real_in_the_documents() -> None:
    row = {"policy": "fcfs", "measure": "ttft_p50_s", "real": [1.0, 0.9, 1.2]}
    alone = {**row, "virtual": [0.5, 0.4, 0.6], "overlap": False}
    beside = {**row, "virtual": [1.1, 1.0, 1.3], "overlap": True}
    table = documents.virtual_real([{"alone": [alone], "beside": [beside]}])
    assert table.splitlines()[-1] == (
        "| fcfs | first token, P50 | 1.00 s [0.90, 1.20] | 0.50 s [0.40, 0.60] (apart) "
        "| 1.10 s [1.00, 1.30] |"
    )
    assert documents.virtual_real([{"alone": [alone]}]).endswith("(apart) | – |")


def test_work_goes_out_and_comes_in_again(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    arguments = ["--setup", "4090-a", "--policies", "fcfs-reserve", "--json"]
    first = run(capsys, *arguments, "--trace-in", trace, "--trace-out", out)
    assert read_trace(out) == read_trace(trace)
    again = json.loads(run(capsys, *arguments, "--trace-in", out))["cells"][0]["summaries"][0]
    first = json.loads(first)["cells"][0]["summaries"][0]
    assert deterministic({**again, "setup": ""}) == deterministic({**first, "setup": ""})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--setup", "h100-z"), ["'h100-z'", *setups.SETUPS]),
        (("--setup", "4090-a", "--policies", "fcfs,tokenflow"), ["'fcfs'", *POLICIES]),
        (("--setup", "4090-a", "--policies", ","), ["--policies needs a name"]),
        (("--setup", ","), ["--setup needs a name"]),
        (("--setup", "4090-a", "--output", "/proc/no/file.json"), ["/proc/no"]),
        (("--setup", "4090-a", "--trace-in", "/no/such.csv"), ["/no/such.csv"]),
        (("--setup", "4090-a", "--host-gb", "-1"), ["-1"]),
        (("--setup", "4090-a", "--host-gb", "nan"), ["host gigabytes must be in", "nan"]),
        (("--setup", "4090-a", "--host-gb", "inf"), ["host gigabytes must be in", "inf"]),
        (("--setup", "4090-a", "--seeds", "1,1"), ["seeds"]),
        (("--setup", "4090-a", "--seeds", "1-99999999999"), ["at most 1000 seeds"]),
        (("--setup", "4090-a", "--rate", "0"), ["rate must be in"]),
        (("--setup", "conversations", "--rate", "1e-300"), ["rate must be in"]),
        (("--setup", "4090-a,4090-b", "--trace-out", "x.csv"), ["one set-up and one seed"]),
        (("--setup", "4090-a", "--all"), ["not allowed with"]),
        (("--setup", "4090-a", "--jobs", "0"), ["must be > 0"]),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    message = fails(capsys, simulate.main, *arguments)
    assert [word for word in words if word not in message] == []


def test_a_bad_trace_names_line_and_column(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    trace.write_text(trace.read_text().replace(",1800,", ",many,", 1))
    message = fails(capsys, simulate.main, "--setup", "4090-a", "--trace-in", trace)
    assert "line 2" in message
    assert "num_prompt_tokens" in message


def test_results_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "simulate.json"
    simulate.prepare(path)
    assert list(path.parent.iterdir()) == []  # an aborted run leaves nothing
    simulate.write(path, {"cells": []})
    simulate.prepare(path)
    with pytest.raises(ValueError, match="JSON"):
        simulate.write(path, {"cells": [math.nan]})
    assert json.loads(path.read_text()) == {"cells": []}
    assert list(path.parent.iterdir()) == [path]
    for wrong in (tmp_path, path / "below.json"):
        with pytest.raises(OSError, match=r"folder|exists|directory"):
            simulate.prepare(wrong)


@pytest.mark.parametrize("content", ["", "[]"])
def test_a_file_that_holds_no_results_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "simulate.json").write_text(content)
    with pytest.raises(ValueError, match=r"cannot read the results in .*simulate\.json: "):
        documents.load(tmp_path, "simulate*.json")


def test_seeds_are_lists_and_ranges() -> None:
    assert simulate.seeds("3") == [3]
    assert simulate.seeds("1,2,5") == [1, 2, 5]
    assert simulate.seeds("1-3,7") == [1, 2, 3, 7]


def test_several_seeds_keep_their_runs_and_have_intervals(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    arguments = ["--setup", "4090-a", "--trace-in", trace, "--seeds", "1,2"]
    result = json.loads(run(capsys, *arguments, "--policies", "fcfs-reserve", "--json"))
    assert [record["seed"] for record in result["runs"]] == [1, 2]
    (only,) = result["cells"][0]["summaries"]
    low, high = only["intervals"]["ttft_p99_s"]
    assert low == high == only["ttft_p99_s"]  # a trace is the same work with every seed
    assert "2 seeds" in run(capsys, *arguments, "--policies", "fcfs-reserve")


def test_pictures_are_drawn(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    names = "fcfs-reserve,tokenflow-tiering,tokenflow-tiering-no-offload"
    run(capsys, "--setup", "4090-a", "--policies", names, "--trace-in", trace, "--figures", folder)
    pictures = sorted(folder.iterdir())
    assert [p.name for p in pictures] == [
        "ablation_4090-a_small.csv_8_128gb.png",
        "simulate_4090-a_small.csv_8_128gb.png",
    ]
    for picture in pictures:
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert picture.stat().st_size > 10_000


def test_a_sweep_compares_each_value_with_the_policy_as_it_is(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sweep_small.json"
    write_trace(trace, [dataclasses.replace(r, max_tokens=150) for r in read_trace(trace)])
    arguments = ["--setup", "4090-a", "--trace-in", trace, "--param", "slack_margin_s=1000"]
    arguments += ["--param", "plan_interval_s=5", "--param", "capacity_policy=guaranteed_no_evict"]
    assert sweep.main([*map(str, arguments), "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(path.read_text())
    labels = [one["policy"] for one in result["summaries"]]
    assert labels == [
        "tokenflow",
        "tokenflow slack_margin_s=1000.0",
        "tokenflow plan_interval_s=5.0",
        "tokenflow capacity_policy=guaranteed_no_evict",
    ]
    default, careful, seldom, reserving = result["summaries"]
    assert careful["num_pauses"] < default["num_pauses"]
    assert seldom["num_plans"] < default["num_plans"]
    assert reserving["num_pauses"] != default["num_pauses"]
    assert "ratios" not in default
    assert "ttft_p99_s" in result["summaries"][1]["ratios"]
    assert [line.split("  ")[0] for line in shown.splitlines() if line.startswith("tok")] == labels


def test_the_help_of_a_sweep_names_the_engines_parameters() -> None:
    names = (*runs.ENGINE_PARAMETERS, "capacity_policy")
    assert [name for name in names if name not in sweep.__doc__] == []


def test_variants_of_a_sweep() -> None:
    one_by_one = sweep.changes_of(["conservativeness=2,5", "plan_interval_s=0.1"])
    assert one_by_one == [
        (),
        (("conservativeness", 2.0),),
        (("conservativeness", 5.0),),
        (("plan_interval_s", 0.1),),
    ]
    grid = sweep.changes_of(["max_passes=1,2", "anticipate=false"], grid=True)
    assert grid == [
        (),
        (("max_passes", 1), ("anticipate", False)),
        (("max_passes", 2), ("anticipate", False)),
    ]
    ((form,),) = sweep.changes_of(["wait_form=falling"])[1:]
    cell = Cell(setup=setups.find("4090-a"), policy="tokenflow", seed=1, changes=(form,))
    assert cell.label == "tokenflow wait_form=falling"


@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("kappa=1", ["no parameter named 'kappa'", "conservativeness", "plan_interval_s"]),
        ("conservativeness=", ["needs values"]),
        ("conservativeness=much", ["cannot be 'much'", "must be a number"]),
        ("anticipate=perhaps", ["cannot be 'perhaps'", "must be true or false"]),
        ("max_num_tokens=1e3", ["cannot be '1e3'", "must be a whole number"]),
        ("wait_form=x", ["cannot be 'x'", "must be one of ageing, falling"]),
        ("conservativeness=0.5", ["must be >= 1"]),
    ],
)
def test_what_cannot_be_swept_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], param: str, words: list[str]
) -> None:
    message = fails(capsys, sweep.main, "--setup", "4090-a", "--param", param)
    assert [word for word in words if word not in message] == []


def test_the_documents_are_made_from_the_files(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    names = "fcfs-reserve,tokenflow"
    work = ["--setup", "4090-a", "--trace-in", trace]
    run(capsys, *work, "--policies", names, "--output", tmp_path / "simulate.json")
    (tmp_path / "simulate_6.json").write_text((tmp_path / "simulate.json").read_text())
    names = "tokenflow-tiering,tokenflow-tiering-no-offload"
    run(capsys, *work, "--policies", names, "--output", tmp_path / "ablation.json")
    summaries = json.loads((tmp_path / "simulate.json").read_text())["cells"][0]["summaries"]
    (tmp_path / "sweep_x.json").write_text(json.dumps({"summaries": summaries}))
    blocks = ("simulate_overview", "simulate", "simulate_all_figures", "ablation", "sweeps")
    empty = "".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in blocks)
    made = report.regenerate(empty, results=tmp_path)
    assert report.regenerate(made, results=tmp_path) == made
    assert made.count("| tokenflow | ") >= 2
    assert "| tokenflow-tiering-no-offload | " in made
    assert "127.28 s" not in made  # other work than the paper's
    of_paper = json.loads((tmp_path / "ablation.json").read_text())
    for one in of_paper["cells"][0]["summaries"]:
        one["setup"] = "4090-b"
    assert "127.28 s | +92.8%" in documents.ablation([of_paper])
    assert "make lab" in report.regenerate(empty, results=tmp_path / "nothing")
    assert summary.by_cell(summaries)[0].keys() == {"fcfs-reserve", "tokenflow"}
