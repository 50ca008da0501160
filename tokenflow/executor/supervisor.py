"""An engine that is started again when it is lost.

Owns the current executor: starts it, releases it when it is lost, starts the next one, and gives up
when losses come too fast. It decides nothing about requests: whoever serves them says that the
engine is lost (`restart`) or has to go (`kill`), and resumes them on the executor that it gets.

Invariants:
- At most one engine at a time: the lost one is released, process and memory, before the next one is
  started. The exception is an engine without a process of its own that does not come back; that is
  logged.
- A loss is an engine that ended or a start that failed. The first loss within `window_s` seconds is
  followed by a start at once, the next ones after 0.5, 1, 2, 4 … and at most 15 s. More than
  `max_restarts` of them within `window_s` end the supervision with an error.
- A stop, and `shutdown` from any thread, end whatever `restart` is doing: the wait at once, a load
  as soon as `start` heeds its signal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tokenflow.clock import Clock
from tokenflow.errors import EngineError
from tokenflow.executor.api import Executor
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.startup import StopSignal

logger = logging.getLogger("tokenflow")

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 15.0
_STOP_POLL_S = 0.05
_RELEASE_WAIT_S = 20.0  # a RemoteExecutor needs less, whatever its process does


class EngineKeeper(Protocol):
    """What a runtime asks of whoever keeps its engine running."""

    def restart(self, reason: str, stop: threading.Event) -> Executor | None:
        """A new engine in place of the lost one. Blocks; None when `stop` was set. Raises
        EngineError when no further start will be tried."""
        ...

    def kill(self, reason: str) -> bool:
        """End a stuck engine, so that it counts as lost; False when it cannot be ended."""
        ...


class EngineSupervisor:
    """Keeps an engine running. Starts the first one in the constructor, which raises what `start`
    raises.

    start: a running engine, or an exception. It is given the signal that ends a start under way;
        `factory.start_engine` takes it as `stop`.
    max_restarts: losses within `window_s` seconds that are made good; the next one is not.
    sleep: passes that many seconds on `clock`; a fake's may advance a ManualClock.
    release_wait_s: what the `shutdown` of an executor may take before it is left behind.
    """

    def __init__(
        self,
        start: Callable[[StopSignal], Executor],
        *,
        max_restarts: int,
        window_s: float,
        clock: Clock,
        sleep: Callable[[float], object] = time.sleep,
        release_wait_s: float = _RELEASE_WAIT_S,
    ) -> None:
        self._start = start
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._sleep = sleep
        self._release_wait_s = release_wait_s
        self._loss_times: deque[float] = deque()
        self._closing = threading.Event()
        self._working = threading.Lock()  # held by whoever releases or starts an engine
        self._executor = start(self._closing)

    @property
    def executor(self) -> Executor:
        """The current engine; the last one, shut down, when there is none (while `restart` works,
        after it gave up or was stopped, after `shutdown`)."""
        return self._executor

    def restart(self, reason: str, stop: threading.Event) -> Executor | None:
        """Release the lost engine and start another; blocks until it takes requests.

        reason: how the engine was lost, as one line that may be shown to a client.
        Returns None, with no engine running, when `stop` is set or `shutdown` is called meanwhile.
        Raises EngineError, fit for clients, when there were more than `max_restarts` losses within
        `window_s`. To be called by one thread at a time.
        """
        stopped = _AnySet(stop, self._closing)
        with self._working:
            self._release(self._executor)
            while not stopped.is_set():
                if not self._wait(self._note_loss(reason), stopped):
                    break
                try:
                    executor = self._start(stopped)
                except Exception as error:  # whatever it is, the next start may do better
                    reason = f"it could not be started: {error}"
                    continue
                self._executor = executor
                if not stopped.is_set():
                    return executor
                self._release(executor)
        return None

    def kill(self, reason: str) -> bool:
        """End the process of the current engine (`RemoteExecutor.kill`); its loss comes with
        `reason`. False for an engine without a process of its own: it cannot be ended."""
        executor = self._executor
        if not isinstance(executor, RemoteExecutor):
            return False
        executor.kill(reason)
        return True

    def shutdown(self) -> None:
        """Stop the engine for good, and a `restart` in another thread; what that thread has started
        is released by it. Takes a bounded time, from any thread, any number of times."""
        self._closing.set()
        if not self._working.acquire(timeout=2 * self._release_wait_s):
            logger.error("an engine is still being started; it ends when its start does")
            return
        try:
            self._release(self._executor)
        finally:
            self._working.release()

    def _note_loss(self, reason: str) -> float:
        """Count a loss; the back-off (s) before the next start. Raises EngineError when there were
        too many."""
        now = self._clock.now()
        self._loss_times.append(now)
        while self._loss_times[0] <= now - self._window_s:
            self._loss_times.popleft()
        num_losses = len(self._loss_times)
        if num_losses > self._max_restarts:
            raise EngineError(
                f"the engine was lost {num_losses} time{'s' * (num_losses > 1)} within "
                f"{self._window_s:g} s and is not "
                f"started again; the last time: {reason}"
            )
        backoff_s = _backoff_s(num_losses)
        logger.error(
            "the engine is lost (%d of %d losses within %g s that are made good): %s; the next "
            "start is in %g s",
            num_losses,
            self._max_restarts,
            self._window_s,
            reason,
            backoff_s,
        )
        return backoff_s

    def _wait(self, seconds: float, stopped: StopSignal) -> bool:
        """False when it was stopped."""
        until = self._clock.now() + seconds
        while not stopped.is_set():
            rest_s = until - self._clock.now()
            if rest_s <= 0:
                return True
            self._sleep(min(rest_s, _STOP_POLL_S))
        return False

    def _release(self, executor: Executor) -> None:
        """Shut down without trusting that it comes back."""
        thread = threading.Thread(
            target=_shut_down, args=(executor,), name="tokenflow-engine-release", daemon=True
        )
        thread.start()
        thread.join(self._release_wait_s)
        if thread.is_alive():
            logger.error("an engine does not end within %g s; it is left", self._release_wait_s)


class _AnySet:
    """Set when one of several signals is."""

    def __init__(self, *signals: StopSignal) -> None:
        self._signals = signals

    def is_set(self) -> bool:
        """See StopSignal."""
        return any(signal.is_set() for signal in self._signals)


def _backoff_s(num_losses: int) -> float:
    """Seconds between the latest of `num_losses` losses within the window and the next start."""
    if num_losses == 1:
        return 0.0
    doublings = min(num_losses - 2, 10)
    return float(min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**doublings))


def _shut_down(executor: Executor) -> None:
    try:
        executor.shutdown()
    except Exception:
        logger.exception("shutting the engine down failed")
