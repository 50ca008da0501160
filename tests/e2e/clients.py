"""Small clients for a running server: one gRPC stream, HTTP generate, metrics, processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.utils as triton_numpy

from perf.long_runs.server_processes import descendants as descendants
from perf.long_runs.server_processes import is_alive as is_alive
from perf.long_runs.server_processes import read_metrics
from perf.long_runs.server_processes import shm_files as shm_files
from triton_backend.launcher import TritonServer

MODEL = "ensemble"
_TIMEOUT_S = 60.0
_TYPES = {
    "text_input": "BYTES", "stop_words": "BYTES", "bad_words": "BYTES", "max_tokens": "INT32",
    "stream": "BOOL", "stop": "BOOL", "ack_tokens": "INT32", "end_id": "INT32", "top_k": "INT32",
    "temperature": "FP32", "top_p": "FP32", "read_rate": "FP32", "priority": "FP32",
    "seed": "UINT64", "return_log_probs": "BOOL", "return_num_output_tokens": "BOOL",
    "return_num_input_tokens": "BOOL", "repetition_penalty": "FP32", "pause": "BOOL",
    "resume": "BOOL", "runtime_top_p_decay": "FP32", "random_seed": "UINT64",
}  # fmt: skip
_NUMPY = {"BYTES": object, "INT32": np.int32, "BOOL": bool, "FP32": np.float32, "UINT64": np.uint64}


@dataclass
class Answer:
    """Everything one request got. error: the message of the error that ended it."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    receipt_times: list[float] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(response.get("text_output", "") for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """What the responses that came say that they hold; several tokens may gather in one."""
        return sum(response.get("num_output_tokens", 0) for response in self.responses)

    @property
    def finish_reason(self) -> str | None:
        return next((r["finish_reason"] for r in self.responses if "finish_reason" in r), None)


def make_input(name: str, value: object) -> Any:
    """A tensor of the input's type, or of that of an array."""
    if isinstance(value, np.ndarray):
        kind = triton_numpy.np_to_triton_dtype(value.dtype)
        tensor = triton_grpc.InferInput(name, list(value.shape), kind)
        tensor.set_data_from_numpy(value)
        return tensor
    kind = _TYPES[name]
    values = value if isinstance(value, list) else [value]
    data = [v.encode() if isinstance(v, str) else v for v in values]
    array = np.array([data], dtype=_NUMPY[kind])
    tensor = triton_grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


class GrpcStream:
    """One gRPC stream with any number of requests on it; use as a context manager."""

    def __init__(
        self,
        server: TritonServer,
        *,
        stream_timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """stream_timeout: seconds after which the client gives the stream up, with all on it."""
        self._client = triton_grpc.InferenceServerClient(server.grpc_url)
        self._arrived: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
        self._client.start_stream(
            lambda result, error: self._arrived.put((time.monotonic(), result, error)),
            stream_timeout=stream_timeout,
            headers=dict(headers or {}),
        )

    def send(
        self,
        request_id: str = "",
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        empty_final: bool = True,
        timeout: int | None = None,
        **inputs: object,
    ) -> None:
        self._client.async_stream_infer(
            MODEL,
            [make_input(name, value) for name, value in inputs.items()],
            request_id=request_id,
            outputs=[triton_grpc.InferRequestedOutput(name) for name in outputs] or None,
            parameters=dict(parameters or {}),
            enable_empty_final_response=empty_final,
            timeout=timeout,
        )

    def next(self, timeout_s: float = _TIMEOUT_S) -> tuple[str, float, dict[str, Any], bool, Any]:
        """(id, receipt time, outputs, final flag, error) of the next response."""
        when, result, error = self._arrived.get(timeout=timeout_s)
        if error is not None:
            return "", when, {}, True, error
        response = result.get_response()
        outputs = {}
        for output in response.outputs:
            value = result.as_numpy(output.name).reshape(-1).tolist()
            plain = [v.decode() if isinstance(v, bytes) else v for v in value]
            outputs[output.name] = plain if output.name == "output_log_probs" else plain[0]
        flag = response.parameters.get("triton_final_response")
        return response.id, when, outputs, bool(flag and flag.bool_param), None

    def collect(
        self, num_requests: int = 1, *, until: Callable[[dict[str, Answer]], bool] | None = None
    ) -> dict[str, Answer]:
        """Read until `num_requests` finals (or errors) came, or `until` says so; by request id."""
        answers: dict[str, Answer] = {}
        num_ended = 0
        while num_ended < num_requests:
            request_id, when, outputs, final, error = self.next()
            answer = answers.setdefault(request_id, Answer())
            if error is not None:
                answer.error = error.message()
            else:
                answer.responses.append(outputs)
                answer.receipt_times.append(when)
                answer.finals.append(final)
            num_ended += final
            if until is not None and until(answers):
                break
        return answers

    def ask(self, **inputs: Any) -> Answer:
        """One request to its end."""
        self.send(inputs.pop("request_id", ""), **inputs)
        (answer,) = self.collect().values()
        return answer

    def is_silent(self, seconds: float) -> bool:
        """True when nothing more comes."""
        with contextlib.suppress(queue.Empty):
            self._arrived.get(timeout=seconds)
            return False
        return True

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, kind: object, *args: object) -> None:
        # Not cancelled after a good end: a cancel that crosses the server's work on the last
        # response can make this Triton keep the model referenced, and its exit then times out.
        self.close(cancel=kind is not None)


def post(server: TritonServer, route: str, body: object) -> tuple[int, str]:
    """POST to generate or generate_stream; (status, body)."""
    return post_to(server, MODEL, route, body)


def post_to(server: TritonServer, model: str, route: str, body: object) -> tuple[int, str]:
    """The same for another model."""
    with open_post(server, route, body, model=model) as response:
        return response.status, response.read().decode("utf-8", "strict")


@contextlib.contextmanager
def open_post(
    server: TritonServer, route: str, body: object, *, model: str = MODEL
) -> Iterator[http.client.HTTPResponse]:
    """The response as soon as its head is there; leaving closes the connection."""
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", f"/v2/models/{model}/{route}", data)
        yield connection.getresponse()
    finally:
        connection.close()


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON objects of an SSE body."""
    lines = [line for line in body.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def metric(server: TritonServer, name: str, **labels: str) -> float:
    """One value of /metrics, by its labels besides model and version."""
    own = ",".join(f'{key}="{value}"' for key, value in labels.items())
    values = read_metrics(server)
    assert (name, own) in values, f"no metric {name} {labels}"
    return values[name, own]


def num_active(server: TritonServer) -> float:
    """Unfinished requests in the server."""
    states = ("running", "waiting", "paused")
    return sum(metric(server, "tokenflow_active_requests", state=state) for state in states)


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until `condition` holds; fails when it does not within a minute, which
    on a machine of any speed is a hang."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.02)
