"""A Triton model that others might have written, on the double of TensorRT-LLM's bindings."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from tests.e2e.clients import descendants, is_alive, metric, shm_files, wait_until
from tests.trtllm_double.__main__ import link_into
from tests.trtllm_double.folder import Behind, write_engine
from triton_backend.launcher import TritonServer

MODEL = Path(__file__).parents[1] / "trtllm" / "standin_model"
VOCAB, MAX_SEQ_LEN, STEP_S = 256, 512, 0.005


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("standin")
    engine = write_engine(
        folder / "engine", Behind(vocab_size=VOCAB, step_s=STEP_S), max_seq_len=MAX_SEQ_LEN
    )
    version = folder / "repository" / "standin" / "1"
    version.mkdir(parents=True)
    config = (MODEL / "config.pbtxt").read_text().replace('"ENGINE"', f'"{engine}"')
    (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").write_text((MODEL / "1" / "model.py").read_text())
    link_into(version)
    server = TritonServer(folder / "repository", log_path=folder / "server.log", exit_timeout_s=5)
    with server:
        pids = [server.pid or 0, *descendants(server.pid or 0)]
        yield server
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)
    log = (folder / "server.log").read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :]
    assert "hazard" not in log


class Stream:
    """One gRPC stream. Responses as (request id, outputs, final flag, error)."""

    def __init__(self, server: TritonServer) -> None:
        self._client = triton_grpc.InferenceServerClient(server.grpc_url)
        self._arrived: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(self, request_id: str = "", **inputs: Any) -> None:
        tensors = []
        for name, value in inputs.items():
            array = np.asarray(value)
            tensor = triton_grpc.InferInput(
                name, list(array.shape), np_to_triton_dtype(array.dtype)
            )
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        self._client.async_stream_infer(
            "standin", tensors, request_id=request_id, enable_empty_final_response=True
        )

    def next(self) -> tuple[str, dict[str, Any], bool, str | None]:
        result, error = self._arrived.get(timeout=30)
        if error is not None:
            return "", {}, True, error.message()
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        flag = response.parameters.get("triton_final_response")
        return response.id, outputs, bool(flag and flag.bool_param), None

    def collect(self) -> tuple[dict[int, list[int]], list[dict[str, Any]], str | None]:
        """To the final response: tokens by row, all responses, the error."""
        rows: dict[int, list[int]] = {}
        responses = []
        while True:
            _, outputs, final, error = self.next()
            if outputs:
                responses.append(outputs)
                row = int(outputs["batch_index"].item())
                rows.setdefault(row, []).extend(outputs["output_ids"].reshape(-1).tolist())
            if final:
                return rows, responses, error

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@pytest.fixture
def stream(server: TritonServer) -> Iterator[Stream]:
    stream = Stream(server)
    yield stream
    stream.close()


def prompt(*rows: list[int], max_tokens: int | list[int], **inputs: Any) -> dict[str, Any]:
    longest = max(len(row) for row in rows)
    lengths = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(rows)
    return {
        "input_ids": np.array([row + [0] * (longest - len(row)) for row in rows], np.int32),
        "input_lengths": np.array([[len(row)] for row in rows], np.int32),
        "request_output_len": np.array([[length] for length in lengths], np.int32),
        "streaming": np.ones((len(rows), 1), bool),
        **inputs,
    }


def gauge(server: TritonServer, of: str) -> float:
    return metric(server, "standin_engine", of=of)


def test_tokens_come_one_by_one(stream: Stream) -> None:
    stream.send("one", **prompt([5, 9], max_tokens=20))
    rows, responses, error = stream.collect()
    assert error is None
    assert rows == {0: list(range(10, 30))}
    assert len(responses) >= 20
    assert {tuple(r["sequence_length"].shape) for r in responses} == {(1, 1)}


def test_one_answer_for_who_does_not_stream(stream: Stream) -> None:
    inputs = prompt([5, 9], max_tokens=20, return_log_probs=np.array([[True]]))
    inputs["streaming"][:] = False
    stream.send(**inputs)
    rows, responses, _ = stream.collect()
    assert rows == {0: list(range(10, 30))}
    assert len(responses) == 1
    assert responses[0]["output_log_probs"].shape == (1, 1, 20)


def test_two_rows_are_two_requests_with_one_end(stream: Stream) -> None:
    stream.send(**prompt([5, 9], [100, 101, 102], max_tokens=[8, 30]))
    rows, _, error = stream.collect()
    assert error is None
    assert rows == {0: list(range(10, 18)), 1: list(range(103, 133))}


def test_what_was_computed_is_found_again(stream: Stream) -> None:
    whole = list(range(30, 130))
    want = np.array([[True]])
    for _ in range(2):
        stream.send(**prompt(whole, max_tokens=2, return_perf_metrics=want))
        _, responses, _ = stream.collect()
    assert int(responses[-1]["kv_cache_reused_blocks"].item()) >= 3


def test_stop_words_and_end_token(stream: Stream) -> None:
    words = np.array([[[12, 13, 40], [2, 3, -1]]], np.int32)
    stream.send(**prompt([5, 9], max_tokens=50, stop_words_list=words))
    assert stream.collect()[0] == {0: [10, 11, 12, 13]}, "a stop word is part of the output"
    stream.send(**prompt([5, 9], max_tokens=50, end_id=np.array([[14]], np.int32)))
    assert stream.collect()[0] == {0: [10, 11, 12, 13]}, "the end token is not"


def test_a_stop_request_ends_all_rows(stream: Stream) -> None:
    stream.send("long", **prompt([5, 9], [6, 50], max_tokens=400))
    for _ in range(6):
        assert stream.next()[2] is False
    stream.send("long", **prompt([1], max_tokens=1), stop=np.array([[True]]))
    finals, num_tokens = 0, 0
    while finals < 2:
        _, outputs, final, error = stream.next()
        assert error is None
        finals += final
        num_tokens += outputs["output_ids"].size if outputs else 0
    assert num_tokens < 400


def test_who_leaves_is_cancelled(server: TritonServer) -> None:
    stream = Stream(server)
    stream.send("gone", **prompt([5, 9], max_tokens=480))
    stream.next()
    wait_until(lambda: gauge(server, "num_active_requests") == 1)
    before = gauge(server, "iterations")
    stream.close(cancel=True)
    wait_until(lambda: gauge(server, "num_active_requests") == 0)
    assert gauge(server, "iterations") - before < 400


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (prompt([1] * 600, max_tokens=4), "Encountered an error when fetching new request"),
        (prompt([1, 2], max_tokens=0), "mMaxNewTokens > 0"),
        (prompt([1, 2], max_tokens=4, stop=np.array([[True]])), "needs the id"),
        (prompt([1, 2], max_tokens=4, end_id=np.array([[9999]], np.int32)), "end"),
    ],
)
def test_errors_reach_the_client(stream: Stream, inputs: dict[str, Any], message: str) -> None:
    stream.send("", **inputs)
    _, _, error = stream.collect()
    assert error is not None
    assert message in error


def test_many_streams_at_once(server: TritonServer) -> None:
    with contextlib.ExitStack() as stack:
        streams = [Stream(server) for _ in range(12)]
        for number, stream in enumerate(streams):
            stack.callback(stream.close)
            stream.send(str(number), **prompt([number, 10 * number], max_tokens=40))
        for number, stream in enumerate(streams):
            assert stream.collect()[0] == {0: [10 * number + 1 + i for i in range(40)]}
    wait_until(lambda: gauge(server, "num_active_requests") == 0)
