"""Scheduling events as JSON lines, for benchmarks and for people who ask "why did it wait?".

One line per event: `{"event": ..., "time": monotonic seconds, "request_id": ..., ...}`. Events are
arrival, admit, first_token, pause, paused, resume, resumed, finish, cancel, error, iteration and
plan. A plan's line counts the requests that it names: pause, resume, admit and forced; and, where
there are any, recompute, prefetch and offload, which are asked of the host tier. CLOCK_MONOTONIC is
one clock for all processes of a machine, so a client's receipt times can be laid beside these.
Written by the runtime thread only.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

logger = logging.getLogger("tokenflow")


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
    """Appends to a file; `flush` after each batch of work keeps at most one batch unseen.

    A file that cannot be opened raises OSError here. One that cannot be written later (a full disk)
    is said once in the log and given up: serving goes on without a trace.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def record(self, event: str, time: float, **fields: Any) -> None:
        if self._file is None:
            return
        line = {"event": event, "time": time, **fields}
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush and close; what is recorded afterwards is forgotten."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            logger.error("the end of trace %s is lost: %s", self._path, error)

    def _give_up(self, error: OSError) -> None:
        logger.error("trace %s cannot be written and ends here: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # closing tries to write once more
                file.close()
