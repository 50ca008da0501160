"""Control requests: stop a stream, acknowledge what was read.

Owns the recognition of control requests. A control request is a request of its own that carries the
id of the stream it is about: `stop` = true ends it, `ack_tokens` = n says that its reader has
consumed n tokens in all. It is answered by one empty final response, also when no such stream runs
(any more): its end may have crossed the request on the way. An id may be used by several streams at
once; a control request is about all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.errors import InvalidRequestError
from triton_backend.fields import Fields, Tensor

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class StopRequest:
    """End the streams with this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The reader of this stream has consumed `num_consumed` tokens since its start."""

    request_id: str
    num_consumed: int


ControlRequest = StopRequest | Acknowledgement


def parse_control(request_id: str, tensors: Mapping[str, Tensor]) -> ControlRequest | None:
    """The control request that this is, or None for a generation request.

    `stop` = false is the same as no `stop`. Other inputs beside a control input are ignored, since
    clients send them along with a stop. Raises InvalidRequestError.
    """
    if "stop" not in tensors and "ack_tokens" not in tensors:
        return None
    fields = Fields(tensors)
    stop = fields.boolean("stop", False)
    num_consumed = fields.integer("ack_tokens", 0, _INT32_MAX)
    if stop and num_consumed is not None:
        raise InvalidRequestError("ack_tokens", "cannot go with stop in one request")
    if not stop and num_consumed is None:
        return None
    if not request_id:
        action = "request cancellation" if stop else "an acknowledgement"
        raise InvalidRequestError("id", f"a request id must be provided for {action}")
    if num_consumed is not None:
        return Acknowledgement(request_id, num_consumed)
    return StopRequest(request_id)
