"""Signals of commands that have something to put in order before they end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def termination_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, and the hangup of the terminal, end the command as Ctrl-C does: by
    KeyboardInterrupt in the main thread. A signal that is ignored (nohup) stays so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
