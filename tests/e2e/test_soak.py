"""Short forms of the long runs: every kind of request at once, crowds, and clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perf.slow_readers import ReadersPlan, read_slowly, readers_config
from perf.soak import Limits, SoakPlan, find_growth, format_report, run_soak, soak_config
from tests.e2e.clients import (
    GrpcStream,
    events_of,
    metric,
    num_active,
    open_post,
    post,
    post_to,
    shm_files,
    wait_until,
)
from tests.e2e.test_requests import expected_text
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")
REQUEST: dict[str, Any] = {"text_input": "hello", "stream": True, "end_id": -1, "outputs": OUTPUTS}
HTTP = {name: value for name, value in REQUEST.items() if name != "outputs"}
SHORT_SOAK = SoakPlan(num_requests=720, num_rounds=4)
SHORT_LIMITS = Limits(rss_share=0.1, count=4)  # it ends while buffers still find their size
CROWD = ReadersPlan(num_readers=12, num_tokens=100, num_slots=4, rate=5.0)
MAX_QUEUE_SIZE = CROWD.num_readers - CROWD.num_slots


def start_server(config: ServingConfig, folder: Path) -> TritonServer:
    server = TritonServer(
        render_repository(config, folder / "repository"),
        log_path=folder / "server.log",
        exit_timeout_s=3,
    )
    server.start()
    return server


def stop_server(server: TritonServer) -> None:
    log = server.log_path.read_text()
    server.stop(timeout_s=0.0)  # how servers end is for other tests
    assert not shm_files(server.shm_prefix)
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :]


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("soaked")
    server = start_server(soak_config(folder), folder)
    try:
        server.wait_ready(90)
        yield server
    finally:
        stop_server(server)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, Path]]:
    """A server with four slots and room for eight more, and its trace file."""
    folder = tmp_path_factory.mktemp("crowd")
    trace_path = folder / "trace.jsonl"
    config = readers_config(
        folder,
        CROWD,
        trace_path,
        max_queue_size=MAX_QUEUE_SIZE,
        max_tokens_in_paged_kv_cache=4096,
    )
    add_wrapper(folder / "repository")
    server = start_server(config, folder)
    try:
        server.wait_ready(90)
        yield server, trace_path
    finally:
        stop_server(server)


def test_hundreds_of_requests_of_every_kind_leave_nothing(soaked: TritonServer) -> None:
    report = run_soak(soaked, SHORT_SOAK)
    growth = find_growth(report.samples, SHORT_LIMITS)
    text = format_report(report, growth)
    assert (report.faults, growth) == ([], []), text
    assert report.metrics['pauses_total kind="planned"'] > 100, text
    assert min(report.num_of_kind.values()) > 0, text


def test_a_slot_is_free_when_all_is_generated_not_when_it_is_read(
    crowd: tuple[TritonServer, Path],
) -> None:
    report = asyncio.run(read_slowly(*crowd, CROWD))
    assert report.faults == []
    assert report.share_read < 0.5
    assert statistics.median(report.gaps_s) < 0.05


def test_a_crowd_beyond_slots_and_queue_is_refused_at_once(
    crowd: tuple[TritonServer, Path],
) -> None:
    server, _ = crowd
    wait_until(lambda: num_active(server) == 0)
    num_calls, num_places = 64, CROWD.num_readers
    body = {**HTTP, "text_input": "1", "stream": False, "max_tokens": 200}

    def call(_: int) -> tuple[int, str, float, float]:
        start = time.monotonic()
        status, text = post(server, "generate", body)
        end = time.monotonic()
        return status, text, end, end - start

    with ThreadPoolExecutor(num_calls) as pool:
        answers = list(pool.map(call, range(num_calls)))
    refused = [answer[1:] for answer in answers if answer[0] != 200]
    served_times = [end for status, _, end, _ in answers if status == 200]
    assert all("overloaded" in text for text, _, _ in refused)
    assert max(took_s for *_, took_s in refused) < 1.0
    assert len(served_times) >= num_places
    if max(end for _, end, _ in refused) < min(served_times):  # all came while none had ended
        assert len(served_times) == num_places
    wait_until(lambda: num_active(server) == 0)


def test_an_id_is_free_again_with_its_last_response(crowd: tuple[TritonServer, Path]) -> None:
    server, _ = crowd
    with GrpcStream(server) as stream:
        for _ in range(200):
            answer = stream.ask(request_id="t", **{**REQUEST, "text_input": "1"}, max_tokens=1)
            assert (answer.error, answer.text) == (None, "2")


def test_controls_from_other_threads_than_the_senders(crowd: tuple[TritonServer, Path]) -> None:
    server, _ = crowd
    ids = [str(number) for number in range(4)]
    errors: list[str] = []

    def disturb(request_id: str) -> None:
        with GrpcStream(server) as other:
            for _ in range(50):
                for action in ("pause", "resume"):
                    error = other.ask(request_id=request_id, **{action: True}).error
                    if error is not None:
                        errors.append(error)
            other.ask(request_id=request_id, stop=True)

    with GrpcStream(server) as stream:
        for request_id in ids:
            stream.send(request_id, **{**REQUEST, "text_input": "1"}, max_tokens=200)
        stream.collect(10**6, until=lambda a: len(a) == len(ids))
        threads = [threading.Thread(target=disturb, args=(request_id,)) for request_id in ids]
        for thread in threads:
            thread.start()
        answers = stream.collect(len(ids))
        for thread in threads:
            thread.join()
        assert {a.finish_reason for a in answers.values()} <= {"cancelled", "length"}
    assert all("no unfinished request" in error for error in errors), errors
    wait_until(lambda: num_active(server) == 0)


def test_a_model_that_calls_this_one_may_stop_it_early(crowd: tuple[TritonServer, Path]) -> None:
    server, _ = crowd
    for index in range(20):
        body = {"text_input": "5", "id": str(index), "drain": index % 2 == 0}
        status, text = post_to(server, "wrapper", "generate", body)
        assert status == 200
        numbers = json.loads(text)["text_output"].split(" ")
        assert len(numbers) >= 10  # a response may hold several tokens
        assert numbers == [str(6 + position) for position in range(len(numbers))]
    wait_until(lambda: num_active(server) == 0)
    wait_until(lambda: metric(server, "tokenflow_kv_blocks", state="used") == 0)


def test_streams_that_are_closed_while_tokens_flow(alive: TritonServer) -> None:
    before = metric(alive, "tokenflow_output_tokens_total")
    num_heard = itertools.count()

    def leave(_: int) -> None:
        with open_post(alive, "generate_stream", {**HTTP, "max_tokens": 500}) as response:
            num_events = 0
            while num_events < 3:
                if response.readline().startswith(b"data: "):
                    num_events += 1
                    next(num_heard)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(leave, range(20)))
    wait_until(lambda: num_active(alive) == 0)
    wait_until(lambda: metric(alive, "tokenflow_active_requests", state="running") == 0)
    generated = metric(alive, "tokenflow_output_tokens_total") - before
    # The server looks for clients that left every 50 ms, some five steps; then one or two more.
    unheard = generated - next(num_heard)
    assert unheard < 20 * 40, "they went on"


def test_the_next_turn_after_one_that_was_left(alive: TritonServer, tokenizer_dir: Path) -> None:
    """A conversation is its text: the third turn knows what its prompt says, and no more."""
    turn = {**HTTP, "text_input": "a" * 200, "max_tokens": 48}
    first = "".join(e["text_output"] for e in events_of(post(alive, "generate_stream", turn)[1]))
    before = metric(alive, "tokenflow_output_tokens_total")
    history = turn["text_input"] + first
    second = {**turn, "text_input": history + "b", "max_tokens": 200}
    with open_post(alive, "generate_stream", second) as response:
        assert response.readline().startswith(b"data: ")
    third = {**turn, "text_input": history + "c", "max_tokens": 20}
    events = events_of(post(alive, "generate_stream", third)[1])
    text = "".join(event["text_output"] for event in events)
    assert text == expected_text(tokenizer_dir, history + "c", 20)
    wait_until(lambda: num_active(alive) == 0)
    second_tokens = metric(alive, "tokenflow_output_tokens_total") - before - 20
    assert second_tokens < 200, "the turn that was left went on to its end"


WRAPPER = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Passes on ten responses of `ensemble` and stops it then."""

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        text_input = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        drain = pb_utils.get_input_tensor_by_name(request, "drain").as_numpy().any()
        request_id = "wrapped-" + request.request_id()
        tensors = {
            "text_input": text_input,
            "max_tokens": np.array([[200]], np.int32),
            "stream": np.array([[True]]),
            "end_id": np.array([[-1]], np.int32),
        }
        text, count = "", 0
        for response in self._call(request_id, tensors):
            output = pb_utils.get_output_tensor_by_name(response, "text_output")
            if output is None:
                continue
            count += 1
            if count <= 10:
                text += output.as_numpy().reshape(-1)[0].decode()
            if count == 10:
                list(self._call(request_id, {"stop": np.array([[True]])}))
                if not drain:
                    break
        output = pb_utils.Tensor("text_output", np.array([[text.encode()]], np.object_))
        return pb_utils.InferenceResponse([output])

    def _call(self, request_id, tensors):
        inputs = [pb_utils.Tensor(name, value) for name, value in tensors.items()]
        inner = pb_utils.InferenceRequest(
            model_name="ensemble", request_id=request_id, inputs=inputs,
            requested_output_names=["text_output"],
        )
        return inner.exec(decoupled=True)
'''
WRAPPER_CONFIG = """
name: "wrapper"
backend: "python"
max_batch_size: 1
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "drain" data_type: TYPE_BOOL dims: [ 1 ] }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def add_wrapper(repository: Path) -> None:
    """A second model, which calls the first one."""
    folder = repository / "wrapper"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(WRAPPER_CONFIG)
    (folder / "1" / "model.py").write_text(WRAPPER)
