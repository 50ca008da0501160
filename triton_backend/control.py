"""Control requests: stop, pause or resume a stream, acknowledge what was read.

Owns the meaning of control requests; control_actions.py carries them out. A control request is a
request of its own that carries the id of the stream it is about, and exactly one of
- `stop` = true: ends the stream. A success also when no such stream runs (any more), since its end
  may have crossed the request on the way, and client libraries send one after each stream.
- `pause` = true: holds the stream until it is resumed, at most for the configured max_hold_s.
- `resume` = true: ends the hold.
- `ack_tokens` = n: its reader has consumed n tokens in all. A success without such a stream too.

An id may be used by several streams at once; a control request is about all of them, and pauses all
or none. A stream that is paused already, or not paused, makes pause and resume a success without
effect. Pause and resume of an id that no unfinished request has are NOT_FOUND; a pause of a request
that can never be paused, or whose max_hold_s is used up, is INVALID_ARG and says why. A success is
one empty final response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.errors import InvalidRequestError
from triton_backend.fields import Fields, Tensor, check_id

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class StopRequest:
    """End the streams with this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """Hold the streams with this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """End the hold of the streams with this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The reader of this stream has consumed `num_consumed` tokens since its start."""

    request_id: str
    num_consumed: int


ControlRequest = StopRequest | PauseRequest | ResumeRequest | Acknowledgement

_Switch = type[StopRequest] | type[PauseRequest] | type[ResumeRequest]
_SWITCHES: dict[str, tuple[_Switch, str]] = {
    "stop": (StopRequest, "request cancellation"),
    "pause": (PauseRequest, "a pause"),
    "resume": (ResumeRequest, "a resume"),
}
CONTROL_INPUTS = (*_SWITCHES, "ack_tokens")


def parse_control(request_id: str, tensors: Mapping[str, Tensor]) -> ControlRequest | None:
    """The control request that this is, or None for a generation request.

    A switch that is false is the same as none. Other inputs beside a control input are ignored,
    since clients send them along with a stop. Raises InvalidRequestError.
    """
    if not any(name in tensors for name in CONTROL_INPUTS):
        return None
    fields = Fields(tensors)
    given = [name for name in _SWITCHES if fields.boolean(name, False)]
    num_consumed = fields.integer("ack_tokens", 0, _INT32_MAX)
    if num_consumed is not None:
        given.append("ack_tokens")
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequestError(given[1], f"cannot go with {given[0]} in one request")
    if not request_id:
        action = "an acknowledgement" if num_consumed is not None else _SWITCHES[given[0]][1]
        raise InvalidRequestError("id", f"a request id must be provided for {action}")
    check_id(request_id)
    if num_consumed is not None:
        return Acknowledgement(request_id, num_consumed)
    return _SWITCHES[given[0]][0](request_id)
