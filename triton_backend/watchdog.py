"""Ends this process when the server that started it is gone.

A stub whose server was killed while a response was on its way waits for ever, and would keep the
engine's memory. The kernel's parent-death signal does not help: it follows the server thread that
made the stub, not the server.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger("tokenflow")

_CHECK_PERIOD_S = 0.5
_CLEANUP_LIMIT_S = 2.0


class ServerWatchdog:
    """Thread that compares the parent process id with the one at its start.

    on_lost: last clean-up (stop the engine); it gets two seconds.
    get_parent, exit: the operating system's, or a fake's.
    """

    def __init__(
        self,
        on_lost: Callable[[], None],
        *,
        get_parent: Callable[[], int] = os.getppid,
        exit: Callable[[int], object] = os._exit,
        check_period_s: float = _CHECK_PERIOD_S,
        cleanup_limit_s: float = _CLEANUP_LIMIT_S,
    ) -> None:
        self._on_lost = on_lost
        self._get_parent = get_parent
        self._exit = exit
        self._check_period_s = check_period_s
        self._cleanup_limit_s = cleanup_limit_s
        self._parent = get_parent()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenflow-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(self._check_period_s * 2 + self._cleanup_limit_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._check_period_s):
            if self._get_parent() != self._parent:
                logger.error("the server is gone; leaving")
                cleanup = threading.Thread(target=self._clean_up, daemon=True)
                cleanup.start()
                cleanup.join(self._cleanup_limit_s)
                self._exit(1)
                return

    def _clean_up(self) -> None:
        try:
            self._on_lost()
        except Exception:
            logger.exception("stopping the engine failed")
