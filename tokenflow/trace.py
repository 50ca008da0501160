"""Scheduling events as JSON lines, for benchmarks and for people who ask "why did it wait?".

One line per event: `{"event": ..., "time": monotonic seconds, "request_id": ..., ...}`. Events are
arrival, admit, first_token, pause, paused, resume, resumed, finish, cancel, error, iteration and
plan. CLOCK_MONOTONIC is one clock for all processes of a machine, so a client's receipt times can
be laid beside these. Written by the runtime thread only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec


class Tracer(Protocol):
    """Where scheduling events go."""

    def record(self, event: str, time: float, **fields: Any) -> None:
        """Note one event; must not block for long."""
        ...

    def flush(self) -> None:
        """Make what was recorded visible to readers."""
        ...


class NullTracer:
    """Forgets everything."""

    def record(self, event: str, time: float, **fields: Any) -> None:
        pass

    def flush(self) -> None:
        pass


class JsonLinesTracer:
    """Appends to a file; `flush` after each batch of work keeps at most one batch unseen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def record(self, event: str, time: float, **fields: Any) -> None:
        line = {"event": event, "time": time, **fields}
        self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Flush and close; nothing may be recorded afterwards."""
        self._file.close()
