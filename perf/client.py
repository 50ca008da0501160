"""Streaming clients: play a workload against a server and note when every token came.

`python -m perf.client PLAN.json` runs in a process of its own, one thread, so that measuring does
not share an interpreter with anything else. Open loop: each request is sent at its time whatever
the others do, on a gRPC stream of its own. It reads the plan, prints one JSON progress line every
half second and writes the record.

Invariants: all instants are CLOCK_MONOTONIC, taken when the response reached Python; every token of
a request is counted once and its index checked; a request ends in `finish_reason` or in `error`,
never in neither; `lags` holds each time this process itself was late, so that a gap can be told
from a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perf.workloads import ClientRequest

MODEL_NAME = "ensemble"
OUTPUTS = ("text_output", "num_output_tokens", "finish_reason", "token_index")
_PROGRESS_S = 0.5
# A wake-up that comes this late counts as lag of the machine, not of the server.
LAG_S = 0.02
_LAG_PERIOD_S = 0.02


@dataclass(kw_only=True)
class ClientRecord:
    """What one client saw. token_times: receipt instant of each token, in order."""

    request_id: str
    kind: str
    read_rate: float
    max_tokens: int
    num_prompt_tokens: int
    send_time: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: str | None = None


@dataclass(kw_only=True)
class WorkloadRecord:
    """A played workload. lags: [instant, seconds late] of this process; cpu_s: its
    own CPU time, None where another program played it."""

    start_time: float
    end_time: float
    cpu_s: float | None
    clients: list[ClientRecord]
    lags: list[tuple[float, float]]


@dataclass(kw_only=True)
class Plan:
    """What the process is told: where, what, and where to write the record."""

    url: str
    record_path: str
    timeout_s: float
    requests: list[ClientRequest]


class ProtocolError(Exception):
    """The server's answer breaks what it promises (a token twice, missing, or out of order)."""


def take_response(record: ClientRecord, outputs: dict[str, Any], now: float) -> None:
    """Count one response's tokens into `record`.

    outputs: text_output str, num_output_tokens int, token_index int, finish_reason str; those that
    the server left out are absent. Raises ProtocolError when `token_index` does not continue the
    tokens counted so far.
    """
    num_tokens = int(outputs.get("num_output_tokens", 0))
    if num_tokens:
        expected = len(record.token_times)
        index = outputs.get("token_index")
        if index != expected:
            raise ProtocolError(f"token_index {index}, expected {expected}")
        record.token_times.extend([now] * num_tokens)
    record.text += outputs.get("text_output", "")
    record.finish_reason = outputs.get("finish_reason", "") or record.finish_reason


def read_outputs(result: Any) -> dict[str, Any]:
    """The outputs of one tritonclient result as plain values; absent ones are left out."""
    outputs: dict[str, Any] = {}
    for name in OUTPUTS:
        array = result.as_numpy(name)
        if array is None or not array.size:
            continue
        value = array.reshape(-1)[0]
        outputs[name] = value.decode() if isinstance(value, bytes) else int(value)
    return outputs


def is_final(result: Any) -> bool:
    """True for the last response of a request (decoupled models end with a flag)."""
    flag = result.get_response().parameters.get("triton_final_response")
    return flag is not None and bool(flag.bool_param)


def make_inputs(request: ClientRequest) -> list[Any]:
    """Input tensors of a request: streamed, paced, of fixed length (no end token)."""
    import numpy as np
    from tritonclient.grpc import InferInput

    def tensor(name: str, kind: str, value: Any) -> Any:
        item = InferInput(name, [1, 1], kind)
        item.set_data_from_numpy(np.array([[value[0]]], dtype=value[1]))
        return item

    return [
        tensor("text_input", "BYTES", (request.prompt.encode(), object)),
        tensor("max_tokens", "INT32", (request.max_tokens, np.int32)),
        tensor("stream", "BOOL", (True, bool)),
        tensor("end_id", "INT32", (-1, np.int32)),
        tensor("read_rate", "FP32", (request.read_rate, np.float32)),
        tensor("return_num_output_tokens", "BOOL", (True, bool)),
    ]


