"""Every test here leaves what it found: no process, thread or descriptor more."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _threads() -> set[int]:
    return {thread.ident or 0 for thread in threading.enumerate() if "engine" in thread.name}


def _children() -> set[int]:
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            children |= {int(pid) for pid in (task / "children").read_text().split()}
    return children


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    checks = (_threads, _children)
    before, num_descriptors = [check() for check in checks], len(_descriptors())
    yield
    deadline = time.monotonic() + 2
    while True:
        left = [check() - was for check, was in zip(checks, before, strict=True)]
        if not any(left) and len(_descriptors()) <= num_descriptors:
            return
        assert time.monotonic() < deadline, f"left over: {left}, {num_descriptors} descriptors were"
        time.sleep(0.01)
