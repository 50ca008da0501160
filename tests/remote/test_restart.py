"""Real engines that die in every phase and are started again: nothing hangs, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.remote.engines import FAIL_TOKEN
from tests.remote.helpers import (
    LIMIT_S,
    NEVER,
    collect,
    engine,
    is_running,
    request,
    supervised,
    tokens,
    wait_until,
)
from tokenflow.clock import MonotonicClock
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.api import Request, Response
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.startup import StopSignal
from tokenflow.executor.supervisor import EngineSupervisor

PROMPT = tuple(range(1, 61))  # four chunks of 16


def kinds(*sequence: str, on_progress: Any = None) -> Callable[[StopSignal], RemoteExecutor]:
    """A start whose n-th engine is the n-th of `engines.py` named; the last one from then on."""
    left = list(sequence)

    def start(stop: StopSignal) -> RemoteExecutor:
        kind = left.pop(0) if len(left) > 1 else left[0]
        return RemoteExecutor(
            ServingConfig(engine="scripted"),
            on_progress,
            factory=f"tests.remote.engines:{kind}",
            stop=stop,
        )

    return start


def remote(supervisor: EngineSupervisor) -> RemoteExecutor:
    assert isinstance(supervisor.executor, RemoteExecutor)
    return supervisor.executor


def lost(executor: RemoteExecutor) -> tuple[list[Response], str]:
    """What still comes, and the reason of the loss. An error is never visible before the loss."""
    responses: list[Response] = []
    while True:
        try:
            batch = executor.await_responses(timedelta(seconds=LIMIT_S))
        except EngineLostError as error:
            return responses, str(error)
        assert batch, "the loss goes unnoticed"
        if any(response.has_error() for response in batch):
            assert not executor.can_enqueue_requests()
        responses += batch


def check_serves(executor: Any) -> None:
    id = executor.enqueue_request(Request(input_token_ids=PROMPT, max_tokens=3))
    assert tokens(collect(executor, [id]), id) == [61, 62, 63]


def sigkill(supervisor: EngineSupervisor) -> None:
    os.kill(remote(supervisor).pid, signal.SIGKILL)


def stop_and_kill(supervisor: EngineSupervisor) -> None:
    os.kill(remote(supervisor).pid, signal.SIGSTOP)
    assert supervisor.kill("it hangs")


def _idle(executor: RemoteExecutor) -> list[int]:
    return []


def _in_prefill(executor: RemoteExecutor) -> list[int]:
    ids = [executor.enqueue_request(Request(input_token_ids=PROMPT, max_tokens=50))]
    wait_until(lambda: bool(executor.get_latest_iteration_stats()))  # the first chunk of four
    return ids


def _decoding(executor: RemoteExecutor) -> list[int]:
    ids = executor.enqueue_requests([request(1000)] * 4)
    executor.await_responses()
    return ids


def _commands_queued(executor: RemoteExecutor) -> list[int]:
    os.kill(executor.pid, signal.SIGSTOP)
    ids: list[int] = []
    for _ in range(300):
        ids += executor.enqueue_requests([Request(input_token_ids=(1,) * 1000, max_tokens=9)] * 4)
        executor.cancel_request(ids[-1])
    return ids


@pytest.mark.parametrize("act", [sigkill, stop_and_kill])
@pytest.mark.parametrize("phase", [_idle, _in_prefill, _decoding, _commands_queued])
def test_killed_engine_ends_its_requests_and_the_next_one_serves(
    phase: Callable[[RemoteExecutor], list[int]], act: Callable[[EngineSupervisor], None]
) -> None:
    with supervised(step_s=0.02) as supervisor:
        executor = remote(supervisor)
        pid = executor.pid
        ids = phase(executor)
        act(supervisor)
        responses, reason = lost(executor)
        assert [r.request_id for r in responses if r.has_error()] == ids
        assert "signal SIGKILL" in reason
        assert ("it hangs: " in reason) == (act is stop_and_kill)
        fresh = supervisor.restart(reason, NEVER)
        assert fresh is supervisor.executor
        assert not is_running(pid)
        check_serves(fresh)


def test_engine_killed_twice_at_once_is_lost_once() -> None:
    with supervised(step_s=0.01) as supervisor:
        for _ in range(3):
            executor = remote(supervisor)
            ids = executor.enqueue_requests([request(1000)] * 4)
            kills = [
                threading.Thread(target=supervisor.kill, args=(f"reason {i}",)) for i in range(4)
            ]
            for thread in kills:
                thread.start()
            with contextlib.suppress(ProcessLookupError):
                sigkill(supervisor)
            responses, reason = lost(executor)
            for thread in kills:
                thread.join(LIMIT_S)
            assert [r.request_id for r in responses if r.has_error()] == ids
            assert reason.count("reason") <= 1
            supervisor.kill("too late, and nobody hears it")
            assert supervisor.restart(reason, NEVER) is not None
        check_serves(supervisor.executor)


def test_kill_after_the_end_does_nothing() -> None:
    with engine() as executor:
        executor.kill("first")
        _, reason = lost(executor)
        executor.kill("second")
        with pytest.raises(EngineLostError, match=r"^first: the engine process ended \(signal"):
            executor.await_responses()
        assert reason.startswith("first: ")
    executor.kill("third")


def test_engine_killed_while_it_loads_is_a_loss_that_is_made_good() -> None:
    pids: list[int] = []

    def kill(fraction: float, text: str) -> None:
        if text.startswith("pid"):
            pids.append(int(text.split()[1]))
            os.kill(pids[-1], signal.SIGKILL)

    start = kinds("counting", "slow_load", "dying_load", "slow_load", "counting", on_progress=kill)
    with supervised(start) as supervisor:
        sigkill(supervisor)
        executor = supervisor.restart("killed", NEVER)
        assert executor is not None
        id = executor.enqueue_request(request(2))
        assert tokens(collect(remote(supervisor), [id]), id) == [0, 1]
        assert len(pids) == 2
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("by", ["stop", "shutdown"])
def test_load_that_nobody_wants_any_more_ends(by: str) -> None:
    loading, pids, results = threading.Event(), [], []

    def note(fraction: float, text: str) -> None:
        if text.startswith("pid"):
            pids.append(int(text.split()[1]))
            loading.set()

    with supervised(kinds("counting", "slow_load", on_progress=note)) as supervisor:
        stop = threading.Event()
        sigkill(supervisor)
        thread = threading.Thread(target=lambda: results.append(supervisor.restart("lost", stop)))
        thread.start()
        assert loading.wait(LIMIT_S)
        if by == "stop":
            stop.set()
        else:
            supervisor.shutdown()
            assert not is_running(pids[0])
        thread.join(LIMIT_S)
        assert results == [None]
        assert not is_running(pids[0])
        assert not supervisor.executor.can_enqueue_requests()


def test_engine_that_ends_during_shutdown() -> None:
    with supervised(kinds("stuck_shutdown")) as supervisor:
        pid = remote(supervisor).pid
        closers = [threading.Thread(target=supervisor.shutdown) for _ in range(2)]
        for thread in closers:
            thread.start()
        time.sleep(0.05)
        supervisor.kill("gone already")  # a supervisor that shuts down does not care
        os.kill(pid, signal.SIGKILL)
        for thread in closers:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert not is_running(pid)


# -- an engine that fails inside a process that lives --------------------------------------------


def test_engine_that_fails_for_good_takes_its_process_along_and_keeps_its_errors() -> None:
    with engine("broken", step_s=0.005) as executor:
        ids = executor.enqueue_requests([request(1000, client_id=i) for i in range(3)])
        executor.await_responses()
        ids.append(executor.enqueue_request(request(1000, first=FAIL_TOKEN)))
        responses, reason = lost(executor)
        assert "engine process: the device is lost (code 719)" in reason
        assert "exit code 5" in reason
        errors = [r for r in responses if r.has_error()]
        assert [r.request_id for r in errors] == ids
        assert all(r.error_msg == reason for r in errors)
        assert tokens(responses, ids[-1]) == [0], "what was computed comes before the loss"


def test_what_an_engine_computed_before_it_failed_is_not_lost_with_it() -> None:
    with engine("late_broken", step_s=0.002) as executor:
        id = executor.enqueue_request(request(1000))
        responses, reason = lost(executor)
        assert tokens(responses, id) == [0, 1]
        assert "the device is lost (code 719)" in reason


def test_request_that_meets_a_failed_engine_is_lost_with_it() -> None:
    """It is on its way while the engine fails, so the engine refuses it."""
    for _ in range(5):
        with engine("broken") as executor:
            ids = [executor.enqueue_request(request(1000, first=FAIL_TOKEN))]
            try:
                while True:
                    ids.append(executor.enqueue_request(request(2)))
            except EngineLostError:
                pass
            responses, _ = lost(executor)
            errors = [r for r in responses if r.has_error()]
            assert errors
            for response in errors:  # a queue that was full before is a request's own
                assert "engine process ended" in response.error_msg or "queue" in response.error_msg
            finals = [r.request_id for r in responses if r.has_error() or r.result.is_final]
            assert sorted(finals) == ids


def test_sticky_device_error_fails_two_steps_and_then_the_engine() -> None:
    with supervised(kinds("sticky")) as supervisor:
        executor = remote(supervisor)
        for first in (FAIL_TOKEN, 1):
            (response,) = collect(executor, [executor.enqueue_request(request(first=first))])
            assert response.error_msg.startswith("Encountered an error in forward function")
            assert executor.can_enqueue_requests()
        id = executor.enqueue_request(request(first=2))
        responses, reason = lost(executor)
        assert [r.request_id for r in responses] == [id]
        assert "3 steps failed in a row" in reason
        assert "CUDA error: device-side assert triggered Compile with DSA" in reason
        fresh = supervisor.restart(reason, NEVER)
        assert fresh is not None
        id = fresh.enqueue_request(request(2))
        assert tokens(collect(remote(supervisor), [id]), id) == [4, 5]


def test_a_checkpoint_that_went_away_is_given_up_with_the_engines_words(tmp_path: Path) -> None:
    clock = MonotonicClock()
    start = kinds("counting", "failing_load")
    supervisor = EngineSupervisor(
        start, max_restarts=1, window_s=60, clock=clock, sleep=lambda s: None
    )
    remote(supervisor).kill("it hangs")
    with pytest.raises(EngineError, match=r"lost 2 times.*no checkpoint in /nowhere"):
        supervisor.restart("it hangs", NEVER)
    supervisor.shutdown()
