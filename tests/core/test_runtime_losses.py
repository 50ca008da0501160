"""The runtime's threads when engines die, hang and come again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.core.test_runtime import CONFIG, SCRIPT, VOCAB_SIZE, Sink
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.api import Executor, Request, Response, SamplingConfig
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.responses import error_response
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected
from tokenflow.runtime import Runtime
from tokenflow.types import EndReason, GenerateRequest

STEP_S = 0.005


class MortalExecutor(InflightExecutor):
    """Dies like an engine in a process of its own: what it had said is heard, then an error for
    each unfinished request, then every wait raises. While `stuck` it takes no further step."""

    def __init__(self, config: ServingConfig) -> None:
        self.stuck = threading.Event()
        self.lost: str | None = None
        runner = ScriptedRunner(SCRIPT, VOCAB_SIZE, step_s=STEP_S, sleep=self._sleep)
        super().__init__(runner, config.executor_config())

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        while self.stuck.is_set():
            time.sleep(seconds)

    def die(self, reason: str = "signal SIGKILL") -> None:
        with self._lock:
            self.lost = reason
            errors = [error_response(i, r, reason) for i, r in self._live.items()]
            self._live.clear()
            self._responses.extend(errors)
            self._ready.notify_all()
        self.stuck.clear()

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if self.lost is not None:
            raise EngineLostError(self.lost)
        return super().enqueue_requests(requests)

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        responses = super().await_responses(timedelta(milliseconds=20))
        if not responses and self.lost is not None:
            raise EngineLostError(self.lost)
        return responses

    def can_enqueue_requests(self) -> bool:
        return self.lost is None and super().can_enqueue_requests()

    def _publish(self, responses: list[Response], stats: object) -> None:
        if self.lost is None:
            super()._publish(responses, stats)  # type: ignore[arg-type]


class Keeper:
    """Starts another engine at once, at most `num_restarts` times."""

    def __init__(self, config: ServingConfig, num_restarts: int = 100) -> None:
        self.config = config
        self.executor = MortalExecutor(config)
        self.gone: list[MortalExecutor] = []
        self.may_start = threading.Event()
        self.may_start.set()
        self._num_restarts = num_restarts

    def restart(self, reason: str, stop: threading.Event) -> Executor | None:
        self.gone.append(self.executor)
        if len(self.gone) > self._num_restarts:
            raise EngineError(f"lost {len(self.gone)} times, last: {reason}")
        while not self.may_start.wait(0.01):
            if stop.is_set():
                return None
        self.executor = MortalExecutor(self.config)
        return self.executor

    def kill(self, reason: str) -> bool:
        self.executor.die(reason)
        return True


class Kept:
    """A runtime with a keeper."""

    def __init__(
        self,
        config: ServingConfig = CONFIG,
        num_restarts: int = 100,
        *,
        keeper_type: type[Keeper] = Keeper,
        sink: Sink | None = None,
    ) -> None:
        self.sink = sink or Sink()
        self.keeper = keeper_type(config, num_restarts)
        self.runtime = Runtime(self.keeper.executor, config, emit=self.sink, keeper=self.keeper)
        self.runtime.start()

    def submit(self, prompt: tuple[int, ...], max_tokens: int, **fields: object) -> int:
        return self.runtime.submit(
            GenerateRequest(
                request_id="r",
                input_token_ids=prompt,
                max_tokens=max_tokens,
                arrival_time=time.monotonic(),
                **fields,  # type: ignore[arg-type]
            )
        )

    def expect_whole(self, handle: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.sink.wait_ends([handle])
        assert self.sink.end(handle).end is EndReason.LENGTH, self.sink.end(handle).error
        assert self.sink.tokens(handle) == expected(SCRIPT, prompt, max_tokens)[0]

    def wait_gauge(self, name: str, value: object) -> None:
        deadline = time.monotonic() + 20.0
        while self._gauge(name) != value:
            assert time.monotonic() < deadline, f"{name} never became {value}"
            time.sleep(0.005)

    def _gauge(self, name: str) -> object:
        gauges = self.runtime.gauges()
        return getattr(gauges if hasattr(gauges, name) else gauges.counters, name)

    def close(self) -> None:
        self.runtime.shutdown(5.0)
        for executor in (*self.keeper.gone, self.keeper.executor):
            executor.stuck.clear()
            executor.shutdown()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_streams_go_on_after_a_loss_and_newcomers_wait_for_the_next_engine() -> None:
    kept = Kept()
    handles = [kept.submit((n + 1,), 60, read_rate=50.0) for n in range(4)]
    kept.sink.wait_tokens(handles[0], 5)
    kept.keeper.may_start.clear()
    kept.keeper.executor.die()
    kept.wait_gauge("healthy", False)
    newcomer = kept.submit((9, 9), 5)
    gone = kept.submit((9, 8), 5)
    kept.runtime.cancel(gone)
    kept.sink.wait_ends([gone])
    kept.keeper.may_start.set()
    kept.expect_whole(newcomer, (9, 9), 5)
    for n, handle in enumerate(handles):
        kept.expect_whole(handle, (n + 1,), 60)
    kept.wait_gauge("healthy", True)
    counters = kept.runtime.gauges().counters
    assert (counters.num_engine_losses, counters.num_failed) == (1, 0)
    kept.close()


def test_losses_at_random_moments_end_in_whole_streams_or_the_second_loss() -> None:
    kept = Kept()
    handles = {kept.submit((n + 1, n + 2), 100, read_rate=50.0): (n + 1, n + 2) for n in range(8)}
    for wait_s in (0.0, 0.013, 0.2, 0.07, 0.3, 0.001):
        time.sleep(wait_s)
        kept.keeper.executor.die()
    kept.sink.wait_ends(list(handles))
    for handle, prompt in handles.items():
        tokens = kept.sink.tokens(handle)
        assert tokens == expected(SCRIPT, prompt, len(tokens))[0]
        end = kept.sink.end(handle)
        if end.end is EndReason.ERROR:
            assert "a second time" in (end.error or "")
        else:
            assert len(tokens) == 100
    kept.expect_whole(kept.submit((7,), 20), (7,), 20)
    kept.close()


def test_what_cannot_be_resumed_is_told_at_once() -> None:
    kept = Kept()
    decay = SamplingConfig(top_p=0.9, top_p_decay=0.9)
    handle = kept.submit((1,), 200, sampling_config=decay)
    kept.sink.wait_tokens(handle, 3)
    kept.keeper.may_start.clear()
    kept.keeper.executor.die()
    kept.sink.wait_ends([handle], timeout_s=2.0)
    assert "top_p decay" in (kept.sink.end(handle).error or "")
    kept.keeper.may_start.set()
    kept.close()


def test_too_many_losses_make_it_unhealthy_for_good() -> None:
    kept = Kept(num_restarts=1)
    handle = kept.submit((1,), 200)
    kept.sink.wait_tokens(handle, 3)
    kept.keeper.executor.die()
    kept.sink.wait_tokens(handle, 8)
    waiting = [kept.submit((n + 2,), 200) for n in range(6)]
    kept.sink.wait_tokens(waiting[0], 1)
    kept.keeper.executor.die()
    kept.sink.wait_ends([handle, *waiting])
    later = kept.submit((5,), 5)
    kept.sink.wait_ends([later])
    assert kept.sink.end(later).error == "unhealthy: lost 2 times, last: signal SIGKILL"
    assert kept.sink.end(later).retryable
    kept.wait_gauge("healthy", False)
    kept.close()


def test_a_stuck_engine_is_killed_and_replaced() -> None:
    kept = Kept(replace(CONFIG, engine_stall_timeout_s=1.0))
    handle = kept.submit((1,), 100)
    kept.sink.wait_tokens(handle, 5)
    stuck = kept.keeper.executor
    stuck.stuck.set()
    kept.expect_whole(handle, (1,), 100)
    assert "engine_stall_timeout_s" in (stuck.lost or "")
    assert kept.runtime.gauges().counters.num_engine_losses == 1
    kept.close()


def test_a_stuck_engine_that_cannot_be_killed_ends_the_service() -> None:
    sink = Sink()
    executor = MortalExecutor(CONFIG)
    runtime = Runtime(executor, replace(CONFIG, engine_stall_timeout_s=1.0), emit=sink)
    runtime.start()
    request = GenerateRequest(
        request_id="r", input_token_ids=(1,), max_tokens=200, arrival_time=time.monotonic()
    )
    handle = runtime.submit(request)
    sink.wait_tokens(handle, 3)
    executor.stuck.set()
    sink.wait_ends([handle])
    assert "the engine is stuck" in (sink.end(handle).error or "")
    assert not runtime.gauges().healthy
    executor.stuck.clear()
    runtime.shutdown(5.0)
    executor.shutdown()


def test_a_shutdown_while_there_is_no_engine() -> None:
    kept = Kept()
    handle = kept.submit((1,), 200)
    kept.sink.wait_tokens(handle, 3)
    kept.keeper.may_start.clear()
    kept.keeper.executor.die()
    kept.wait_gauge("healthy", False)
    start = time.monotonic()
    kept.close()
    assert time.monotonic() - start < 4.0
    assert kept.sink.end(handle).error == "the server is shutting down"


def test_a_client_holds_its_stream_through_a_loss() -> None:
    kept = Kept()
    handle = kept.submit((1,), 50)
    kept.sink.wait_tokens(handle, 3)
    kept.runtime.pause(handle)
    kept.wait_gauge("num_paused", 1)
    kept.keeper.executor.die()
    kept.wait_gauge("num_engine_losses", 1)
    kept.wait_gauge("healthy", True)
    num_tokens = len(kept.sink.tokens(handle))
    time.sleep(0.1)
    assert len(kept.sink.tokens(handle)) == num_tokens
    assert kept.runtime.gauges().num_held == 1
    kept.runtime.resume(handle)
    kept.expect_whole(handle, (1,), 50)
    kept.close()
