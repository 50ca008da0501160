"""Death of either side, in every phase: clear errors, nothing hangs, nothing stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from tests.remote.counting_engine import CRASH_TOKEN
from tests.remote.helpers import (
    LIMIT_S,
    collect,
    engine,
    is_running,
    request,
    tokens,
    wait_until,
)
from tokenflow.config import ServingConfig, format_parameters
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.api import Response
from tokenflow.executor.channel import (
    Ack,
    EngineInfo,
    FrameBuffer,
    Progress,
    Ready,
    Setup,
    decode_from_host,
    encode,
)
from tokenflow.executor.host import EXIT_ENGINE_FAILED, EXIT_PARENT_GONE, EXIT_PROTOCOL
from tokenflow.executor.process import child_environment, python_executable
from tokenflow.executor.remote import RemoteExecutor

ROOT = Path(__file__).resolve().parents[2]


def _load(kind: str, **options: object) -> None:
    config = ServingConfig(engine="scripted")
    RemoteExecutor(config, factory=f"tests.remote.engines:{kind}", **options)


# -- the engine dies -----------------------------------------------------------------------------


def test_kill_of_an_idle_engine() -> None:
    with engine() as executor:
        os.kill(executor.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="signal SIGKILL"):
            executor.await_responses()
        assert not executor.can_enqueue_requests()
        with pytest.raises(EngineLostError, match="signal SIGKILL"):
            executor.enqueue_request(request())
        executor.cancel_request(1)
        assert executor.get_latest_iteration_stats() == []


def test_kill_in_the_middle_of_decoding_ends_each_request_once() -> None:
    with engine(step_s=0.005) as executor:
        ids = executor.enqueue_requests([request(1000, client_id=i) for i in range(8)])
        before = executor.await_responses()
        os.kill(executor.pid, signal.SIGKILL)
        responses = before + collect(executor, ids)
        errors = [r for r in responses if r.has_error()]
        assert [r.request_id for r in errors] == ids
        assert [r.client_id for r in errors] == list(range(8))
        assert all("the engine process ended (signal SIGKILL)" in r.error_msg for r in errors)
        for id in ids:
            received = tokens(responses, id)
            assert received == list(range(len(received)))
            assert received
        with pytest.raises(EngineLostError):
            executor.await_responses(timedelta(seconds=LIMIT_S))


def test_crash_in_a_step_quotes_the_last_line_of_its_log() -> None:
    with engine() as executor:
        id = executor.enqueue_request(request(first=CRASH_TOKEN))
        (response,) = collect(executor, [id])
        assert "signal SIGKILL" in response.error_msg
        assert "about to crash in a step" in response.error_msg


def test_loss_is_noticed_by_a_caller_that_is_blocked_without_limit() -> None:
    with engine() as executor:
        noticed = threading.Event()

        def block() -> None:
            with pytest.raises(EngineLostError):
                executor.await_responses()
            noticed.set()

        thread = threading.Thread(target=block)
        thread.start()
        assert not noticed.wait(0.05)
        os.kill(executor.pid, signal.SIGKILL)
        assert noticed.wait(LIMIT_S)
        thread.join(LIMIT_S)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_has_one_end_whenever_the_engine_dies(seed: int) -> None:
    """Requests and cancels keep coming from two threads while the engine is killed."""
    random = Random(seed)
    enqueued: list[int] = []
    with engine(window=2) as executor:

        def enqueue_for_ever() -> None:
            while True:
                ids = executor.enqueue_requests([request(1 + len(enqueued) % 5)] * 3)
                enqueued.extend(ids)
                executor.cancel_request(ids[1])

        def await_for_ever() -> None:
            while True:
                responses.extend(executor.await_responses())

        def caller() -> None:
            with pytest.raises(EngineLostError):
                enqueue_for_ever()

        responses: list[Response] = []
        threads = [threading.Thread(target=caller) for _ in range(2)]
        for thread in threads:
            thread.start()
        timer = threading.Timer(random.uniform(0.0, 0.1), os.kill, (executor.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(EngineLostError):
            await_for_ever()
        for thread in [*threads, timer]:
            thread.join(LIMIT_S)
    finals = [r.request_id for r in responses if r.has_error() or r.result.is_final]
    assert sorted(finals) == sorted(enqueued)


def test_shutdown_after_a_loss_and_again() -> None:
    with engine() as executor:
        os.kill(executor.pid, signal.SIGKILL)
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            executor.await_responses()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("failing_load", "FileNotFoundError: no checkpoint in /nowhere"),
        ("exiting_load", "SystemExit: licence check failed"),
        ("dying_load", r"signal SIGSEGV.*reading shard 3.*before the engine was ready"),
        ("no_such_engine", "AttributeError"),
    ],
)
def test_failure_to_load_raises_with_the_engines_message(kind: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _load(kind)


def test_kill_during_load() -> None:
    def kill(fraction: float, text: str) -> None:
        os.kill(int(text.split()[1]), signal.SIGKILL)

    with pytest.raises(EngineError, match=r"signal SIGKILL.*before the engine was ready"):
        _load("slow_load", on_progress=kill)


def test_load_that_takes_too_long_is_ended() -> None:
    pids: list[int] = []
    with pytest.raises(EngineError, match=r"not ready after 0.4 s"):
        _load(
            "slow_load",
            load_timeout_s=0.4,
            on_progress=lambda fraction, text: pids.append(int(text.split()[1])),
        )
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("kind", ["garbage", "oversize"])
def test_garbage_from_the_engine_ends_it_and_its_requests(kind: str) -> None:
    with engine(kind, step_s=0.02) as executor:
        ids = executor.enqueue_requests([request(100_000)] * 2)
        responses = collect(executor, ids)
        errors = [r.error_msg for r in responses if r.has_error()]
        assert len(errors) == 2
        assert all("malformed message" in error for error in errors)
        assert not is_running(executor.pid)


def test_log_file_gets_the_engines_output(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with pytest.raises(EngineError):
        _load("failing_load", log_path=log)
    assert "Traceback" in log.read_text()
    with pytest.raises(EngineError, match="cannot be written"):
        _load("counting", log_path=tmp_path)


# -- the host alone, with this test as its parent --------------------------------------------------


def _host_command(fd: int, parent_pid: int) -> list[str]:
    options = ["--fd", str(fd), "--parent-pid", str(parent_pid)]
    return [python_executable(), "-m", "tokenflow.executor.host", *options]


class _Host:
    """A host process at the other end of a socket that the test holds."""

    def __init__(self, kind: str = "counting") -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                _host_command(theirs.fileno(), os.getpid()),
                env=child_environment(os.environ, 0),
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                cwd="/",
            )
        parameters = format_parameters(ServingConfig(engine="scripted"))
        self.setup = encode(Setup(parameters, f"tests.remote.engines:{kind}", 4))
        self._frames = FrameBuffer()
        self._messages: list[object] = []

    def next_message(self) -> object:
        self.socket.settimeout(LIMIT_S)
        while not self._messages:
            data = self.socket.recv(1 << 16)
            assert data, "the host closed the channel"
            self._messages += [decode_from_host(p) for p in self._frames.feed(data)]
        return self._messages.pop(0)

    def end(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=LIMIT_S)
        self.socket.close()
        return self.process.returncode, stderr.decode()


def _after_ready(data: bytes) -> Callable[[_Host], None]:
    def act(host: _Host) -> None:
        host.socket.sendall(host.setup)
        while not isinstance(host.next_message(), Ready):
            pass
        host.socket.sendall(data)

    return act


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        (lambda host: host.socket.sendall(b"\x08\0\0\0rubbish!"), EXIT_ENGINE_FAILED, "malformed"),
        (lambda host: host.socket.sendall(encode(Ack(1))), EXIT_ENGINE_FAILED, "not Setup"),
        (_after_ready(b"\x08\0\0\0rubbish!"), EXIT_PROTOCOL, "malformed"),
        (_after_ready(b"\xff\xff\xff\xff"), EXIT_PROTOCOL, "malformed"),
        (_after_ready(encode(Ack(99))), EXIT_PROTOCOL, "99 acknowledged"),
        (_after_ready(encode(Setup({}, "x:y", 1))), EXIT_PROTOCOL, "unexpected Setup"),
    ],
)
def test_garbage_from_the_proxy_ends_the_host_with_a_reason(
    act: Callable[[_Host], None], code: int, message: str
) -> None:
    host = _Host()
    act(host)
    returncode, stderr = host.end()
    assert returncode == code
    assert message in stderr


@pytest.mark.parametrize("kind", ["counting", "slow_load"])
def test_end_of_the_channel_ends_the_host_idle_and_loading(kind: str) -> None:
    host = _Host(kind)
    host.socket.sendall(host.setup)
    while not isinstance(host.next_message(), Ready if kind == "counting" else Progress):
        pass
    host.socket.close()
    returncode, _ = host.end()
    assert returncode == EXIT_PARENT_GONE


def test_host_ignores_an_interrupt_but_not_a_termination() -> None:
    host = _Host()
    host.socket.sendall(host.setup)
    while not isinstance(message := host.next_message(), Ready):
        pass
    assert isinstance(message.info, EngineInfo)
    host.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert host.process.poll() is None
    host.process.terminate()
    assert host.end()[0] == -signal.SIGTERM


# -- the parent dies -------------------------------------------------------------------------------

_PARENT = """
import sys, threading, time
from tests.remote.helpers import request
from tokenflow.config import ServingConfig
from tokenflow.executor.remote import RemoteExecutor

