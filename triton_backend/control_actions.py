"""Carries out control requests (control.py) on the runtime.

Owns who is asked what, and when the answer is no. Called in the sender thread, which alone knows
the open answers of an id; which streams are held the runtime alone knows, so it decides on a pause
and replies from its thread. Invariant: a refused control request changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenflow.errors import shortened
from tokenflow.holds import HoldRefusal
from tokenflow.types import GenerateRequest
from triton_backend.control import (
    Acknowledgement,
    ControlRequest,
    PauseRequest,
    ResumeRequest,
    StopRequest,
)
from triton_backend.stream import ErrorCode
from triton_backend.work import RuntimeControl


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a control request did nothing."""

    message: str
    code: ErrorCode


Reply = Callable[[Refusal | None], None]
"""Is told once what became of a control request, in whatever thread; None: it was carried out."""

Stream = tuple[int, GenerateRequest]
"""Handle and request of an unfinished one."""


def carry_out(
    control: ControlRequest, streams: Sequence[Stream], runtime: RuntimeControl, reply: Reply
) -> None:
    """Do what a control request asks. streams: those with its id."""
    match control:
        case PauseRequest() | ResumeRequest() if not streams:
            reply(_not_found(control.request_id))
            return
        case PauseRequest():
            _pause(control.request_id, streams, runtime, reply)
            return
        case ResumeRequest():
            for handle, _ in streams:
                runtime.resume(handle)
        case StopRequest():
            for handle, _ in streams:
                runtime.cancel(handle)
        case Acknowledgement(num_consumed=num_consumed):
            for handle, _ in streams:
                runtime.acknowledge(handle, num_consumed)
    reply(None)


def _pause(
    request_id: str, streams: Sequence[Stream], runtime: RuntimeControl, reply: Reply
) -> None:
    for _, request in streams:
        reason = runtime.unpausable_reason(request)
        if reason is not None:
            message = f"pause: the request {_quoted(request_id)} can never be paused: {reason}"
            reply(Refusal(message, ErrorCode.INVALID_ARG))
            return
    handles = [handle for handle, _ in streams]
    runtime.pause_all(handles, lambda refusal: reply(_explain(refusal, request_id)))


def _explain(refusal: HoldRefusal | None, request_id: str) -> Refusal | None:
    match refusal:
        case HoldRefusal.ENDED:
            return _not_found(request_id)
        case HoldRefusal.USED_UP:
            quoted = _quoted(request_id)
            message = f"pause: the request {quoted} was held as long as it may be (max_hold_s)"
            return Refusal(message, ErrorCode.INVALID_ARG)
        case HoldRefusal.TOO_MANY:
            message = "overloaded: no more streams may be held at a time (max_queue_size)"
            return Refusal(message, ErrorCode.UNAVAILABLE)
        case None:
            return None


def _not_found(request_id: str) -> Refusal:
    message = f"id: no unfinished request has the id {_quoted(request_id)}"
    return Refusal(message, ErrorCode.NOT_FOUND)


def _quoted(request_id: str) -> str:
    return repr(shortened(request_id))
