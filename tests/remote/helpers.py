"""What the tests of the remote engine share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tokenflow.clock import ManualClock
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Request, Response
from tokenflow.executor.factory import start_engine
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.startup import StopSignal
from tokenflow.executor.supervisor import EngineSupervisor

LIMIT_S = 30.0
"""What nothing may take, on any machine: only a hang does."""
NEVER = threading.Event()
"""A signal that nobody sets."""


def request(max_tokens: int = 5, first: int = 1, **fields: Any) -> Request:
    """A small one."""
    return Request(input_token_ids=(first, 2, 3), max_tokens=max_tokens, **fields)


@contextmanager
def supervised(
    start: Callable[[StopSignal], Any] | None = None, *, step_s: float = 0.0
) -> Iterator[EngineSupervisor]:
    """A supervisor of the scripted engine whose back-off costs no time."""
    config = ServingConfig(
        engine="scripted", scripted_step_s=step_s, max_num_tokens=16, max_batch_size=4
    )
    clock = ManualClock()
    supervisor = EngineSupervisor(
        start or (lambda stop: start_engine(config, stop=stop)),
        max_restarts=1000,
        window_s=1e6,
        clock=clock,
        sleep=clock.advance,
    )
    try:
        yield supervisor
    finally:
        supervisor.shutdown()


@contextmanager
def engine(kind: str = "counting", step_s: float = 0.0, **options: Any) -> Iterator[RemoteExecutor]:
    """A RemoteExecutor on one of the engines of `engines.py`."""
    config = ServingConfig(engine="scripted", scripted_step_s=step_s)
    executor = RemoteExecutor(config, factory=f"tests.remote.engines:{kind}", **options)
    try:
        yield executor
    finally:
        executor.shutdown()


def collect(executor: RemoteExecutor, ids: Iterable[int]) -> list[Response]:
    """All responses until each of `ids` had its final one."""
    waiting, responses = set(ids), []
    deadline = time.monotonic() + LIMIT_S
    while waiting:
        assert time.monotonic() < deadline, f"no final response for {sorted(waiting)[:5]}"
        batch = executor.await_responses(timedelta(seconds=1))
        responses += batch
        waiting -= {r.request_id for r in batch if r.has_error() or r.result.is_final}
    return responses


def tokens(responses: Iterable[Response], id: int) -> list[int]:
    """The tokens of one request."""
    return [
        token
        for response in responses
        if response.request_id == id and not response.has_error()
        for token in response.result.output_token_ids[0]
    ]


def is_running(pid: int) -> bool:
    """False when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until `condition` holds; fails after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.01)
