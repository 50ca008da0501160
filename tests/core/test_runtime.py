"""The runtime's threads on the real embedded engine: nothing lost, nothing hangs, nothing leaks."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError
from tokenflow.executor.api import Response
from tokenflow.holds import HoldRefusal
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random
from tokenflow.runtime import Runtime
from tokenflow.types import Decision, EndReason, GenerateRequest, Snapshot, TokenEvent

VOCAB_SIZE = 211
SCRIPT = pseudo_random(VOCAB_SIZE)
CONFIG = ServingConfig(
    engine="scripted",
    batch_scheduler_policy="guaranteed_no_evict",
    max_batch_size=4,
    max_num_tokens=64,
    tokens_per_block=8,
    max_tokens_in_paged_kv_cache=1024,
    max_seq_len=256,
    max_queue_size=500,
    plan_interval_s=0.005,
    min_quantum_s=0.0,
)


class Sink:
    """Collects events by handle and lets a test wait for ends."""

    def __init__(self) -> None:
        self.events: dict[int, list[TokenEvent]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, event: TokenEvent) -> None:
        with self._changed:
            self.events[event.handle].append(event)
            self._changed.notify_all()

    def wait_ends(self, handles: list[int], timeout_s: float = 20.0) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(self.events[h] and self.events[h][-1].end for h in handles), timeout_s
            )
        assert done, "some requests never ended"

    def wait_tokens(self, handle: int, count: int, timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(handle)) >= count, timeout_s)

    def tokens(self, handle: int) -> list[int]:
        return [t for event in self.events[handle] for t in event.token_ids]

    def end(self, handle: int) -> TokenEvent:
        ends = [event for event in self.events[handle] if event.end]
        assert len(ends) == 1
        assert ends[0] is self.events[handle][-1]
        return ends[0]


class Served:
    def __init__(self, config: ServingConfig = CONFIG, step_s: float = 0.0) -> None:
        self.sink = Sink()
        runner = ScriptedRunner(SCRIPT, VOCAB_SIZE, step_s=step_s)
        self.executor = InflightExecutor(runner, config.executor_config())
        self.runtime = Runtime(self.executor, config, emit=self.sink)
        self.runtime.start()

    def submit(self, prompt: tuple[int, ...], max_tokens: int, **fields: object) -> int:
        return self.runtime.submit(
            GenerateRequest(
                request_id="same-id",
                input_token_ids=prompt,
                max_tokens=max_tokens,
                arrival_time=time.monotonic(),
                **fields,  # type: ignore[arg-type]
            )
        )

    def close(self) -> None:
        self.runtime.shutdown(5.0)
        self.executor.shutdown()


@pytest.fixture
def served() -> Iterator[Served]:
    before = set(threading.enumerate())
    server = Served()
    yield server
    server.close()
    assert set(threading.enumerate()) <= before


def test_many_requests_under_pressure_get_exactly_their_tokens(served: Served) -> None:
    rng = random.Random(3)
    asked: dict[int, tuple[tuple[int, ...], int]] = {}
    for n in range(60):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))
        max_tokens = rng.randint(1, 60)
        asked[served.submit(prompt, max_tokens, read_rate=rng.choice([5.0, 50.0]))] = (
            prompt,
            max_tokens,
        )
        if n % 10 == 0:
            time.sleep(0.01)
    served.sink.wait_ends(list(asked))
    for handle, (prompt, max_tokens) in asked.items():
        assert served.sink.tokens(handle) == expected(SCRIPT, prompt, max_tokens)[0]
        assert served.sink.end(handle).end is EndReason.LENGTH
    gauges = served.runtime.gauges()
    assert (gauges.counters.num_ok, gauges.num_waiting, gauges.num_paused) == (60, 0, 0)


def test_cancel_from_many_threads_ends_each_once(served: Served) -> None:
    handles = [served.submit((n + 1,), 200) for n in range(30)]
    threads = [threading.Thread(target=served.runtime.cancel, args=(h,)) for h in handles * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served.sink.wait_ends(handles)
    for handle in handles:
        assert served.sink.end(handle).end in (EndReason.CANCELLED, EndReason.LENGTH)


def test_shutdown_with_streams_in_flight_answers_all_of_them() -> None:
    served = Served(step_s=0.01)
    handles = [served.submit((n + 1,), 200) for n in range(12)]
    served.sink.wait_tokens(handles[0], 3)
    served.close()
    for handle in handles:
        event = served.sink.end(handle)
        assert event.end is EndReason.ERROR
        assert event.error == "the server is shutting down"
    with pytest.raises(EngineError):
        served.submit((1,), 1)


def test_a_planner_that_raises_ends_every_request_and_later_ones() -> None:
    def broken(snapshot: Snapshot) -> Decision:
        raise RuntimeError("no idea")

    sink = Sink()
    executor = InflightExecutor(ScriptedRunner(SCRIPT, VOCAB_SIZE), CONFIG.executor_config())
    runtime = Runtime(executor, CONFIG, emit=sink, planner=broken)
    runtime.start()
    request = GenerateRequest(
        request_id="r", input_token_ids=(1,), max_tokens=2, arrival_time=time.monotonic()
    )
    handles = [runtime.submit(request)]
    sink.wait_ends(handles)
    handles.append(runtime.submit(request))
    sink.wait_ends(handles)
    assert all("no idea" in (sink.end(h).error or "") for h in handles)
    assert not runtime.gauges().healthy
    assert runtime.gauges().counters.num_failed == 2
    runtime.shutdown(5.0)
    executor.shutdown()


def test_a_pause_that_fails_is_answered_all_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    handle = served.submit((1, 2, 3), 200)
    monkeypatch.setattr("tokenflow.holds.Holds.hold_all", fail)
    replies: queue.SimpleQueue[HoldRefusal | None] = queue.SimpleQueue()
    served.runtime.pause_all((handle,), replies.put)
    assert replies.get(timeout=20) is HoldRefusal.ENDED
    served.sink.wait_ends([handle])


class DyingExecutor(InflightExecutor):
    """Its process is "gone" from the moment `die` is called."""

    dead = False

    def die(self) -> None:
        self.dead = True

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        if self.dead:
            raise EngineError("killed by signal 9")
        return super().await_responses(timedelta(milliseconds=20))

    def can_enqueue_requests(self) -> bool:
        return not self.dead and super().can_enqueue_requests()


def test_a_lost_engine_ends_running_waiting_and_later_requests() -> None:
    sink = Sink()
    runner = ScriptedRunner(SCRIPT, VOCAB_SIZE, step_s=0.01)
    executor = DyingExecutor(runner, CONFIG.executor_config())
    runtime = Runtime(executor, replace(CONFIG, min_quantum_s=60.0), emit=sink)
    runtime.start()
    handles = [
        runtime.submit(
            GenerateRequest(
                request_id="r",
                input_token_ids=(n + 1,),
                max_tokens=200,
                arrival_time=time.monotonic(),
            )
        )
        for n in range(8)
    ]
    try:
        sink.wait_tokens(handles[0], 3)
        executor.die()
        sink.wait_ends(handles)
        assert all("killed by signal 9" in (sink.end(h).error or "") for h in handles)
    finally:
        runtime.shutdown(5.0)
        executor.shutdown()


def test_an_idle_runtime_uses_no_processor(served: Served) -> None:
    served.sink.wait_ends([served.submit((1,), 3)])
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.2
