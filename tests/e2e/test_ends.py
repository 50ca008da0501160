"""How requests and servers end: disconnect, stop, overload, shutdown, lost server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import (
    GrpcStream,
    descendants,
    events_of,
    is_alive,
    metric,
    num_active,
    open_post,
    post,
    shm_files,
    wait_until,
)
from tests.e2e.conftest import Factory
from triton_backend.launcher import LaunchError, TritonServer

LONG = {"text_input": "x", "max_tokens": 400, "stream": True, "end_id": -1}
OUTPUTS = ("text_output", "num_output_tokens", "finish_reason")
STOP_LIMIT_S = 60.0


def num_cancelled(server: TritonServer) -> float:
    return metric(server, "tokenflow_requests_total", outcome="cancelled")


def test_http_disconnect_cancels(alive: TritonServer) -> None:
    before = num_cancelled(alive)
    for _ in range(3):
        with open_post(alive, "generate_stream", LONG) as response:
            for _ in range(6):
                response.readline()
    wait_until(lambda: num_cancelled(alive) == before + 3)
    wait_until(lambda: num_active(alive) == 0)


def test_grpc_disconnect_cancels_running_and_waiting(alive: TritonServer) -> None:
    before = num_cancelled(alive)
    stream = GrpcStream(alive)
    for _ in range(8):
        stream.send(**LONG)
    stream.collect(10**6, until=lambda answers: len(answers[""].responses) > 8)
    stream.close(cancel=True)
    wait_until(lambda: num_cancelled(alive) == before + 8)
    wait_until(lambda: num_active(alive) == 0)


def test_stop_request_ends_the_stream_of_its_id(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("job-7", **LONG, outputs=OUTPUTS)
        stream.send("job-8", **{**LONG, "max_tokens": 60}, outputs=OUTPUTS)
        stream.collect(10**6, until=lambda a: len(a.get("job-7", a[next(iter(a))]).responses) > 4)
        stop = other.ask(request_id="job-7", stop=True)
        answers = stream.collect(2)
        ended = answers["job-7"]
        assert (stop.error, stop.responses) == (None, [{}])
        assert ended.finish_reason == "cancelled"
        assert ended.finals.count(True) == 1
        assert answers["job-8"].finish_reason == "length"
        # Too late, unknown, twice: answered all the same.
        assert other.ask(request_id="job-7", stop=True).error is None
        assert other.ask(request_id="nobody", stop=True).error is None
        assert "request id" in (other.ask(stop=True).error or "")


def test_acknowledgements_are_answered(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("reader", **{**LONG, "max_tokens": 40}, outputs=OUTPUTS)
        for count in (0, 3, 2, 10**6):
            assert other.ask(request_id="reader", ack_tokens=count).error is None
        assert "ack_tokens" in (other.ask(request_id="reader", ack_tokens=-1).error or "")
        assert stream.collect()["reader"].finish_reason == "length"


def test_overload_is_an_error_worth_a_retry(other_server: Factory) -> None:
    server = other_server.start(max_queue_size=2, max_batch_size=1, scripted_step_s=0.05)
    body = {"text_input": "x", "max_tokens": 5, "end_id": -1}

    def num_in(state: str) -> float:
        return metric(server, "tokenflow_active_requests", state=state)

    stream = GrpcStream(server)
    stream.send(**LONG, read_rate=10_000.0)  # read too fast to be paused
    wait_until(lambda: num_in("running") == 1)
    for _ in range(2):
        stream.send(**LONG)
    wait_until(lambda: num_in("waiting") == 2)
    for _ in range(4):
        status, text = post(server, "generate", body)
        assert status != 200
        assert "overloaded" in json.loads(text)["error"]
    wait_until(lambda: metric(server, "tokenflow_requests_overloaded_total") == 4)
    stream.close(cancel=True)
    wait_until(lambda: num_active(server) == 0)
    assert post(server, "generate", body)[0] == 200  # and afterwards it serves again


def in_background(function: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_shutdown_lets_streams_in_flight_finish(other_server: Factory) -> None:
    server = other_server.start(exit_timeout_s=60, max_batch_size=2, scripted_step_s=0.03)
    pids = [server.pid or 0, *descendants(server.pid or 0)]
    body = {**LONG, "max_tokens": 60, "read_rate": 3}
    clients = [in_background(post, server, "generate_stream", body) for _ in range(4)]
    wait_until(lambda: num_active(server) == 4)
    code = server.stop()
    for thread, results in clients:
        thread.join(STOP_LIMIT_S)
        status, text = results[0]
        assert status == 200
        assert events_of(text)[-1]["finish_reason"] == "length"
    assert code == 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)
    assert "tokenflow INFO unloaded" in server.log_path.read_text()


def test_shutdown_does_not_wait_longer_than_the_exit_timeout(other_server: Factory) -> None:
    server = other_server.start(exit_timeout_s=1, scripted_step_s=0.5)
    pids = [server.pid or 0, *descendants(server.pid or 0)]
    thread, results = in_background(post, server, "generate_stream", LONG)
    wait_until(lambda: num_active(server) == 1)
    start = time.monotonic()
    server.stop(timeout_s=4.0)
    assert time.monotonic() - start < STOP_LIMIT_S, "it waited for a stream of 200 s"
    thread.join(STOP_LIMIT_S)
    assert results, "the client's connection ended"
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)


def test_a_killed_server_takes_stub_and_engine_with_it(other_server: Factory) -> None:
    server = other_server.start()
    pid = server.pid
    assert pid is not None
    pids = descendants(pid)
    thread, _ = in_background(post, server, "generate_stream", LONG)
    wait_until(lambda: num_active(server) == 1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not [p for p in pids if is_alive(p)])
    thread.join(STOP_LIMIT_S)
    assert server.stop() == -signal.SIGKILL
    assert not shm_files(server.shm_prefix)


def test_a_server_killed_while_idle_takes_stub_and_engine_with_it(other_server: Factory) -> None:
    """The stub hangs in its next call into the dead server, with the GIL held."""
    server = other_server.start()
    pid = server.pid
    assert pid is not None
    assert post(server, "generate", {"text_input": "x", "max_tokens": 2})[0] == 200
    pids = descendants(pid)
    assert len(pids) >= 3  # stub, engine, warden
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not [p for p in pids if is_alive(p)])
    server.stop()
    assert not shm_files(server.shm_prefix)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("decoupled: true", "decoupled: false", "must say decoupled: true"),
        ('key: "dtype"', 'key: "dtipe"', "dtipe: unknown parameter"),
        ('"auto"', '"whatever"', "batch_scheduler_policy: must be one of"),
    ],
)
def test_wrong_configuration_is_said_at_start(
    other_server: Factory, old: str, new: str, message: str
) -> None:
    server = other_server.make()
    file = server.repository / "ensemble" / "config.pbtxt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    server.start()
    with pytest.raises(LaunchError, match=message):
        server.wait_ready(90)


def test_missing_tokenizer_is_said_at_start(other_server: Factory, tmp_path: Path) -> None:
    server = other_server.make(tokenizer_dir=str(tmp_path / "none"))
    server.start()
    with pytest.raises(LaunchError, match=r"tokenizer_dir: .*tokenizer\.json does not exist"):
        server.wait_ready(90)
