"""Requests that come while the runtime shuts down: whatever runs when, each has its end."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.core.test_runtime import Served
from tokenflow.errors import EngineError
from tokenflow.runtime import Runtime

LONG_S = 0.6
"""For the other threads to do all that they can."""


class StoppedThread(threading.Thread):
    """Runs `action`, and stands still before one line of `code`, the `number`th that it comes to,
    until `go_on`. was_there: it came so far."""

    def __init__(self, action: Callable[[], object], code: CodeType, number: int) -> None:
        super().__init__(daemon=True)
        self._action, self._code, self._num_left = action, code, number
        self._stands_or_is_over, self._may_go_on = threading.Event(), threading.Event()
        self.was_there = False

    def run(self) -> None:
        sys.settrace(self._on_call)
        try:
            self._action()
        finally:
            sys.settrace(None)
            self._stands_or_is_over.set()

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._on_line if frame.f_code is self._code else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._num_left -= 1
            if not self._num_left:
                self.was_there = True
                self._stands_or_is_over.set()
                assert self._may_go_on.wait(20.0)
        return self._on_line

    def start_and_stop(self) -> None:
        """Returns when it stands still, or is over."""
        self.start()
        assert self._stands_or_is_over.wait(20.0)

    def go_on(self) -> None:
        """To its end."""
        self._may_go_on.set()
        self.join(20.0)
        assert not self.is_alive()


def test_a_shutdown_at_any_line_of_a_submission_leaves_nobody_without_an_end() -> None:
    for number in itertools.count(1):
        served, handles = Served(), list[int]()

        def submit(served: Served = served, handles: list[int] = handles) -> None:
            with contextlib.suppress(EngineError):
                handles.append(served.submit((1, 2, 3), 4))

        thread = StoppedThread(submit, Runtime.submit.__code__, number)
        thread.start_and_stop()
        shutdown = threading.Thread(target=served.runtime.shutdown, args=(5.0,))
        shutdown.start()
        shutdown.join(LONG_S)
        thread.go_on()
        shutdown.join()
        served.sink.wait_ends(handles, timeout_s=1.0)
        served.close()
        if not thread.was_there:
            break
    assert number > 3


def test_a_shutdown_that_is_held_up_at_any_line_ends_all_there_are() -> None:
    for number in itertools.count(1):
        served = Served(step_s=0.01)
        handle = served.submit((1, 2, 3), 200)
        served.sink.wait_tokens(handle, 1)
        thread = StoppedThread(
            lambda served=served: served.runtime.shutdown(5.0), Runtime.shutdown.__code__, number
        )
        thread.start_and_stop()
        threading.Event().wait(0.1)  # some turns of the runtime
        thread.go_on()
        served.sink.wait_ends([handle], timeout_s=1.0)
        with pytest.raises(EngineError):
            served.submit((1,), 1)
        served.close()
        if not thread.was_there:
            break
    assert number > 3
