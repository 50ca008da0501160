"""The child as the operating system sees it: environment, interpreter, output, end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.remote.helpers import LIMIT_S, engine
from tokenflow.errors import EngineError
from tokenflow.executor.process import EngineProcess, LogTail, child_environment, python_executable

ROOT = Path(__file__).resolve().parents[2]


def test_environment_is_set_before_the_engine_starts() -> None:
    with engine() as executor:
        raw = Path(f"/proc/{executor.pid}/environ").read_text()
        assert "OMP_WAIT_POLICY=PASSIVE" in raw.split("\0")
        fds = Path(f"/proc/{executor.pid}/fd")
        sockets = [fd for fd in fds.iterdir() if os.readlink(fd).startswith("socket:")]
        assert len(sockets) == 1, "the child holds a descriptor that it was not given"
        assert os.getsid(executor.pid) == executor.pid
    env = child_environment({"OMP_NUM_THREADS": "7", "PYTHONPATH": "/x"}, num_threads=3)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/x"]
    assert child_environment({"OMP_NUM_THREADS": "7"}, num_threads=0)["OMP_NUM_THREADS"] == "7"


def test_interpreter_is_this_environments() -> None:
    command = [python_executable(), "-c", "import sys; print(sys.prefix, sys.version)"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"{sys.prefix} {sys.version}"


def test_program_that_cannot_be_started_is_an_error() -> None:
    with open(os.devnull) as null, pytest.raises(EngineError, match="cannot be started"):
        EngineProcess(["/no/such/python"], env={}, pass_fd=null.fileno(), on_exit=lambda: None)


def test_tail_remembers_the_telling_line_and_copies_everything() -> None:
    read_fd, write_fd = os.pipe()
    tail = LogTail(write_fd)
    assert tail.last_line() == ""
    tail.feed(b"one\ntw")
    assert tail.last_line() == "tw"
    tail.feed(b"o\n\n \xff\n")
    assert tail.last_line() == "\ufffd"
    tail.feed(b"Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File x\n")
    assert tail.last_line() == "Fatal Python error: Segmentation fault"
    tail.feed(b"y" * 100_000)
    assert os.read(read_fd, 17) == b"one\ntwo\n\n \xff\nFatal"
    os.close(read_fd)
    tail.feed(b"nobody reads this\n")
    os.close(write_fd)


def test_tail_never_waits_for_a_full_destination() -> None:
    read_fd, write_fd = os.pipe()
    tail = LogTail(write_fd)

    def feed() -> None:
        for _ in range(100):
            tail.feed(b"z" * 8000 + b"\n")

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    feeder.join(LIMIT_S)
    assert not feeder.is_alive(), "it waits for somebody to read"
    assert len(tail.last_line()) == 400
    os.close(read_fd)
    os.close(write_fd)
