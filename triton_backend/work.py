"""What travels to the sender thread, and the seams on both sides of it.

Owns the items of the sender's queue, the way back to a client (`Channel`) and what the sender asks
of the runtime. All are plain values or protocols; Triton's objects hide behind `Channel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenflow.holds import HoldReply
from tokenflow.types import GenerateRequest
from triton_backend.control import ControlRequest
from triton_backend.responses import Array
from triton_backend.stream import ErrorCode, TextStream


class Channel(Protocol):
    """One client's way back. Used by the sender thread only; may raise anything."""

    def send(self, outputs: Sequence[tuple[str, Array]], *, final: bool) -> None:
        """One response."""
        ...

    def fail(self, message: str, code: ErrorCode) -> None:
        """An error response, which is final."""
        ...

    def close(self) -> None:
        """FINAL without data."""
        ...

    def is_cancelled(self) -> bool:
        """True once the client has left."""
        ...


class RuntimeControl(Protocol):
    """What the sender asks of the runtime. None of it waits; a handle whose request has ended is
    ignored. `reply` may be called in any thread."""

    def cancel(self, handle: int) -> None: ...

    def finish(self, handle: int) -> None: ...

    def acknowledge(self, handle: int, num_consumed: int) -> None: ...

    def pause_all(self, handles: Sequence[int], reply: HoldReply) -> None: ...

    def resume(self, handle: int) -> None: ...

    def unpausable_reason(self, request: GenerateRequest) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A request was accepted by the runtime. outputs: names that its responses carry."""

    handle: int
    channel: Channel
    stream: TextStream
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request ends before it began."""

    channel: Channel
    message: str
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class Controlled:
    """A control request to carry out and to answer."""

    channel: Channel
    control: ControlRequest
