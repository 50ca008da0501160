"""A real server whose engine dies, hangs and cannot be started again."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perf.kills import format_report
from perf.long_runs.kill_plan import SHORT_MOMENTS, KillPlan, Moment, Outcome
from perf.long_runs.kill_run import run_kills
from perf.long_runs.known_prompts import CountingPrompts, scripted_kill_config
from perf.long_runs.server_processes import ENGINE, find_process, find_processes
from tests.e2e.clients import (
    GrpcStream,
    descendants,
    is_alive,
    metric,
    num_active,
    post,
    shm_files,
    wait_until,
)
from tests.e2e.conftest import Factory
from tests.e2e.test_requests import expected_text
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")
REQUEST: dict[str, Any] = {"text_input": "hello", "stream": True, "end_id": -1, "outputs": OUTPUTS}
ERROR_LIMIT_S = 2.0


def kill_engine(server: TritonServer, number: int = signal.SIGKILL) -> int:
    pid = find_process(server, ENGINE)
    os.kill(pid, number)
    return pid


def wait_new_engine(server: TritonServer, old: int) -> None:
    wait_until(lambda: [pid for pid in find_processes(server, ENGINE) if pid != old] != [])
    wait_until(lambda: metric(server, "tokenflow_healthy") == 1)


def num_losses(server: TritonServer) -> float:
    return metric(server, "tokenflow_engine_losses_total")


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Path]]:
    """A server that makes good any number of losses, soon, and calls an engine stuck after 1 s;
    with its trace file."""
    folder = tmp_path_factory.mktemp("lossy")
    trace_path = folder / "trace.jsonl"
    config = scripted_kill_config(
        folder,
        trace_path,
        engine_stall_timeout_s=1.0,
        max_engine_restarts=1000,
        engine_restart_window_s=1.0,
        stats_check_period_ms=20,
    )
    server = TritonServer(
        render_repository(config, folder / "repository"),
        log_path=folder / "server.log",
        exit_timeout_s=5,
    )
    with server:
        pids = [server.pid or 0, *descendants(server.pid or 0)]
        yield server, trace_path
        pids += descendants(server.pid or 0)
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)
    assert "Traceback" not in (folder / "server.log").read_text()


def test_killed_engines_cost_no_stream_a_token(lossy: tuple[TritonServer, Path]) -> None:
    server, trace_path = lossy
    plan = KillPlan(duration_s=6.0, moments=SHORT_MOMENTS, seed=7)
    prompts = CountingPrompts(num_tokens=(30, 120), num_tokens_long=(150, 400))
    report = run_kills(server, trace_path, plan, prompts, exact=True)
    assert report.faults == [], format_report(report)
    assert report.outcomes[Outcome.COMPLETE] > plan.num_streams
    assert report.metrics["recovered_requests_total"] > 0
    assert [kill.moment for kill in report.kills] == list(SHORT_MOMENTS)
    for kill in report.kills:
        if kill.moment is not Moment.RESTART:
            assert kill.lost_time is not None
            assert kill.lost_time - kill.kill_time < ERROR_LIMIT_S


def test_an_engine_killed_while_nobody_asks_is_there_for_the_next(
    lossy: tuple[TritonServer, Path],
) -> None:
    server, _ = lossy
    wait_until(lambda: num_active(server) == 0)
    before = num_losses(server)
    old = kill_engine(server)
    with GrpcStream(server) as stream:
        # Whether the loss has been noticed yet or not, it waits for the next engine.
        answer = stream.ask(text_input="1 2 3", max_tokens=3, stream=True)
    assert answer.text == "4 5 6"
    wait_new_engine(server, old)
    assert num_losses(server) == before + 1


def test_a_stuck_engine_is_replaced_and_its_streams_go_on(
    lossy: tuple[TritonServer, Path],
) -> None:
    server, _ = lossy
    wait_until(lambda: metric(server, "tokenflow_healthy") == 1)
    before = num_losses(server)
    with GrpcStream(server) as stream:
        for number in range(4):
            stream.send(str(number), **{**REQUEST, "text_input": str(100 * number)}, max_tokens=60)
        answers = stream.collect(10**6, until=lambda a: len(a) == 4)
        old = kill_engine(server, signal.SIGSTOP)
        rest = stream.collect(4)
    for number in range(4):
        request_id = str(number)
        text = answers[request_id].text + rest[request_id].text
        assert text == " ".join(str(100 * number + 1 + index) for index in range(60))
        assert rest[request_id].finish_reason == "length"
    assert not is_alive(old)
    assert num_losses(server) == before + 1
    assert "engine_stall_timeout_s" in server.log_path.read_text()


def test_a_stream_held_by_its_client_survives_its_engine(
    lossy: tuple[TritonServer, Path],
) -> None:
    server, _ = lossy
    wait_until(lambda: metric(server, "tokenflow_healthy") == 1)
    with GrpcStream(server) as stream, GrpcStream(server) as other:
        stream.send("held", **{**REQUEST, "text_input": "7"}, max_tokens=80)
        first = stream.collect(10**6, until=lambda a: len(a["held"].responses) > 3)["held"]
        assert other.ask(request_id="held", pause=True).error is None
        old = kill_engine(server)
        wait_new_engine(server, old)
        with contextlib.suppress(queue.Empty):  # what was on its way
            while True:
                _, _, outputs, final, error = stream.next(0.2)
                assert (final, error) == (False, None)
                first.responses.append(outputs)
        assert metric(server, "tokenflow_held_requests") == 1
        assert other.ask(request_id="held", resume=True).error is None
        rest = stream.collect()["held"]
    assert first.text + rest.text == " ".join(str(8 + index) for index in range(80))


def test_a_second_loss_ends_a_request_with_an_error_worth_a_retry(
    lossy: tuple[TritonServer, Path],
) -> None:
    server, _ = lossy
    wait_until(lambda: metric(server, "tokenflow_healthy") == 1)
    with GrpcStream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.send("twice", **{**REQUEST, "text_input": "7"}, max_tokens=400)
        for _ in range(2):
            serving_time = time.monotonic()
            when = 0.0
            while when < serving_time:  # of the engine that serves now
                _, when, *_, error = stream.next()
                assert error is None
            old = kill_engine(server)
            kill_time = time.monotonic()
            wait_new_engine(server, old)
        while error is None:
            *_, error = stream.next()
        error_s = time.monotonic() - kill_time
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert "the engine was lost a second time" in error.message()
    assert error_s < ERROR_LIMIT_S


def test_a_kind_that_cannot_be_continued_ends_with_a_clear_error(
    lossy: tuple[TritonServer, Path],
) -> None:
    server, _ = lossy
    wait_until(lambda: metric(server, "tokenflow_healthy") == 1)
    with GrpcStream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.send(**REQUEST, max_tokens=400, top_p=0.9, runtime_top_p_decay=0.9)
        stream.next()
        kill_engine(server)
        kill_time = time.monotonic()
        error = None
        while error is None:
            *_, error = stream.next()
        error_s = time.monotonic() - kill_time
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert "cannot be continued (top_p decay" in error.message()
    assert error_s < ERROR_LIMIT_S


def test_an_engine_killed_during_shutdown_does_not_keep_the_server(other_server: Factory) -> None:
    """While the server lets streams finish, and while it unloads the model."""
    draining, unloading = (other_server.start(exit_timeout_s=10) for _ in range(2))
    servers = (draining, unloading)
    engines = {server: find_process(server, ENGINE) for server in servers}
    pids = [pid for s in servers for pid in (s.pid or 0, *descendants(s.pid or 0))]
    stream = GrpcStream(draining)
    stream.send(**REQUEST, max_tokens=150)
    stream.next()
    with ThreadPoolExecutor(2) as pool:
        stops = [pool.submit(server.stop) for server in servers]
        wait_until(lambda: "Waiting for in-flight requests" in draining.log_path.read_text())
        os.kill(engines[draining], signal.SIGKILL)
        wait_until(lambda: "tokenflow INFO unloading" in unloading.log_path.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(engines[unloading], signal.SIGKILL)
        answer = stream.collect()[""]
        stream.close()
        assert [stop.result() for stop in stops] == [0, 0]
    assert answer.finish_reason == "length"  # it was resumed on a new engine and could finish
    assert not [pid for pid in pids if is_alive(pid)]
    for server in servers:
        assert not shm_files(server.shm_prefix)
        log = server.log_path.read_text()
        assert "tokenflow INFO unloaded" in log
        assert "Traceback" not in log


def test_too_many_losses_make_the_server_unhealthy_and_say_so(other_server: Factory) -> None:
    server = other_server.start(max_batch_size=2, max_engine_restarts=1)
    with GrpcStream(server) as stream:
        for number in range(4):  # two run, two wait
            stream.send(str(number), **REQUEST, max_tokens=400, read_rate=100.0)
        old = kill_engine(server)
        wait_new_engine(server, old)
        wait_until(lambda: metric(server, "tokenflow_active_requests", state="running") == 2)
        old = kill_engine(server)
        kill_time = time.monotonic()
        errors: list[str] = []
        while len(errors) < 4:
            *_, error = stream.next()
            if error is not None:
                errors.append(error.message())
        assert time.monotonic() - kill_time < ERROR_LIMIT_S
        assert all("engine" in message for message in errors), errors
        assert stream.is_silent(0.3)
    assert not is_alive(old)
    wait_until(lambda: metric(server, "tokenflow_healthy") == 0)
    expect_unhealthy(server, "lost 2 times within 300 s")
    assert metric(server, "tokenflow_requests_total", outcome="failed") >= 4
    # This Triton cannot ask the model: its own endpoints stay what they are.
    assert get_status(server, "/v2/health/ready") == 200
    assert get_status(server, "/v2/health/live") == 200


def test_an_engine_that_cannot_be_started_again_is_tried_again_then_given_up(
    other_server: Factory, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Its tokenizer is spoiled; repaired in time, everything goes on."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    file, text = folder / "tokenizer.json", (folder / "tokenizer.json").read_text()
    server = other_server.start(tokenizer_dir=str(folder), max_engine_restarts=3)
    with GrpcStream(server) as stream:
        stream.send("one", **REQUEST, max_tokens=60)
        first = stream.collect(10**6, until=lambda a: len(a["one"].responses) > 3)["one"]
        file.write_text("{}")
        kill_engine(server)
        wait_until(lambda: "could not be started" in server.log_path.read_text())
        assert metric(server, "tokenflow_healthy") == 0
        file.write_text(text)
        rest = stream.collect()["one"]
        assert first.text + rest.text == expected_text(tokenizer_dir, "hello", 60)
        wait_until(lambda: metric(server, "tokenflow_healthy") == 1)
        file.write_text("{}")
        kill_engine(server)
        reason = "could not be started: tokenizer_dir: "
        wait_until(lambda: "is not started again" in server.log_path.read_text())
    wait_until(lambda: metric(server, "tokenflow_healthy") == 0)
    expect_unhealthy(server, reason)


def expect_unhealthy(server: TritonServer, reason: str) -> None:
    """A request through the model is refused at once, as unavailable, with the reason."""
    with GrpcStream(server, headers={"triton_grpc_error": "true"}) as stream:
        start = time.monotonic()
        stream.send(**REQUEST, max_tokens=2)
        *_, error = stream.next()
        assert time.monotonic() - start < ERROR_LIMIT_S
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert error.message().startswith("unhealthy: ")
    assert reason in error.message()
    status, text = post(server, "generate", {"text_input": "x", "max_tokens": 2})
    assert status != 200
    assert '"unhealthy: ' in text


def get_status(server: TritonServer, path: str) -> int:
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
