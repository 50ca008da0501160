"""The benchmark of the KV tiers: what its figures are, and that each section runs (tiny model; no
times asserted)."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.importorskip("torch")
pytest.importorskip("transformers")

from perf import kv_tiers, report
from perf.kv import ablation, copies, resumes
from perf.kv.bursts import VARIANTS
from perf.kv.models import Model
from perf.kv.resumes import HOST, WAYS, ResumeScale, Sample
from perf.kv.tables import goals, markdown, tables, text
from tests.perf.tiny_kv import TINY, tiny_model
from tokenflow.inflight.runner import CopyDirection

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def result(model: Model) -> dict:
    """Everything, once, on the tiny model."""
    stored: list[set[str]] = []
    made = kv_tiers.measure(
        model, TINY, list(kv_tiers.SECTIONS), lambda what: None, lambda r: stored.append(set(r))
    )
    assert [len(s & set(kv_tiers.SECTIONS)) for s in stored] == [1, 2, 3, 4, 5]
    return made


# -- the whole ---------------------------------------------------------------------------------


def test_every_section_runs_and_leaves_nothing(result: dict) -> None:
    assert set(result) == {"environment", "section_s", "goals", *kv_tiers.SECTIONS}
    assert json.loads(json.dumps(result)) is not None
    assert [row["context"] for row in result["resumes"]] == [40, 70]
    for row in result["resumes"]:
        assert row["batch"] == 2
        assert all(row[way]["num_samples"] == 1 and row[way]["seconds"] > 0 for way in WAYS)
        assert [row[way]["num_tokens"] for way in WAYS[:4]] == [1, 1, 1, 1]
        assert row["recompute"]["num_tokens"] >= row["context"]
        assert row["host"]["num_blocks"] == -(-row["context"] // 32)
        assert row["host"]["num_victims"] == 0
        assert row["host_full"]["num_victims"] >= row["host_full"]["num_blocks"] > 0
        assert [row[way]["num_blocks"] for way in ("device", "prefetched", "recompute")] == [0] * 3
    assert [row["direction"] for row in result["bandwidth"]] == ["offload", "onboard"]
    assert result["steps"]["copied_bytes_per_s"] >= 0
    assert result["content"]["num_transfers"] == 20
    assert len(result["goals"]) == 5
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"kv-copies", "inflight-engine", "tokenflow-runtime"}


def test_the_variants_are_what_their_names_say(result: dict) -> None:
    rows = {row["variant"]: row for row in result["ablation"]["rows"]}
    assert list(rows) == [variant.name for variant in VARIANTS]
    assert rows["no offload"]["num_offloaded_blocks"] == 0
    assert rows["full"]["num_offloaded_blocks"] > 0
    assert rows["full"]["peak_pool_fill"] > 0.5
    assert rows["full"]["ratio"] == [1.0, 1.0, 1.0]
    assert rows["no offload"]["paper_ratio"] == pytest.approx(127.3 / 66.0)


def test_tables_have_all_of_it_for_terminal_and_document(result: dict, tmp_path: Path) -> None:
    assert len(tables(result)) == 6
    shown, document = text(result), markdown(result)
    for variant in VARIANTS:
        assert variant.name in shown
        assert variant.name in document
    for table in tables(result):
        assert {len(row) for row in table.rows} == {len(table.header)}
        lines = table.markdown().splitlines()[2:]
        assert {line.count("|") for line in lines} == {len(table.header) + 1}
    marks = "<!-- generated: kv_tiers -->\nold\n<!-- end -->\n"
    assert "make kv-tiers" in report.regenerate(marks, results=tmp_path)
    (tmp_path / "kv_tiers.json").write_text(json.dumps(result))
    assert report.regenerate(marks, results=tmp_path) == marks.replace("old", document)


def test_the_command_prints_and_writes_one_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "out.json"
    arguments = ["--model", "tiny-random", "--quick", "--section", "bandwidth", "--num-threads"]
    assert kv_tiers.main([*arguments, "1", "--json", "--output", str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(path.read_text())
    assert "bandwidth" in captured.err
    assert kv_tiers.main([*arguments, "1"]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert kv_tiers.main(["--model", str(tmp_path), "--section", "steps"]) == 1
    assert "config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        kv_tiers.main(["--runs", "0"])


def test_only_whole_runs_of_the_default_become_the_documents_figures(tmp_path: Path) -> None:
    def output(*arguments: str) -> Path | None:
        return kv_tiers._output(kv_tiers._parse(arguments))

    assert output() == output("--runs", "7") == kv_tiers.RESULTS
    for less in (["--quick"], ["--section", "steps"], ["--runs", "2"], ["--model", "tiny-random"]):
        assert output(*less) is None
    assert output("--quick", "--output", str(tmp_path)) == tmp_path


# -- figures -----------------------------------------------------------------------------------


def test_a_resume_is_measured_in_decode_steps_of_its_moment() -> None:
    def sample(seconds: float, copy_s: float, step_s: float) -> Sample:
        decode_s = (step_s, step_s, 9.0)
        return Sample(
            seconds=seconds,
            copy_s=copy_s,
            num_blocks=2,
            num_victims=0,
            num_tokens=1,
            decode_s=decode_s,
        )

    host = [sample(3.0, 1.0, 1.0), sample(9.0, 1.0, 4.0), sample(5.0, 1.0, 4.0)]
    row = resumes.summarise(64, ResumeScale(num_others=3), {HOST: host})
    assert (row["batch"], row["decode_s"]) == (4, 4.0)
    assert row[HOST]["steps"] == 2.25  # of 3, 2.25 and 1.25
    assert row[HOST]["extra_steps"] == 2.0  # of 2, 2 and 1
    assert (row[HOST]["seconds"], row[HOST]["copy_s"]) == (5.0, 1.0)


def test_ratios_of_copies_are_those_of_pairs() -> None:
    pairs = [(2.0, 1.0), (4.0, 4.0), (1.0, 0.8)]
    row = copies.summarise_bandwidth(CopyDirection.ONBOARD, 100, 10, pairs)
    assert row["ratio"] == 0.8
    assert (row["bytes_per_s"], row["plain_bytes_per_s"]) == (50.0, 100.0)
    steps = copies.summarise_steps(
        copies.CopyScale(), [(1.1, 1.0, 110.0), (1.2, 1.0, 0.0), (1.3, 1.25, 250.0)]
    )
    assert steps["ratio"] == 1.2
    assert steps["copied_bytes_per_s"] == pytest.approx(100.0)


def test_an_interval_is_that_of_all_runs_and_a_ratio_that_of_its_round() -> None:
    base = {
        "ttft_p50_s": 1.0,
        "ttft_p99_s": 1.0,
        "copy_s": 0.0,
        "copy_wait_s": 0.0,
        "hidden_share": 0.0,
        "peak_pool_fill": 1.0,
        "peak_num_running": 3,
        **dict.fromkeys(ablation._COUNTS, 0),
    }
    runs = [
        {**base, "run": i, "variant": variant.name, "completion_s": seconds, "num_pauses": i}
        for variant, all_s in zip(VARIANTS[:2], ([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]), strict=True)
        for i, seconds in enumerate(all_s)
    ]
    full, other = ablation.summarise(runs, VARIANTS[:2])
    assert full["completion_s"] == [1.0, 2.0, 4.0]
    assert other["ratio"] == [1.0, 2.0, 3.0]
    assert (other["num_pauses"], other["num_runs"]) == (1.0, 3)


def test_goals_are_those_of_the_device_and_of_the_median(result: dict) -> None:
    def rows(device: str, ratio: float, middle: float) -> list[dict]:
        changed = {
            **result,
            "environment": {**result["environment"], "device": device},
            "steps": {**result["steps"], "ratio": ratio},
            "bandwidth": [{"ratio": 0.9}, {"ratio": 0.68}],
            "resumes": [
                {
                    "host": {"extra_steps": host},
                    "host_full": {"extra_steps": host + 0.2},
                    "prefetched": {"steps": 1.1},
                }
                for host in (1.1, middle, 1.9)
            ],
        }
        return goals(changed)

    def met(*arguments: object) -> list[bool]:
        return [row["is_met"] for row in rows(*arguments)]

    assert met("cpu", 1.1, 1.4) == [True, False, True, False, True]
    assert met("cuda:0", 1.1, 1.3) == [True, True, True, False, False]
    first, *_, bandwidth, _ = rows("cpu", 1.1, 1.4)
    assert (first["value"], first["worst"]) == (1.4, 1.9)
    assert (bandwidth["value"], bandwidth["worst"]) == (pytest.approx(0.79), 0.68)
    assert goals({"environment": result["environment"]}) == []


def test_rounds_that_would_end_too_late_are_left_out_and_the_result_says_so(
    model: Model, result: dict
) -> None:
    burst = replace(TINY.burst, num_streams=1)
    made = ablation.measure(
        model, burst, 3, lambda what: None, VARIANTS[:1], until=time.monotonic()
    )
    assert made["num_rounds_left_out"] == 2
    assert [row["num_runs"] for row in made["rows"]] == [1]
    assert "2 rounds were left out" in text({**result, "ablation": made})
    assert "left out." not in text(result)
