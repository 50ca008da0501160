"""A gRPC server that answers streamed requests as the real one does: a fake at the transport."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


def _text(values: list[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(item)) + item for item in encoded)


def response(
    request_id: str, index: int, texts: str, num_tokens: int, finish: str, final: bool
) -> service_pb2.ModelStreamInferResponse:
    answer = service_pb2.ModelInferResponse(model_name="ensemble", id=request_id)
    for name, kind, raw in (
        ("text_output", "BYTES", _text([texts])),
        ("num_output_tokens", "INT32", struct.pack("<i", num_tokens)),
        ("token_index", "INT32", struct.pack("<i", index)),
        ("finish_reason", "BYTES", _text([finish])),
    ):
        answer.outputs.add(name=name, datatype=kind, shape=[1, 1])
        answer.raw_output_contents.append(raw)
    answer.parameters["triton_final_response"].bool_param = final
    return service_pb2.ModelStreamInferResponse(infer_response=answer)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Emits `max_tokens` tokens, two per response, `step_s` apart. Misbehaves on demand:

    a prompt with "refuse" gets an error, with "skip" loses a token, with "hang up" ends early.
    """

    def __init__(self, step_s: float = 0.005) -> None:
        self.step_s = step_s
        self.requests: list[service_pb2.ModelInferRequest] = []

    async def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelStreamInfer(self, request_iterator, context):
        async for request in request_iterator:
            self.requests.append(request)
            inputs = read_inputs(request)
            prompt = inputs["text_input"]
            if "refuse" in prompt:
                yield service_pb2.ModelStreamInferResponse(error_message="max_tokens: too many")
                continue
            total = inputs["max_tokens"]
            for index in range(0, total, 2):
                await asyncio.sleep(self.step_s)
                num = min(2, total - index)
                last = index + num == total
                shown = index + 1 if "skip" in prompt and index else index
                yield response(request.id, shown, "ab"[:num], num, "length" if last else "", last)
                if "hang up" in prompt:
                    return


def read_inputs(request: service_pb2.ModelInferRequest) -> dict[str, object]:
    values: dict[str, object] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values[tensor.name] = raw[4:].decode()
        else:
            form = {"INT32": "<i", "FP32": "<f", "BOOL": "<?"}[tensor.datatype]
            (values[tensor.name],) = struct.unpack(form, raw)
    return values


@contextlib.asynccontextmanager
async def running(fake: FakeTriton) -> AsyncIterator[str]:
    """The fake on a free port; yields its address."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
