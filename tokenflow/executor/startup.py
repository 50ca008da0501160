"""How the start of an engine in another process goes.

Owns what is known between the birth of the process and its first request: progress that nobody has
reported yet, then what the engine is, or why there is none.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tokenflow.errors import EngineError
from tokenflow.executor.channel import EngineInfo, Failed, Progress, Ready

_STOP_POLL_S = 0.05


class StopSignal(Protocol):
    """Tells a start that nobody wants the engine any more: a `threading.Event`, or several."""

    def is_set(self) -> bool:
        """True from the moment on at which the start has to end."""
        ...


class EngineStartup:
    """Filled by the channel's reader, waited for by the thread that starts the engine."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._progress: deque[Progress] = deque()
        self._failure: str | None = None
        self._lost: str | None = None
        self.info: EngineInfo | None = None

    def take(self, message: Progress | Ready | Failed) -> None:
        """A message of the engine about its start."""
        with self._condition:
            if isinstance(message, Progress):
                self._progress.append(message)
            elif isinstance(message, Ready):
                self.info = message.info
            else:
                self._failure = message.message
            self._condition.notify_all()

    def lose(self, message: str) -> None:
        """The process is gone."""
        with self._condition:
            self._lost = message
            self._condition.notify_all()

    def wait(
        self,
        on_progress: Callable[[float, str], None],
        timeout_s: float | None,
        stop: StopSignal | None,
    ) -> None:
        """Return when the engine takes requests; reports progress in the calling thread.

        Raises EngineError with the engine's own message when there will be no engine, after
        `timeout_s`, and soon after `stop` is set; what was started is then the caller's to end.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if stop is not None and stop.is_set():
                raise EngineError("the start of the engine was stopped")
            progress, is_ready = self._next(deadline, None if stop is None else _STOP_POLL_S)
            for step in progress:
                on_progress(step.fraction, step.text)
            if is_ready:
                return
            if time.monotonic() >= deadline:
                raise EngineError(f"the engine was not ready after {timeout_s} s")

    def _next(self, deadline: float, limit_s: float | None) -> tuple[list[Progress], bool]:
        """Progress that came meanwhile, and whether the engine is ready, after `limit_s` at the
        latest. A loss is raised once all progress was reported."""
        rest_s = max(0.0, deadline - time.monotonic())
        wait_s = min(rest_s, math.inf if limit_s is None else limit_s)
        with self._condition:
            self._condition.wait_for(self._has_news, None if wait_s == math.inf else wait_s)
            progress = list(self._progress)
            self._progress.clear()
            if self._lost is not None and not progress and self.info is None:
                raise EngineError(self._failure or f"{self._lost}, before the engine was ready")
            return progress, self.info is not None

    def _has_news(self) -> bool:
        return bool(self._progress) or self.info is not None or self._lost is not None
