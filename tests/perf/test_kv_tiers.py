"""The benchmark of the KV tiers: what its figures are, and that each section runs (tiny model; no
times asserted)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from perf import kv_tiers, report
from perf.analysis import BenchmarkError
from perf.kv import ablation, copies, resumes
from perf.kv.bursts import VARIANTS, Burst, burst_requests
from perf.kv.models import Model, open_model
from perf.kv.resumes import HOST, WAYS, ResumeScale, Sample
from perf.kv.scales import SCALES, Scale
from perf.kv.stepping import EngineSize, SteppedEngine, Stream
from perf.kv.tables import goals, markdown, tables, text
from tokenflow.errors import ConfigError
from tokenflow.inflight.runner import CopyDirection

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[2] / "perf" / "gpu_kv_tiers.sh"
TINY = Scale(
    resumes=ResumeScale(contexts=(40, 70), num_others=1, num_repeats=1, num_recomputes=1),
    copies=copies.CopyScale(num_blocks=4, num_repeats=3, batch_size=2, context=40, num_steps=3),
    burst=Burst(
        num_streams=4,
        num_prompt_tokens=(60, 70),
        num_output_tokens=(12, 16),
        read_rate=40.0,
        spread_s=0.05,
        num_device_blocks=8,
        num_host_blocks=24,
        slack_margin_s=0.02,
        min_quantum_s=0.02,
    ),
    num_runs=1,
)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("tiny-random", "cpu", "float32", num_threads=1)


@pytest.fixture
def engine(model: Model) -> Iterator[SteppedEngine]:
    made = SteppedEngine(
        model, EngineSize(num_device_blocks=40, num_host_blocks=12, kv_tiering=True)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def result(model: Model) -> dict:
    """Everything, once, on the tiny model."""
    stored: list[set[str]] = []
    made = kv_tiers.measure(
        model, TINY, list(kv_tiers.SECTIONS), lambda what: None, lambda r: stored.append(set(r))
    )
    assert [len(s & set(kv_tiers.SECTIONS)) for s in stored] == [1, 2, 3, 4]
    return made


# -- the whole ---------------------------------------------------------------------------------


def test_every_section_runs_and_leaves_nothing(result: dict) -> None:
    assert set(result) == {"environment", "section_s", "goals", *kv_tiers.SECTIONS}
    assert json.loads(json.dumps(result)) is not None
    assert [row["context"] for row in result["resumes"]] == [40, 70]
    for row in result["resumes"]:
        assert row["batch"] == 2
        assert all(row[way]["num_samples"] == 1 and row[way]["seconds"] > 0 for way in WAYS)
        assert [row[way]["num_tokens"] for way in WAYS[:3]] == [1, 1, 1]
        assert row["recompute"]["num_tokens"] >= row["context"]
        assert row["host"]["num_blocks"] == -(-row["context"] // 32)
        assert [row[way]["num_blocks"] for way in ("device", "prefetched", "recompute")] == [0] * 3
    assert [row["direction"] for row in result["bandwidth"]] == ["offload", "onboard"]
    assert result["steps"]["copied_bytes_per_s"] >= 0
    assert len(result["goals"]) == 4
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
    assert len(tables(result)) == 5
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
        return Sample(seconds=seconds, copy_s=copy_s, num_blocks=2, num_tokens=1, decode_s=decode_s)

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


def test_goals_are_those_of_the_device_and_of_the_worst_case(result: dict) -> None:
    def met(device: str, ratio: float, worst: float) -> list[bool]:
        changed = {
            **result,
            "environment": {**result["environment"], "device": device},
            "steps": {**result["steps"], "ratio": ratio},
            "bandwidth": [{"ratio": 0.9}, {"ratio": worst}],
            "resumes": [
                {"host": {"extra_steps": 1.4}, "prefetched": {"steps": 1.1}},
                {"host": {"extra_steps": 1.6}, "prefetched": {"steps": 1.2}},
            ],
        }
        return [row["is_met"] for row in goals(changed)]

    assert met("cpu", 1.1, 0.85) == [False, True, True, True]
    assert met("cuda:0", 1.1, 0.79) == [False, True, False, False]
    assert goals({"environment": result["environment"]}) == []


# -- parts -------------------------------------------------------------------------------------


def test_random_models_are_the_same_every_time_and_serve_several_runners(model: Model) -> None:
    other = open_model("tiny-random", "cpu", "float32", num_threads=1)
    assert torch.equal(model.decoder.head_weight, other.decoder.head_weight)
    weights = [m.decoder.model.embed_tokens.weight for m in (model, other)]
    assert torch.equal(*weights)
    assert float(weights[0].std()) == pytest.approx(0.02, rel=0.1)
    ends = []
    for one in (model, model, other):
        engine = SteppedEngine(one, EngineSize(num_device_blocks=4))
        stream = Stream([5, 6, 7, 8])
        engine.start(stream)
        for _ in range(8):
            engine.until_token(stream)
        ends.append(stream.token_ids)
    assert ends[0] == ends[1] == ends[2]


def test_taking_all_blocks_leaves_a_stream_nothing_but_its_copies(engine: SteppedEngine) -> None:
    engine.start_crowd(2, 31)  # in between, they need blocks of their own
    stream = Stream(engine.new_prompt(70))
    engine.start(stream)
    engine.until_token(stream)
    engine.cancel(stream)
    assert engine.locate(stream).num_device_blocks == stream.num_blocks == 3
    engine.offload_all(stream)
    engine.take_all_blocks()
    found = engine.locate(stream)
    assert (found.num_device_blocks, found.num_host_blocks) == (0, 3)
    engine.prefetch_all(stream)
    assert engine.locate(stream).num_device_blocks == 3
    assert engine.stats.num_onboards_completed == 3
    before = list(stream.token_ids)
    engine.start(stream)
    assert engine.until_token(stream) > 0
    assert stream.token_ids[:-1] == before
    assert engine.stats.num_onboards_completed == 3


def test_what_a_way_takes_for_granted_is_looked_up(engine: SteppedEngine) -> None:
    stream = Stream(engine.new_prompt(40))
    engine.start(stream)
    engine.until_token(stream)
    engine.cancel(stream)
    with pytest.raises(BenchmarkError, match="before recompute"):
        resumes._prepare(engine, stream, resumes.RECOMPUTE)  # the host has it


def test_a_request_that_fails_ends_the_measurement(engine: SteppedEngine) -> None:
    stream = Stream(engine.new_prompt(40 * 32 + 1))
    engine.start(stream)
    with pytest.raises(BenchmarkError, match="exceeds maximum input length"):
        engine.until_token(stream)


def test_a_burst_is_the_same_every_time() -> None:
    burst = Burst()
    requests = burst_requests(burst, 1000)
    assert requests == burst_requests(burst, 1000)
    assert requests != burst_requests(replace(burst, seed=1), 1000)
    assert [r.send_offset_s for r in requests] == sorted(r.send_offset_s for r in requests)


@pytest.mark.parametrize("name", list(SCALES))
def test_every_burst_is_short_of_blocks_and_not_of_slots(name: str) -> None:
    for scale in SCALES[name].values():
        burst = scale.burst
        num_blocks = [
            -(-(len(r.input_token_ids) + r.max_tokens) // 32) for r in burst_requests(burst, 1000)
        ]
        assert sum(num_blocks) > 1.5 * burst.num_device_blocks
        assert max(num_blocks) * burst.max_batch_size > 1.5 * burst.num_device_blocks
        assert sum(num_blocks) <= burst.num_host_blocks


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt_model_path"):
        open_model(str(tmp_path), "cpu", "float32", 1)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "--device cpu --model tiny-random --quick --runs 1"),
        ("cuda", "--device cuda --model llama-3-8b-random --runs 3"),
    ],
)
def test_the_script_runs_the_same_command(tmp_path: Path, device: str, expected: str) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "DEVICE": device}
    subprocess.run([SCRIPT], env=environment, check=True, timeout=30)
    calls = log.read_text().splitlines()
    assert calls[-1] == f"-m perf.kv_tiers {expected} --output {tmp_path}/kv_tiers_{device}.json"
    assert sum(call.startswith("-m pytest") for call in calls) == 1
    python.write_text("#!/bin/sh\nexit 1\n")
    failed = subprocess.run([SCRIPT], env=environment, capture_output=True, timeout=30)
    assert failed.returncode == 1
    assert b"lacks torch" in failed.stderr
