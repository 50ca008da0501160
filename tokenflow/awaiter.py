"""The thread that listens to the engine.

Owns the waiting: it blocks in the executor's `await_responses`, and when the engine is lost in its
keeper's `restart`. It decides nothing and touches no session; what it hears it posts, in order.
Invariant: it goes on to the next engine only when the loss of the last one has been taken note of,
so that nobody calls an engine that its keeper has released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from tokenflow.executor.api import Executor, Response
from tokenflow.executor.supervisor import EngineKeeper

_AWAIT_TIMEOUT = timedelta(milliseconds=250)
_STOP_POLL_S = 0.05


class EngineListener(Protocol):
    """Who is told. Calls come from the awaiter's thread and only post."""

    def post_responses(self, responses: list[Response]) -> None:
        """The engine said this."""
        ...

    def post_loss(self, message: str, known: Callable[[], None]) -> None:
        """The engine ended; call `known` when it is not called any more."""
        ...

    def post_start(self, executor: Executor) -> None:
        """Another engine runs."""
        ...

    def post_end(self, message: str) -> None:
        """There will be no further engine."""
        ...


class Awaiter:
    """Listens to `executor`, and to those that `keeper` starts after it.

    keeper: None = the loss of the engine is the end.
    stopping: ends the thread soon after it is set.
    """

    def __init__(
        self,
        executor: Executor,
        keeper: EngineKeeper | None,
        listener: EngineListener,
        stopping: threading.Event,
    ) -> None:
        self._executor = executor
        self._keeper = keeper
        self._listener = listener
        self._stopping = stopping
        self._thread = threading.Thread(target=self._run, name="tokenflow-awaiter", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        executor = self._executor
        while not self._stopping.is_set():
            message = self._await_end(executor)
            if message is None:
                return
            if not self._tell_loss(message) or self._keeper is None:
                return
            try:
                started = self._keeper.restart(message, self._stopping)
            except Exception as error:
                self._listener.post_end(str(error))
                return
            if started is None:
                return
            executor = started
            self._listener.post_start(executor)

    def _tell_loss(self, message: str) -> bool:
        """False when the thread is to end."""
        known = threading.Event()
        self._listener.post_loss(message, known.set)
        while not known.wait(_STOP_POLL_S):
            if self._stopping.is_set():
                return False
        return True

    def _await_end(self, executor: Executor) -> str | None:
        """Post what the engine says until it ends: how it did, or None when the thread is to."""
        closed_before = False
        while not self._stopping.is_set():
            try:
                responses = executor.await_responses(_AWAIT_TIMEOUT)
            except Exception as error:
                return str(error)
            if responses:
                self._listener.post_responses(responses)
                closed_before = False
            elif not executor.can_enqueue_requests():
                # An engine that has just gone says why at the next call.
                if closed_before:
                    return "it stopped taking requests"
                closed_before = True
        return None
