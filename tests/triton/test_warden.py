"""The warden, on two ordinary processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from triton_backend.warden import watch


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    server, stub = sleeper(), sleeper()
    yield server, stub
    for process in (server, stub):
        process.kill()
        process.wait()


def watching(server_pid: int, stub_pid: int) -> tuple[threading.Thread, list[bool]]:
    result: list[bool] = []
    thread = threading.Thread(
        target=lambda: result.append(watch(server_pid, stub_pid, grace_s=0.2))
    )
    thread.start()
    return thread, result


def test_a_stub_that_outlives_its_server_is_killed(
    pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    server, stub = pair
    thread, result = watching(server.pid, stub.pid)
    server.kill()
    server.wait()
    assert stub.wait(5) == -9
    thread.join(5)
    assert result == [True]


def test_a_stub_that_ends_leaves_the_server_alone(
    pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    server, stub = pair
    thread, result = watching(server.pid, stub.pid)
    stub.kill()
    stub.wait()
    thread.join(5)
    assert result == [False]
    assert server.poll() is None


def test_a_server_that_was_gone_before_counts_as_ended(
    pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    server, stub = pair
    server.kill()
    server.wait()
    assert watch(server.pid, stub.pid, grace_s=0.0)
    assert stub.wait(5) == -9
