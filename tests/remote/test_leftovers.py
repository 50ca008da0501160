"""What engines leave behind when they end, however they end: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from random import Random

import pytest

from tests.remote.conftest import _children, _descriptors, _threads
from tests.remote.helpers import NEVER, is_running, supervised, wait_until
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError
from tokenflow.executor.factory import start_engine
from tokenflow.executor.link import EngineLink
from tokenflow.executor.process import EngineProcess


class _Unkillable(EngineProcess):
    """A process inside a device driver that hangs: SIGKILL is sent, and nothing happens."""

    def send_signal(self, number: int) -> None:
        pass

    def end(self, grace_s: float) -> None:
        self.wait(grace_s)


def test_process_that_the_kernel_cannot_end_is_given_up_and_may_end_late() -> None:
    ends: list[str] = []
    others = _threads()  # of engines that other tests keep
    link = EngineLink(
        on_message=lambda message: None,
        on_end=ends.append,
        num_threads=1,
        max_backlog_bytes=1 << 20,
        log_path=None,
        exit_wait_s=0.05,
        process_type=_Unkillable,
    )
    link.kill()
    wait_until(lambda: bool(ends))
    assert ends == ["the engine process ended (still running)"]
    before = _descriptors()
    os.kill(link.pid, signal.SIGSTOP)  # the end of its channel would end it
    link.close(0.0, 0.0)
    assert is_running(link.pid)
    theirs = [os.eventfd(0, os.EFD_NONBLOCK) for _ in before - _descriptors()]
    os.kill(link.pid, signal.SIGKILL)
    wait_until(lambda: _threads() <= others)
    for fd in theirs:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        os.close(fd)


class _At:
    """Set from an instant on."""

    def __init__(self, instant: float) -> None:
        self._instant = instant

    def is_set(self) -> bool:
        return time.monotonic() >= self._instant


def test_two_hundred_starts_and_ends_leave_nothing() -> None:
    """Full lives that end by a kill, and starts that are stopped while the process comes up."""
    config = ServingConfig(engine="scripted")

    def lives(seed: int) -> None:
        random = Random(seed)
        with supervised() as supervisor:
            for i in range(100):
                if i % 5 == 0:
                    supervisor.kill("next")
                    assert supervisor.restart("next", NEVER) is not None
                    continue
                stop = _At(time.monotonic() + random.uniform(0.0, 0.04))
                with contextlib.suppress(EngineError):  # a fast machine is ready before
                    start_engine(config, stop=stop).shutdown()

    before = len(_descriptors()), _threads(), _children()
    threads = [threading.Thread(target=lives, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: (_threads(), _children()) == before[1:])
    assert len(_descriptors()) == before[0]
