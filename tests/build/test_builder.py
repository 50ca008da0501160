"""Building: the plan's commands run as they would, with stand-ins on PATH for TensorRT-LLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from build_engines.manifest import read_manifest
from build_engines.recipes import FROM_CHECKPOINT
from tests.build.checkpoints import QWEN2, change_json, write_checkpoint
from tests.build.programs import GPU, Programs, install
from triton_backend.text import read_eos_token_ids

ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """A checkpoint, stand-in programs, and the command that builds one with the other."""

    def __init__(self, folder: Path, **checkpoint: object) -> None:
        self.checkpoint = write_checkpoint(folder / "checkpoint", **checkpoint)
        self.programs: Programs = install(folder / "programs")
        self.output = folder / "output"

    def command(self, *flags: str) -> list[str]:
        return [
            sys.executable, "-m", "tokenflow.cli.main", "build",
            "--model", FROM_CHECKPOINT, "--gpu", "h200", "--checkpoint", str(self.checkpoint),
            "--output", str(self.output), "--examples", str(self.programs.examples), *flags,
        ]  # fmt: skip

    def build(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*flags),
            env=self.programs.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(),
            env=self.programs.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def calls(self, *flags: str) -> list[str]:
        """Programs that a successful build runs."""
        self.programs.forget_calls()
        done = self.build(*flags)
        assert done.returncode == 0, done.stderr
        return self.programs.calls()

    def refused(self, *flags: str) -> str:
        done = self.build(*flags)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_build_leaves_an_engine_with_its_manifest(bench: Bench) -> None:
    done = bench.build("--tp", "2", "--host-gb", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bench.output)
    assert "convert …" in done.stderr
    assert "build …" in done.stderr
    assert bench.programs.calls() == ["convert", "trtllm_build"]
    manifest = read_manifest(bench.output)
    assert manifest["state"] == "complete"
    assert manifest["versions"]["tensorrt_llm"] == "1.2.1"
    assert (manifest["gpu"], manifest["tp_size"], manifest["dtype"]) == ("h200", 2, "bf16")
    assert manifest["flags"]["--kv_cache_type"] == "paged"
    assert manifest["limits"]["max_seq_len"] == 4096
    assert manifest["memory"]["host_bytes"] == 10**9
    assert manifest["checkpoint"]["path"] == str(bench.checkpoint)
    assert set(manifest["engine"]["files"]) == {"config.json", "rank0.engine", "rank1.engine"}
    assert {path.name for path in (bench.output / "tokenizer").iterdir()} == {
        "tokenizer.json", "generation_config.json", "config.json",
    }  # fmt: skip
    for step in ("convert", "build"):
        log = (bench.output / manifest["steps"][step]["log"]).read_text()
        assert log.startswith("$ ")
        assert "part 2 of 3" in log


def test_end_tokens_that_only_the_configuration_names_are_served(tmp_path: Path) -> None:
    bench = Bench(tmp_path, eos_token_id=[1, 0])
    (bench.checkpoint / "generation_config.json").unlink()
    bench.calls()
    assert read_eos_token_ids(bench.output / "tokenizer", Tokenizer(BPE())) == (1, 0)


def test_fp8_goes_through_the_quantizer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, **QWEN2)
    assert bench.calls("--dtype", "fp8") == ["convert", "trtllm_build"]
    command = read_manifest(bench.output)["steps"]["convert"]["command"]
    assert command[1].endswith("quantization/quantize.py")
    assert command[command.index("--kv_cache_dtype") + 1] == "fp8"


def test_what_is_built_is_not_built_again(bench: Bench) -> None:
    assert bench.calls() == ["convert", "trtllm_build"]
    assert bench.calls() == []
    shutil.rmtree(bench.output / "converted")
    assert bench.calls() == [], "only needed to make the engine"


def test_a_changed_limit_builds_again_from_what_was_converted(bench: Bench) -> None:
    bench.calls()
    assert bench.calls("--max-batch-size", "4") == ["trtllm_build"]
    assert read_manifest(bench.output)["limits"]["max_batch_size"] == 4


def test_a_changed_input_converts_again(bench: Bench) -> None:
    bench.calls()
    shard = next(iter(sorted(bench.checkpoint.glob("*.safetensors"))))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # same size, other weights
    assert bench.calls() == ["convert", "trtllm_build"]
    change_json(bench.checkpoint / "generation_config.json", lambda value: value.update(x=1))
    assert bench.calls() == ["convert", "trtllm_build"]


def test_another_version_builds_again(bench: Bench) -> None:
    bench.calls()
    answer = {"version": "1.2.2", "has_executor": True, "python": "3.12.3", "gpus": [GPU]}
    bench.programs.behave(python3={"answer": answer})
    assert bench.calls() == ["convert", "trtllm_build"]


def test_a_damaged_engine_is_built_again(bench: Bench) -> None:
    bench.calls()
    (bench.output / "engine" / "rank0.engine").write_bytes(b"cut")
    assert bench.calls() == ["trtllm_build"]


def test_a_failed_command_is_named_with_its_last_words_and_its_log(bench: Bench) -> None:
    bench.programs.behave(trtllm_build={"exit": 3, "half": True})
    error = bench.refused()
    assert "build: trtllm-build ended with 3" in error
    assert "RuntimeError: something in there went wrong" in error
    assert str(bench.output / "logs" / "build.log") in error
    manifest = read_manifest(bench.output)
    assert (manifest["state"], list(manifest["steps"])) == ("building", ["convert"])
    bench.programs.behave()
    assert bench.calls() == ["trtllm_build"], "the conversion is not repeated"
    assert not (bench.output / "engine" / "half-written").exists()


def test_a_command_that_is_killed_halfway_is_repeated(bench: Bench) -> None:
    bench.programs.behave(convert={"signal": signal.SIGKILL, "half": True})
    assert "python3 was killed by signal 9 (out of memory?)" in bench.refused()
    bench.programs.behave()
    assert bench.calls() == ["convert", "trtllm_build"]
    assert not (bench.output / "converted" / "half-written").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stopped_build_stops_its_command(bench: Bench, number: int) -> None:
    bench.programs.behave(trtllm_build={"hang": True})
    with bench.start() as process:
        wait_until(lambda: bench.programs.hangs("trtllm_build"))
        process.send_signal(number)
        assert process.wait(20) == 130
    assert not [pid for pid in bench.programs.pids() if is_alive(pid)]
    bench.programs.behave()
    assert bench.calls() == ["trtllm_build"]


def test_a_folder_has_one_build_at_a_time_and_a_killed_one_leaves_no_second(bench: Bench) -> None:
    bench.programs.behave(convert={"hang": True})
    with bench.start() as process:
        wait_until(lambda: bench.programs.hangs("convert"))
        assert "output: another build works in" in bench.refused()
        process.kill()
        process.wait(10)
    # The command of the killed builder still writes there, so nobody else may.
    command = [pid for pid in bench.programs.pids() if is_alive(pid)]
    assert len(command) == 1
    assert "output: another build works in" in bench.refused()
    os.kill(command[0], signal.SIGKILL)
    wait_until(lambda: not is_alive(command[0]))
    bench.programs.behave()
    assert bench.calls() == ["convert", "trtllm_build"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            {"config": {"build_config.plugin_config.use_paged_context_fmha": False}},
            "the engine was built with use_paged_context_fmha off",
        ),
        ({"config": {"build_config.gather_context_logits": True}}, "gather_context_logits on"),
        ({"config": {"build_config.kv_cache_type": "CONTINUOUS"}}, "kv_cache_type continuous"),
        ({"config": {"build_config.max_batch_size": 8}}, "max_batch_size is 8, asked was 512"),
        (
            {"config": {"build_config.plugin_config.tokens_per_block": 64}},
            "tokens_per_block is 64, asked was 32",
        ),
        (
            {"config": {"pretrained_config.quantization": {"kv_cache_quant_algo": "INT8"}}},
            "kv_bytes_per_token is 128.0, asked was 256",
        ),
        ({"missing_ranks": 1}, "lacks rank0.engine"),
    ],
)
def test_an_engine_that_is_not_as_asked_is_not_recorded(
    bench: Bench, behaviour: dict, reason: str
) -> None:
    bench.programs.behave(trtllm_build=behaviour)
    assert reason in bench.refused()
    assert "build" not in read_manifest(bench.output)["steps"]


def test_a_command_that_leaves_nothing_has_failed(bench: Bench) -> None:
    bench.programs.behave(convert={"nothing": True})
    assert "convert: the command ended, but left nothing" in bench.refused()


ANSWER = {"version": "1.2.1", "has_executor": True, "python": "3.12.3", "gpus": [GPU]}


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ({"exit": 1}, "tensorrt_llm: python3 cannot import it: ModuleNotFoundError"),
        ({}, "tensorrt_llm: python3 gave no answer"),
        ({"answer": {**ANSWER, "version": "1.3.0rc21"}}, "tensorrt_llm: must be 1.2.x, found 1.3"),
        ({"answer": {**ANSWER, "has_executor": False}}, "tensorrt_llm: 1.2.1 has no Executor"),
        ({"answer": {**ANSWER, "gpus": []}}, "gpu: CUDA shows no GPU"),
        (
            {"answer": {**ANSWER, "gpus": [["NVIDIA L40S", 48 * 10**9]]}},
            "gpu: the plan is for h200",
        ),
        ({"answer": {**ANSWER, "gpus": [["NVIDIA H200 MIG", 10**9]]}}, "are needed before any KV"),
        (
            {"answer": {**ANSWER, "gpus": [["NVIDIA GH200 480GB", 150 * 10**9]]}},
            "gpu: the plan is for h200, this is NVIDIA GH200",
        ),
        (
            {"answer": {**ANSWER, "gpus": [["NVIDIA H200 MIG 3g.71gb", 75 * 10**9]]}},
            "gpu_memory_gb: NVIDIA H200 MIG 3g.71gb has 75.0, the plan is for 141.0",
        ),
    ],
)
def test_a_machine_that_cannot_build_is_refused_before_anything_runs(
    bench: Bench, probe: dict, reason: str
) -> None:
    bench.programs.behave(python3=probe)
    assert reason in bench.refused()
    assert bench.programs.calls() == []


def test_missing_programs_are_named(bench: Bench) -> None:
    assert "examples: /nowhere/models/core/llama" in bench.refused("--examples", "/nowhere")
    assert "python: nosuchpython is not on PATH" in bench.refused("--python", "nosuchpython")
    (bench.programs.home / "bin" / "trtllm-build").unlink()
    assert "build: trtllm-build is not on PATH" in bench.refused()


def test_a_folder_of_something_else_is_left_alone(bench: Bench) -> None:
    bench.output.mkdir()
    (bench.output / "thesis.txt").write_text("precious")
    assert "output: " in bench.refused()
    assert "holds thesis.txt" in bench.refused()
    bench.output = bench.checkpoint
    assert "output: must not be the checkpoint's folder" in bench.refused()


def test_a_broken_manifest_is_said_and_kept(bench: Bench) -> None:
    bench.calls()
    (bench.output / "manifest.json").write_text(json.dumps({"format": 99}))
    assert "manifest.json has format 99, this version reads 1" in bench.refused()


HUGE = """
import dataclasses, sys
from pathlib import Path
from build_engines.build_plan import BuildRequest, make_plan
from build_engines.builder import run_build
from build_engines.checkpoint import read_checkpoint
checkpoint = read_checkpoint(Path(sys.argv[1]))
request = BuildRequest(model="from-checkpoint", gpu="h200", checkpoint=checkpoint.path,
                       output=Path(sys.argv[2]), examples=sys.argv[3])
plan = dataclasses.replace(make_plan(request, checkpoint), disk_bytes=10**18)
run_build(plan, checkpoint, lambda step, seconds, line: None)
"""


def test_room_on_the_disk_is_asked_for_what_is_still_to_be_built(bench: Bench) -> None:
    """The same plan, but for an engine that no disk holds."""

    def build_huge() -> subprocess.CompletedProcess[str]:
        places = (bench.checkpoint, bench.output, bench.programs.examples)
        return subprocess.run(
            [sys.executable, "-c", HUGE, *map(str, places)],
            env=bench.programs.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert "free, 1000000000.00 GB are needed" in build_huge().stderr
    assert bench.programs.calls() == []
    assert bench.calls() == ["convert", "trtllm_build"]
    assert build_huge().returncode == 0, "all is there"
    shutil.rmtree(bench.output / "engine")
    assert "free, 500000000.00 GB are needed" in build_huge().stderr


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Not ended; one that waits to be reaped has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
