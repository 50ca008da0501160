"""Clients that check what they hear: many requests per gRPC stream, HTTP generate and its stream.

Owns the two ways to ask, in one asyncio loop, and the protocol's messages; heard.py has what comes
of it. Whatever goes wrong with a connection ends the requests on it with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from perf.long_runs.heard import Heard, Question

MODEL_NAME = "ensemble"
_SCALARS = {"INT32": "<i", "FP32": "<f", "BOOL": "<?", "UINT64": "<Q"}
_TYPES = {
    "text_input": "BYTES", "stop_words": "BYTES", "max_tokens": "INT32", "end_id": "INT32",
    "beam_width": "INT32", "ack_tokens": "INT32", "stream": "BOOL", "return_log_probs": "BOOL",
    "return_num_output_tokens": "BOOL", "stop": "BOOL", "pause": "BOOL", "resume": "BOOL",
    "read_rate": "FP32", "priority": "FP32", "top_p": "FP32", "runtime_top_p_decay": "FP32",
}  # fmt: skip


class GrpcLine:
    """One gRPC stream with any number of requests on it. Use it as a context manager.

    stray: responses for requests that nobody on this line has asked.
    """

    def __init__(self, channel: Any) -> None:
        from tritonclient.grpc import service_pb2_grpc

        self.stray: list[str] = []
        self._heard: dict[str, Heard] = {}
        self._told: dict[str, list[asyncio.Future[str | None]]] = {}
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._call = stub.ModelStreamInfer(self._requests())
        self._reader = asyncio.create_task(self._read())

    def ask(self, question: Question) -> Heard:
        """Send a request; the answer fills itself. Ids of unfinished requests of a line differ."""
        heard = Heard(question=question, send_time=time.monotonic())
        self._heard[question.request_id] = heard
        values = question.values()
        self._outgoing.put_nowait(make_request(question.request_id, values, question.timeout_us))
        return heard

    async def tell(self, request_id: str, action: str) -> str | None:
        """`stop`, `pause` or `resume` the stream with this id on another line; the error text."""
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._told.setdefault(request_id, []).append(answer)
        self._outgoing.put_nowait(make_request(request_id, {action: True}, 0))
        return await answer

    def cancel(self) -> None:
        """Leave, with everything that is on the line."""
        self._call.cancel()

    async def close(self) -> None:
        """End the line when the server has answered everything on it."""
        self._outgoing.put_nowait(None)
        await self._reader

    async def __aenter__(self) -> GrpcLine:
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.cancel()
        await self.close()

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            request = await self._outgoing.get()
            if request is None:
                return
            yield request

    async def _read(self) -> None:
        import grpc

        message = "the stream ended"
        try:
            async for response in self._call:
                self._take(response, time.monotonic())
        except (grpc.RpcError, asyncio.CancelledError) as error:
            details = getattr(error, "details", None)
            message = f"{type(error).__name__}: {details() if details else error}"
        now = time.monotonic()
        for heard in self._heard.values():
            heard.fail(message, now)
        for waiting in self._told.values():
            for future in waiting:
                _resolve(future, message)
        self._heard.clear()
        self._told.clear()

    def _take(self, response: Any, now: float) -> None:
        request_id = response.infer_response.id
        waiting = self._told.get(request_id)
        if waiting:
            _resolve(waiting.pop(0), response.error_message or None)
            if not waiting:
                del self._told[request_id]
            return
        heard = self._heard.get(request_id)
        if heard is None:
            self.stray.append(f"{request_id}: {response}")
            return
        if response.error_message:
            heard.fail(response.error_message, now)
        else:
            flag = response.infer_response.parameters.get("triton_final_response")
            final = bool(flag and flag.bool_param)
            heard.take(read_outputs(response.infer_response), now, final=final)
        if heard.num_ends:
            del self._heard[request_id]


def _resolve(future: asyncio.Future[str | None], error: str | None) -> None:
    """Whoever asked may have given up waiting."""
    if not future.done():
        future.set_result(error)


async def _at_once() -> None:
    """Takes an event as soon as it is there."""


async def ask_http(
    url: str,
    question: Question,
    heard: Heard,
    *,
    after_event: Callable[[], Awaitable[None]] = _at_once,
) -> None:
    """Ask over HTTP, stream or not as the question says; cancel the task to close the socket.

    after_event: awaited after each event, before the next is taken off the socket.
    """
    host, port = url.split(":")
    values = question.values()
    values["id"] = question.request_id
    if question.timeout_us:
        values["timeout"] = question.timeout_us
    route = "generate_stream" if values["stream"] else "generate"
    body = json.dumps(values).encode()
    head = (
        f"POST /v2/models/{MODEL_NAME}/{route} HTTP/1.1\r\nHost: {url}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    heard.send_time = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        is_chunked = b"chunked" in (await reader.readuntil(b"\r\n\r\n")).lower()
        lines = _chunked_lines(reader) if is_chunked else _lines(reader)
        async for line in lines:
            if _take_line(heard, status, line):
                await after_event()
        if not heard.num_ends:
            if heard.finish_reason:
                heard.take({}, time.monotonic(), final=True)
            else:
                heard.fail("the connection closed before the end", time.monotonic())
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        heard.fail(f"{type(error).__name__}: {error}", time.monotonic())
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _take_line(heard: Heard, status: int, line: bytes) -> bool:
    """False for a line without an event."""
    text = line.decode("utf-8", "strict").strip().removeprefix("data: ")
    if not text:
        return False
    outputs = json.loads(text)
    now = time.monotonic()
    if "error" in outputs or status != 200:
        heard.fail(str(outputs.get("error", outputs)), now)
    else:
        heard.take(outputs, now, final=False)
    return True


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    yield await reader.read()


async def _chunked_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        size = int((await reader.readline()) or b"", 16)
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
        if size == 0:
            yield rest
            return


def make_request(request_id: str, values: Mapping[str, object], timeout_us: int) -> Any:
    """The protocol's message; values as HTTP generate takes them."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=MODEL_NAME, id=request_id)
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        kind = _TYPES[name]
        tensor = request.inputs.add(name=name, datatype=kind)
        tensor.shape.extend((1, len(items)))
        if kind == "BYTES":
            texts = [str(item).encode() for item in items]
            data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            data = b"".join(struct.pack(_SCALARS[kind], item) for item in items)
        request.raw_input_contents.append(data)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout_us:
        request.parameters["timeout"].int64_param = timeout_us
    return request


def read_outputs(response: Any) -> dict[str, Any]:
    """The outputs of a gRPC response as HTTP gives them: scalars, log-probs a list."""
    outputs: dict[str, Any] = {}
    for output, data in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            outputs[output.name] = data[4:].decode()
        elif output.name == "output_log_probs":
            outputs[output.name] = list(struct.unpack(f"<{len(data) // 4}f", data))
        else:
            outputs[output.name] = struct.unpack(_SCALARS[output.datatype], data)[0]
    return outputs
