"""The laboratory's commands with work, arguments and moments that nobody wishes for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perf import simulate, sweep

HEADER = "arrival_time,num_prompt_tokens,max_tokens,read_rate,cancel_after_s\n"


def trace(folder: Path, *rows: str) -> Path:
    path = folder / "work.csv"
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return path


def refusal(capsys: pytest.CaptureFixture[str], main, *arguments: object) -> str:
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_trace_without_a_request_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = trace(tmp_path)
    said = refusal(capsys, simulate.main, "--setup", "4090-a", "--trace-in", path)
    assert said.endswith("work.csv holds no request")


def test_a_pipe_is_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is read once would be missing when the file is read."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    said = refusal(capsys, simulate.main, "--setup", "4090-a", "--trace-in", path)
    assert "pipe is no file" in said


def test_work_of_which_nobody_gets_a_token_has_figures_and_no_goals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, output = trace(tmp_path, "0,100,10,6,0"), tmp_path / "out.json"
    arguments = ["--setup", "4090-a", "--trace-in", str(path), "--output", str(output)]
    assert simulate.main(arguments) == 0
    assert '"goals": []' in output.read_text()


@pytest.mark.parametrize(
    ("row", "num_tokens"), [("0,20000,10,6,", 20010), ("0,10,99999999999,6,", 100000000009)]
)
def test_requests_that_the_engine_would_refuse_or_cut_short_are_no_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, row: str, num_tokens: int
) -> None:
    path = trace(tmp_path, "0,10,10,6,", row)
    said = refusal(capsys, simulate.main, "--setup", "4090-a", "--trace-in", path)
    assert f"at 0 s has {num_tokens} tokens" in said
    assert "4090-a takes 16384" in said


def test_days_between_requests_and_clients_that_would_leave_later_are_no_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = trace(tmp_path, "0,100,50,6,900000", "200000,10,10,6,")
    arguments = ["--setup", "4090-a", "--policies", "tokenflow", "--trace-in", str(path)]
    assert simulate.main(arguments) == 0
    assert "200,000 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--param", "max_batch_size=0"), "max_batch_size: must be in"),
        (("--param", "plan_interval_s=0"), "plan_interval_s: must be in"),
        (("--param", "max_num_tokens=16"), "must hold one token for each of max_batch_size"),
        (("--param", "max_batch_size=4096"), "must hold one token for each of max_batch_size"),
        (("--param", "capacity_policy=foo"), "foo"),
        (("--param", "max_batch_size=16", "--name", "a/../b"), "--name is part of a file's name"),
    ],
)
def test_a_sweep_refuses_what_no_engine_can_be_before_it_runs_any(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, sweep.main, "--setup", "4090-a", *arguments)


def test_pictures_that_cannot_be_written_are_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "pictures"
    said = refusal(capsys, simulate.main, "--setup", "4090-a", "--figures", folder)
    assert str(folder.parent) in said


def test_results_may_go_to_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    simulate.prepare(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    simulate.write(pipe, {"cells": []})
    assert '"cells": []' in reader.communicate(timeout=20)[0]
    assert pipe.is_fifo()


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perf.simulate", "--setup", "4090-c", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _group(process: subprocess.Popen[str]) -> list[int]:
    """Live processes of its session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == process.pid and fields[0] != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(kind: signal.Signals) -> None:
    process = _start("--policies", "tokenflow", "--seeds", "1-6", "--jobs", "2")
    deadline = time.monotonic() + 60
    while len(_group(process)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_group(process)) >= 3
    time.sleep(1.0)
    process.send_signal(kind)
    said = process.communicate(timeout=30)[1]
    if kind is signal.SIGINT:
        assert (process.returncode, said.splitlines()[-1]) == (130, "stopped")
    while _group(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group(process)
