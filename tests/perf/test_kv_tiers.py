"""The benchmark of the KV tiers: what its figures are, and that each section runs (tiny model; no
times asserted)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
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
from perf.kv import ablation, content, copies, resumes
from perf.kv.bursts import VARIANTS, Burst, burst_requests
from perf.kv.content import NUM_HOST_BLOCKS
from perf.kv.filling import FillingRunner
from perf.kv.models import Model, open_model
from perf.kv.resumes import HOST, HOST_FULL, WAYS, ResumeScale, Sample
from perf.kv.scales import SCALES, Scale
from perf.kv.stepping import EngineSize, SteppedEngine, Stream
from perf.kv.tables import goals, markdown, tables, text
from tokenflow.errors import ConfigError
from tokenflow.executor.api import Request
from tokenflow.inflight.runner import CopyDirection, SequenceChunk
from tokenflow.inflight.torch_memory import allocate_rows
from tokenflow.inflight.torch_runs import CopyRun
from tokenflow.inflight.torch_transport import ArrayMemory, ThreadTransport

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
    num_checked_transfers=20,
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


def test_full_tiers_hold_the_stream_on_the_host_and_nothing_is_empty(model: Model) -> None:
    scale = ResumeScale(num_others=2, num_repeats=1)
    size = resumes._size(scale, 70, num_hosted=2, kv_tiering=False)
    engine = SteppedEngine(model, size)
    try:
        bed = resumes._bed(engine, scale, 70, is_full=True)
        for _ in range(2):
            resumes._prepare(engine, bed.stream, HOST_FULL)
            assert engine.num_empty_blocks() == (0, 0)
            before = engine.stats
            engine.start(bed.stream)
            engine.until_token(bed.stream)
            num_onboards = engine.stats.num_onboards_completed - before.num_onboards_completed
            assert num_onboards == bed.stream.num_blocks
            assert engine.stats.num_offloads_completed - before.num_offloads_completed >= 3
            engine.cancel(bed.stream)
    finally:
        engine.close()


def test_what_only_fills_blocks_is_not_computed_and_the_others_are(model: Model) -> None:
    made = []
    for fills in (False, True):
        runner = FillingRunner(model.runner(), 32)
        runner.allocate_kv(6, 32, 0)
        runner.fillers |= {8, 9}
        runner.add_request(7, Request(input_token_ids=(5, 6, 7), max_tokens=2))
        chunks = [SequenceChunk(7, (5, 6, 7), 0, (3,), True, 0)]
        if fills:
            filler = SequenceChunk(8, (1,) * 40, 0, (4, 5), True, 0)
            chunks = [filler, *chunks, SequenceChunk(9, (1,) * 9, 0, (0,), False, 0)]
        output = runner.forward(chunks)
        made.append((output.token_ids, output.log_probs))
        if fills:
            assert runner.forward([filler]).token_ids == [0]  # alone, it is no work at all
        runner.remove_request(7)
        runner.remove_request(8)
    (tokens, log_probs), filled = made
    assert filled == ([0, *tokens], [0.0, *log_probs])


def test_copies_that_go_astray_are_found(model: Model) -> None:
    """Each in the pool where it leaves wrong bytes."""

    class Astray(ArrayMemory):
        wrong_way: CopyDirection | None = None

        def copy(self, direction: CopyDirection, run: CopyRun) -> None:
            if direction is self.wrong_way and run.host_block == 7:
                run = CopyRun(run.device_block, run.host_block - 1, run.num_blocks)
            super().copy(direction, run)

    def check(wrong_way: CopyDirection | None) -> None:
        pool = torch.zeros((content.NUM_DEVICE_BLOCKS, 64), dtype=torch.uint8)
        memory = Astray(pool.numpy(), allocate_rows(NUM_HOST_BLOCKS, 64))
        memory.wrong_way = wrong_way
        transport = ThreadTransport(memory)
        try:
            content.check(pool, transport, 30)
        finally:
            transport.close()

    for wrong_way in CopyDirection:
        with pytest.raises(BenchmarkError, match="wrong bytes"):
            check(wrong_way)
    check(None)


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


def _fake_python(folder: Path, lacking: str = "") -> tuple[Path, Path]:
    """An interpreter that cannot find `lacking`, and the file in which it logs the rest."""
    python, log = folder / "python", folder / "log"
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then shift 2; for name in "$@"; do\n'
        f'case " {lacking} " in *" $name "*) echo "$name";; esac; done; exit; fi\n'
        f'echo "$@" >> {log}\n'
    )
    python.chmod(0o755)
    return python, log


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "--device cpu --model tiny-random --quick --runs 1"),
        ("cuda", "--device cuda --model llama-3-8b-random --runs 5"),
    ],
)
def test_the_script_runs_the_same_command(tmp_path: Path, device: str, expected: str) -> None:
    python, log = _fake_python(tmp_path)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "DEVICE": device}
    subprocess.run([SCRIPT], env=environment, check=True, timeout=30)
    tests, command = log.read_text().splitlines()
    assert tests.startswith("-m pytest")
    head, tail = command.split(" --limit-s ")
    limit_s, output = tail.split(" --output ")
    assert head == f"-m perf.kv_tiers {expected}"
    assert output == f"{tmp_path}/kv_tiers_{device}.json"
    assert 400 < int(limit_s) <= 440


def test_the_script_brings_what_is_missing_from_wheels_and_goes_on_without_pytest(
    tmp_path: Path,
) -> None:
    python, log = _fake_python(tmp_path, "msgspec tqdm pytest")
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "WHEELS": "some/dir"}
    subprocess.run([SCRIPT], env=environment, check=True, timeout=30)
    install, command = log.read_text().splitlines()
    assert install.startswith("-m pip install --quiet --no-index --no-deps --find-links some/dir ")
    assert install.endswith(" msgspec tqdm")
    assert command.startswith("-m perf.kv_tiers")
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo msgspec && exit\nexit 1\n')
    failed = subprocess.run([SCRIPT], env=environment, capture_output=True, timeout=30)
    assert failed.returncode == 1
    assert b"lacks msgspec, some/dir too" in failed.stderr
