"""Carries out control requests (control.py) on the runtime.

Owns who is asked what, and when the answer is no. Called in the sender thread, which alone knows
the open answers of an id. Invariant: a refused control request changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def carry_out(
    control: ControlRequest,
    streams: Sequence[tuple[int, GenerateRequest]],
    runtime: RuntimeControl,
) -> Refusal | None:
    """Do what a control request asks. streams: handle and request of the unfinished ones with its
    id."""
    match control:
        case StopRequest():
            for handle, _ in streams:
                runtime.cancel(handle)
        case Acknowledgement(num_consumed=num_consumed):
            for handle, _ in streams:
                runtime.acknowledge(handle, num_consumed)
        case PauseRequest() | ResumeRequest():
            refusal = _hold_refusal(control, streams, runtime)
            if refusal is not None:
                return refusal
            for handle, _ in streams:
                if isinstance(control, PauseRequest):
                    runtime.pause(handle)
                else:
                    runtime.resume(handle)
    return None


def _hold_refusal(
    control: PauseRequest | ResumeRequest,
    streams: Sequence[tuple[int, GenerateRequest]],
    runtime: RuntimeControl,
) -> Refusal | None:
    request_id = control.request_id
    if not streams:
        return Refusal(f"id: no unfinished request has the id {request_id!r}", ErrorCode.NOT_FOUND)
    if isinstance(control, PauseRequest):
        for _, request in streams:
            reason = runtime.unpausable_reason(request)
            if reason is not None:
                message = f"pause: the request {request_id!r} can never be paused: {reason}"
                return Refusal(message, ErrorCode.INVALID_ARG)
        if not runtime.may_hold():
            message = "overloaded: as many streams as may be are held (max_queue_size)"
            return Refusal(message, ErrorCode.UNAVAILABLE)
    return None