def say(fraction, text):
    print(text.split()[-1], flush=True)

def serve():
    config = ServingConfig(engine="scripted", scripted_step_s=0.01)
    executor = RemoteExecutor(config, say if sys.argv[1] == "slow_load" else None,
                              factory="tests.remote.engines:" + sys.argv[1])
    if sys.argv[2] == "busy":
        executor.enqueue_requests([request(1_000_000)] * 4)
        executor.await_responses()
    print(executor.pid, flush=True)

thread = threading.Thread(target=serve)
thread.start()
thread.join()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "phase"), [("counting", "idle"), ("counting", "busy"), ("slow_load", "loading")]
)
def test_kill_of_the_parent_ends_the_engine(kind: str, phase: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, kind, phase], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(pid))


_PARENT_WITHOUT_CHANNEL = """
import os, subprocess, sys, time
from tokenflow.executor.process import child_environment, python_executable
child = subprocess.Popen(
    [python_executable(), "-m", "tokenflow.executor.host", "--fd", sys.argv[1],
     "--parent-pid", str(os.getpid())],
    env=child_environment(os.environ, 0), pass_fds=(int(sys.argv[1]),))
print(child.pid, flush=True)
time.sleep(600)
"""


def test_kernel_kills_the_host_even_when_the_channel_stays_open() -> None:
    """Somebody else holds the proxy's end: only the kernel's signal can tell."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            parent = subprocess.Popen(
                [sys.executable, "-c", _PARENT_WITHOUT_CHANNEL, str(theirs.fileno())],
                stdout=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                text=True,
            )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parameters = format_parameters(ServingConfig(engine="scripted"))
        ours.sendall(encode(Setup(parameters, "tests.remote.engines:slow_load", 4)))
        assert ours.recv(1 << 16)  # the first progress: it is loading
        parent.kill()
        parent.wait()
        parent.stdout.close()
        wait_until(lambda: not is_running(pid))


def test_host_started_by_a_parent_that_is_gone_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.run(
            _host_command(theirs.fileno(), 1),
            env=child_environment(os.environ, 0),
            pass_fds=(theirs.fileno(),),
            timeout=LIMIT_S,
        )
        assert child.returncode == EXIT_PARENT_GONE