async def play(url: str, requests: list[ClientRequest], timeout_s: float) -> WorkloadRecord:
    """Send every request at its time and wait for all ends, `timeout_s` at most."""
    from tritonclient.grpc.aio import InferenceServerClient

    records = [
        ClientRecord(
            request_id=r.request_id,
            kind=r.kind,
            read_rate=r.read_rate,
            max_tokens=r.max_tokens,
            num_prompt_tokens=r.num_prompt_tokens,
        )
        for r in requests
    ]
    lags: list[tuple[float, float]] = []
    async with InferenceServerClient(url) as client:
        # One short call opens the connection, so that the first request does not pay for it.
        await client.is_server_live()
        start = time.monotonic()
        watchers = [
            asyncio.create_task(_watch_lag(lags)),
            asyncio.create_task(_report(records, sum(r.max_tokens for r in requests))),
        ]
        try:
            await asyncio.gather(
                *(
                    _stream(client, request, record, start, start + timeout_s)
                    for request, record in zip(requests, records, strict=True)
                )
            )
        finally:
            for watcher in watchers:
                watcher.cancel()
    return WorkloadRecord(
        start_time=start,
        end_time=time.monotonic(),
        cpu_s=time.process_time(),
        clients=records,
        lags=lags,
    )


async def _stream(
    client: Any, request: ClientRequest, record: ClientRecord, start: float, deadline: float
) -> None:
    from tritonclient.utils import InferenceServerException

    inputs = make_inputs(request)
    await asyncio.sleep(max(0.0, start + request.send_offset_s - time.monotonic()))

    async def one_request() -> AsyncIterator[dict[str, Any]]:
        record.send_time = time.monotonic()
        yield {
            "model_name": MODEL_NAME,
            "inputs": inputs,
            "request_id": request.request_id,
        }

    responses = client.stream_infer(one_request(), stream_timeout=deadline - time.monotonic())
    try:
        async for result, error in responses:
            if error is not None:
                record.error = str(error)
                break
            take_response(record, read_outputs(result), time.monotonic())
            if is_final(result):
                break
    except (InferenceServerException, ProtocolError, asyncio.TimeoutError) as error:
        record.error = str(error)
    except Exception as error:
        # grpc's own errors have no common base with tritonclient's; the type is part of the record.
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and not record.finish_reason:
        record.error = "the stream ended without a finish reason"


async def _watch_lag(lags: list[tuple[float, float]]) -> None:
    while True:
        due = time.monotonic() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        now = time.monotonic()
        if now - due > LAG_S:
            lags.append((now, now - due))


async def _report(records: list[ClientRecord], num_expected: int) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        state = {
            "tokens": sum(len(r.token_times) for r in records),
            "expected": num_expected,
            "waiting": sum(r.send_time > 0 and not r.token_times for r in records),
        }
        print(json.dumps(state), flush=True)


def write_plan(plan: Plan, path: Path) -> None:
    """Store what `python -m perf.client` is to do."""
    path.write_text(json.dumps(asdict(plan)))


def read_plan(path: Path) -> Plan:
    """The plan that `write_plan` stored."""
    data = json.loads(path.read_text())
    data["requests"] = [ClientRequest(**item) for item in data["requests"]]
    return Plan(**data)


def write_record(record: WorkloadRecord, path: Path) -> None:
    """Store a played workload."""
    path.write_text(json.dumps(asdict(record)))


def read_record(path: Path) -> WorkloadRecord:
    """The record that `write_record` stored."""
    data = json.loads(path.read_text())
    data["clients"] = [ClientRecord(**item) for item in data["clients"]]
    data["lags"] = [(at, late) for at, late in data["lags"]]
    return WorkloadRecord(**data)


def main(arguments: list[str]) -> int:
    """Play the plan file that is the only argument."""
    if len(arguments) != 1:
        print("usage: python -m perf.client PLAN.json", file=sys.stderr)
        return 2
    plan = read_plan(Path(arguments[0]))
    record = asyncio.run(play(plan.url, plan.requests, plan.timeout_s))
    write_record(record, Path(plan.record_path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
