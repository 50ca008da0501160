"""What ends a build ends its command and all below it; and what a build never touches."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.build.test_builder import Bench, is_alive, wait_until

_FORKING = """#!{python}
import os, pathlib, signal, time
home = pathlib.Path({home!r})
signal.signal(signal.SIGTERM, lambda number, frame: (home / "asked").touch())
for name in ("worker", "loose"):
    if os.fork() == 0:
        if name == "loose":
            os.setsid()
        (home / name).write_text(str(os.getpid()))
        while True:
            time.sleep(600)
(home / "command").write_text(str(os.getpid()))
while not all((home / name).exists() for name in ("worker", "loose")):
    time.sleep(0.01)
(home / "ready").touch()
while True:
    time.sleep(600)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGTERM)],
    ids=["ctrl-c twice", "terminal closed"],
)
def test_a_command_that_forks_and_will_not_listen_is_ended(
    bench: Bench, numbers: tuple[int, ...]
) -> None:
    home = bench.programs.home
    program = home / "bin" / "trtllm-build"
    program.write_text(_FORKING.format(python=sys.executable, home=str(home)))
    with bench.start() as process:
        wait_until((home / "ready").exists)
        first, second = numbers
        process.send_signal(first)
        wait_until((home / "asked").exists)
        process.send_signal(second)
        assert process.wait(8) == 130, "it waits no longer"
    running = [int((home / name).read_text()) for name in ("command", "worker", "loose")]
    assert not [pid for pid in running if is_alive(pid)]


def test_a_program_that_cannot_be_started_is_named(bench: Bench) -> None:
    (bench.programs.home / "bin" / "trtllm-build").write_bytes(b"\0no program")
    assert "error: build: cannot be started: " in bench.refused()


def test_a_first_manifest_that_was_cut_off_is_no_obstacle(bench: Bench) -> None:
    bench.output.mkdir()
    (bench.output / ".lock").touch()
    (bench.output / "manifest.partial").write_text('{"form')
    assert bench.calls() == ["convert", "trtllm_build"]


def test_a_checkpoint_inside_the_output_is_not_emptied(bench: Bench) -> None:
    bench.calls()
    inside = bench.output / "converted"
    shutil.rmtree(inside)
    bench.checkpoint.rename(inside)
    bench.checkpoint = inside
    assert "output: must not hold the checkpoint" in bench.refused()
    assert (inside / "config.json").exists()


def test_what_a_link_leads_to_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    bench.calls()
    shutil.rmtree(bench.output / "engine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").touch()
    os.symlink(tmp_path / "elsewhere", bench.output / "engine")
    assert "output: " in bench.refused()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["thesis.txt"]
