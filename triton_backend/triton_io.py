"""Triton's Python objects on one side, plain values on the other.

Owns every use of `triton_python_backend_utils`, which exists only inside the server's stub. A
`TritonChannel` keeps the response sender of one request and nothing else of it. The stub adds most
of the module's names only after it has imported the model, so they are looked up when used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from tokenflow.errors import InvalidRequestError
from triton_backend.fields import Tensor
from triton_backend.metrics_export import MetricKinds
from triton_backend.responses import Array
from triton_backend.stream import ErrorCode


class TritonChannel:
    """senders.Channel over a response sender of a decoupled model."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, outputs: Sequence[tuple[str, Array]], *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs]
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        if final:
            self._sender.send(response, flags=_final_flag())
        else:
            self._sender.send(response)

    def fail(self, message: str, code: ErrorCode) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code.value))
        self._sender.send(pb_utils.InferenceResponse(error=error), flags=_final_flag())

    def close(self) -> None:
        self._sender.send(flags=_final_flag())

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A Triton request as plain values; arrays may be views of shared memory.

    parameters: the request's, with `timeout` (microseconds) also where Triton took it out of them,
    as it does for gRPC but not for HTTP generate.
    """

    request_id: str
    tensors: dict[str, Tensor]
    parameters: dict[str, object]
    requested_outputs: tuple[str, ...]


def read_request(request: Any) -> RawRequest:
    """Take a request apart. Raises InvalidRequestError for what is not on the host or no JSON."""
    tensors = {}
    for tensor in request.inputs():
        name = tensor.name()
        if not tensor.is_cpu():
            raise InvalidRequestError(name, "must be in host memory")
        tensors[name] = tensor.as_numpy()
    try:
        parameters = json.loads(request.parameters() or "{}")
    except ValueError:
        raise InvalidRequestError("parameters", "cannot be read") from None
    timeout_us = request.timeout()  # 0 without one
    if timeout_us:
        parameters["timeout"] = timeout_us
    return RawRequest(
        request_id=request.request_id(),
        tensors=tensors,
        parameters=parameters,
        requested_outputs=tuple(request.requested_output_names()),
    )


def _final_flag() -> Any:
    return pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def metric_kinds() -> MetricKinds:
    """What MetricsExporter makes its metrics from."""
    family = pb_utils.MetricFamily
    return MetricKinds(
        family=family,
        gauge=family.GAUGE,
        counter=family.COUNTER,
        histogram=family.HISTOGRAM,
    )
