"""perf/verify_trtllm.sh and `make test-trtllm` as programs, on the double of the bindings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.long_runs.server_processes import descendants
from perf.trtllm_suite.environment import describe_engine
from perf.trtllm_suite.report import DOUBLE_WORDS, Report, read_report
from perf.trtllm_suite.sections import SECTIONS, Section, run_section
from perf.trtllm_suite.values import Findings, NotHere, SectionResult, Status
from tests.trtllm.conftest import without_tensorrt_llm
from tests.trtllm_double.__main__ import ROOT
from tests.trtllm_double.folder import FAIL_FILE, Behind, write_engine

SCRIPT = ROOT / "perf" / "verify_trtllm.sh"
DOUBLE = [sys.executable, "-m", "tests.trtllm_double", "--"]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    behind = Behind(
        vocab_size=1000, script="pseudo_random", step_s=0.004, free_gpu_memory_bytes=64 << 20
    )
    return write_engine(
        tmp_path / "engine", behind, max_num_tokens=256, max_seq_len=1024, tokens_per_block=16
    )


def run(command: list[str], tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command from the checkout; what it leaves behind would be seen."""
    before = set(descendants(os.getpid()))
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path), **variables},
    )  # fmt: skip
    assert set(descendants(os.getpid())) <= before
    left = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in left if name.startswith("tokenflow-")], left
    return result


def test_it_runs_from_end_to_end_and_writes_one_report(engine: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.txt"
    command = [*DOUBLE, str(SCRIPT), str(engine), "--short", "--output", str(output)]
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = read_report(output)
    assert report["is_double"] is True
    assert report["result"] == "passed"
    assert [s["name"] for s in report["sections"]] == [s.name for s in SECTIONS]
    assert {s["status"] for s in report["sections"]} == {"passed"}
    assert report["versions"]["tensorrt_llm"] == "1.2.1+double"
    assert report["engine"]["tokens_per_block"] == 16
    burst = report["sections"][-1]["figures"]
    assert burst["tokenflow"]["ttft_p99_s"] < burst["fcfs-reserve"]["ttft_p99_s"]
    text = output.read_text()
    assert DOUBLE_WORDS in text
    assert "PASSED: 9 sections, 0 skipped, none failed" in text
    assert str(tmp_path) not in text, "a report names no folders"
    assert os.uname().nodename not in text.split("kernel")[0]
    assert not (engine / "hazards.txt").exists()


def test_an_engine_that_fails_is_told_at_the_end(engine: Path, tmp_path: Path) -> None:
    (engine / FAIL_FILE).touch()
    output = tmp_path / "report.txt"
    command = [*DOUBLE, str(SCRIPT), str(engine), "--short", "--output", str(output)]
    result = run([*command, "--sections", "api", "start", "lease"], tmp_path)
    assert result.returncode == 1
    report = read_report(output)
    assert report["failed"] == ["start", "lease"]
    ending = output.read_text().split("\n\n----- JSON")[0].splitlines()[-3:]
    assert ending[0] == "FAILED: start, lease (3 sections, 0 skipped)"
    assert ending[1].startswith("  start: ")
    assert "CUDA error" in ending[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/engine"], "gpt_model_path: no built engine there"),
        (["{engine}", "--set", "max_beams=2"], "max_beams: unknown parameter"),
    ],
)
def test_what_cannot_be_run_is_refused(
    engine: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    output = tmp_path / "report.txt"
    given = [argument.format(engine=engine) for argument in arguments]
    result = run([*DOUBLE, str(SCRIPT), *given, "--output", str(output)], tmp_path)
    assert result.returncode == 2
    report = read_report(output)
    assert report["result"] == "not begun"
    assert words in report["problems"][0]
    assert words in result.stdout


@without_tensorrt_llm
def test_without_tensorrt_llm_it_says_where_to_run_it(engine: Path, tmp_path: Path) -> None:
    result = run([str(SCRIPT), str(engine)], tmp_path, PYTHONPATH="")
    assert result.returncode == 2
    assert "tensorrt_llm is not installed" in result.stderr
    assert "-trtllm-python-py3" in result.stderr


def test_without_an_engine_it_says_how_it_is_called(tmp_path: Path) -> None:
    result = run([str(SCRIPT)], tmp_path)
    assert result.returncode == 2
    assert "perf/verify_trtllm.sh ENGINE [--short]" in result.stdout


def test_the_tests_for_hardware_run_on_an_engine(engine: Path, tmp_path: Path) -> None:
    arguments = f"-q -p no:randomly -k 'reuse or lease' --basetemp={tmp_path / 'base'}"
    command = [*DOUBLE, "make", "test-trtllm", f"ENGINE={engine}", f"PYTHON={sys.executable}"]
    result = run([*command, f"ARGS={arguments}"], tmp_path, TOKENFLOW_TRTLLM_SHORT="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed, 7 deselected" in result.stdout


def test_the_tests_for_hardware_are_left_out_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not e2e", "-p", "no:cacheprovider",
               "tests/hardware"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert f"{len(SECTIONS)} deselected" in result.stdout


# -- sections and report -----------------------------------------------------------------------


class NoEngines:
    """Sections under test look at nothing."""

    def log_tail(self) -> tuple[str, ...]:
        return ("the engine's last words",)


def _raising(error: Exception) -> Section:
    def check(engines: object) -> Findings:
        raise error

    return Section(name="x", title="a section", check=check)


def test_whatever_happens_in_a_section_is_its_result() -> None:
    failed = run_section(_raising(ZeroDivisionError("of 1")), NoEngines())
    assert failed.status is Status.FAILED
    assert failed.faults == ("ZeroDivisionError: of 1",)
    assert failed.log_tail == ("the engine's last words",)
    skipped = run_section(_raising(NotHere("no such thing")), NoEngines())
    assert (skipped.status, skipped.remarks) == (Status.SKIPPED, ("no such thing",))
    assert skipped.log_tail == ()


def _report(*statuses: Status, **fields: object) -> Report:
    sections = [
        SectionResult(name=f"s{i}", title="t", status=status, duration_s=1.0,
                      faults=("bad",) if status is Status.FAILED else ())
        for i, status in enumerate(statuses)
    ]  # fmt: skip
    values = {"date": "today", "form": "full", "machine": {}, "versions": {}, "engine": {}}
    return Report(**{**values, "sections": sections, **fields})


def test_the_exit_code_is_that_of_the_worst() -> None:
    assert _report(Status.PASSED, Status.SKIPPED).exit_code == 0
    assert _report(Status.PASSED, Status.FAILED).exit_code == 1
    assert _report().exit_code == 1
    assert _report(Status.PASSED, problems=["no GPU"]).exit_code == 2
    assert "  s1: bad" in _report(Status.PASSED, Status.FAILED).text()


def test_what_ran_on_tensorrt_llm_is_not_said_to_be_a_double() -> None:
    assert _report(versions={"tensorrt_llm": "1.2.1"}).values()["is_double"] is False
    assert "DOUBLE" not in _report(versions={"tensorrt_llm": "1.2.1"}).text()


def test_the_manifest_of_a_build_is_in_it_without_its_folders(engine: Path) -> None:
    (engine.parent / "manifest.json").write_text(
        '{"model": "llama-3-8b", "limits": {"max_seq_len": 8}, "checkpoint": {"path": "/home/x"}}'
    )
    manifest = describe_engine(engine)["manifest"]
    assert manifest == {"model": "llama-3-8b", "limits": {"max_seq_len": 8}}
