"""How requests and servers end: disconnect, stop, overload, shutdown, lost server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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


def test_http_disconnect_cancels(alive: TritonServer) -> None:
    before = metric(alive, "tokenflow_requests_total", outcome="cancelled")
    for _ in range(3):
        with open_post(alive, "generate_stream", LONG) as response:
            for _ in range(6):
                response.readline()
    assert wait_until(lambda: num_active(alive) == 0) < 2.0
    assert metric(alive, "tokenflow_requests_total", outcome="cancelled") == before + 3


def test_grpc_disconnect_cancels_running_and_waiting(alive: TritonServer) -> None:
    before = metric(alive, "tokenflow_requests_total", outcome="cancelled")
    stream = GrpcStream(alive)
    for _ in range(8):
        stream.send(**LONG)
    stream.collect(10**6, until=lambda answers: len(answers[""].responses) > 8)
    stream.close(cancel=True)
    assert wait_until(lambda: num_active(alive) == 0) < 2.0
    assert metric(alive, "tokenflow_requests_total", outcome="cancelled") == before + 8


def test_stop_request_ends_the_stream_of_its_id(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("job-7", **LONG, outputs=OUTPUTS)
        stream.send("job-8", **{**LONG, "max_tokens": 60}, outputs=OUTPUTS)
        stream.collect(10**6, until=lambda a: len(a.get("job-7", a[next(iter(a))]).responses) > 4)
        sent = time.monotonic()
        stop = other.ask(request_id="job-7", stop=True)
        answers = stream.collect(2)
        ended = answers["job-7"]
        assert (stop.error, stop.responses) == (None, [{}])
        assert ended.finish_reason == "cancelled"
        assert ended.finals.count(True) == 1
        assert ended.receipt_times[-1] - sent < 1.0
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
    server = other_server.start(max_queue_size=2, max_batch_size=1, scripted_step_s=0.02)

    def one(number: int) -> tuple[int, str]:
        return post(server, "generate", {"text_input": "x", "max_tokens": 20, "end_id": -1})

    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(one, range(10)))
    refused = [text for status, text in replies if status != 200]
    assert 4 <= len(refused) <= 8
    assert all("overloaded" in json.loads(text)["error"] for text in refused)
    assert metric(server, "tokenflow_requests_overloaded_total") == len(refused)
    assert one(0)[0] == 200  # and afterwards it serves again


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
    server = other_server.start(exit_timeout_s=20, max_batch_size=2)
    pids = [server.pid or 0, *descendants(server.pid or 0)]
    body = {**LONG, "max_tokens": 60, "read_rate": 3}
    clients = [in_background(post, server, "generate_stream", body) for _ in range(4)]
    wait_until(lambda: num_active(server) == 4)
    code = server.stop()
    for thread, results in clients:
        thread.join(5)
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
    assert time.monotonic() - start < 9.0
    thread.join(5)
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
    assert wait_until(lambda: not [p for p in pids if is_alive(p)], 8.0) < 6.0
    thread.join(5)
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
    assert wait_until(lambda: not [p for p in pids if is_alive(p)], 12.0) < 10.0
    server.stop()
    assert not shm_files(server.shm_prefix)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("decoupled: true", "decoupled: false", "must say decoupled: true"),
        ('key: "dtype"', 'key: "dtipe"', "dtipe: unknown parameter"),
        ("guaranteed_no_evict", "whatever", "batch_scheduler_policy: must be one of"),
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
        server.wait_ready(30)


def test_missing_tokenizer_is_said_at_start(other_server: Factory, tmp_path: Path) -> None:
    server = other_server.make(tokenizer_dir=str(tmp_path / "none"))
    server.start()
    with pytest.raises(LaunchError, match=r"tokenizer_dir: .*tokenizer\.json does not exist"):
        server.wait_ready(30)
