"""Streams that their clients hold and release at random, on a runtime with the counting engine.

Owns who is held, who goes on next and what each has got. A few run at a time; each runs a turn and
is held again, so that every turn is a pause and a resume; one that ends is replaced. `Heard` is
told by the runtime's thread, everything else is done by the caller's. Every token is checked.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from perf.long_runs.server_processes import MeasurementError
from tokenflow.inflight.scripts import counting, expected
from tokenflow.runtime import Runtime
from tokenflow.types import EndReason, GenerateRequest, TokenEvent

VOCAB_SIZE = 256
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """num_streams: alive at once, of which num_running run. Prompts have num_prompt_tokens, outputs
    from two turns to max_tokens; a turn is turn_tokens and what comes until the pause."""

    num_streams: int
    num_running: int
    num_prompt_tokens: int
    max_tokens: int
    turn_tokens: int


@dataclass(eq=False, kw_only=True)
class _Stream:
    request: GenerateRequest
    goal: int
    token_ids: list[int] = field(default_factory=list)
    is_held: bool = False
    is_paused: bool = False
    end: EndReason | None = None


class Heard:
    """Takes the events and the trace of a runtime: its `emit` and its `tracer`.

    changed: guards the rest, and is told of every change. num_cycles: resumes so far.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.streams: dict[int, _Stream] = {}
        self.by_name: dict[str, _Stream] = {}
        self.num_cycles = 0
        self.faults: list[str] = []

    def emit(self, event: TokenEvent) -> None:
        """Takes tokens and ends."""
        with self.changed:
            stream = self.streams[event.handle]
            stream.token_ids += event.token_ids
            if event.end is not None:
                stream.end = event.end
                self._check(stream, event.error)
            self.changed.notify()

    def record(self, event: str, time: float, **fields: Any) -> None:
        """Takes note of pauses and resumes."""
        if event not in ("paused", "resumed"):
            return
        with self.changed:
            self.by_name[fields["request_id"]].is_paused = event == "paused"
            self.num_cycles += event == "resumed"
            self.changed.notify()

    def flush(self) -> None:
        """Nothing waits to be written."""

    def _check(self, stream: _Stream, error: str | None) -> None:
        request = stream.request
        right, _ = expected(counting(VOCAB_SIZE), request.input_token_ids, request.max_tokens)
        if error is not None:
            self.faults.append(f"{request.request_id} failed: {error}")
        elif stream.token_ids != right:
            self.faults.append(f"{request.request_id} got other tokens than its own")


class HeldStreams:
    """Drives them. Raises MeasurementError when nothing goes on for a minute."""

    def __init__(self, runtime: Runtime, heard: Heard, *, seed: int, shape: Shape) -> None:
        self._runtime = runtime
        self._heard = heard
        self._rng = random.Random(seed)
        self._shape = shape
        self._num_started = 0

    def run(self, until: int) -> None:
        """Hold and release until there were `until` cycles in all."""
        heard = self._heard
        with heard.changed:
            while heard.num_cycles < until:
                self._turn()
                if not heard.changed.wait(WAIT_S):
                    raise MeasurementError(f"nothing happened for {WAIT_S:.0f} s")

    def finish(self) -> None:
        """Let everybody go on to the end."""
        heard, deadline = self._heard, time.monotonic() + WAIT_S
        with heard.changed:
            for handle, stream in heard.streams.items():
                if stream.is_held:
                    self._runtime.resume(handle)
            while any(stream.end is None for stream in heard.streams.values()):
                if not heard.changed.wait(deadline - time.monotonic()):
                    raise MeasurementError("not all streams came to their ends")

    def _turn(self) -> None:
        heard = self._heard
        for handle, stream in list(heard.streams.items()):
            if stream.end is not None:
                del heard.streams[handle], heard.by_name[stream.request.request_id]
            elif not stream.is_held and len(stream.token_ids) >= stream.goal:
                stream.is_held = True
                self._runtime.pause(handle)
        resting = [item for item in heard.streams.items() if item[1].is_held and item[1].is_paused]
        for _ in range(self._shape.num_running - (len(heard.streams) - len(resting))):
            if len(heard.streams) < self._shape.num_streams:
                self._start()
            else:
                self._release(*resting.pop(self._rng.randrange(len(resting))))

    def _release(self, handle: int, stream: _Stream) -> None:
        stream.is_held = False
        stream.goal = len(stream.token_ids) + self._shape.turn_tokens
        self._runtime.resume(handle)

    def _start(self) -> None:
        self._num_started += 1
        shape, rng = self._shape, self._rng
        request = GenerateRequest(
            request_id=f"stream-{self._num_started}",
            input_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=shape.num_prompt_tokens)),
            max_tokens=rng.randint(2 * shape.turn_tokens, shape.max_tokens),
            arrival_time=time.monotonic(),
        )
        stream = _Stream(request=request, goal=shape.turn_tokens)
        self._heard.by_name[request.request_id] = stream
        self._heard.streams[self._runtime.submit(request)] = stream
