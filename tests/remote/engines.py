"""Engines for the far end of the channel, one factory per behaviour.

Each is named by `module:function` and loaded by the host, so what is tested is the real process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tests.inflight.paces import Timed
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError
from tokenflow.executor.api import (
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    Request,
    Response,
    Result,
)
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.factory import GatedRunner
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheRemovedData,
    KvLocation,
)
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import script_by_name

OnProgress = Callable[[float, str], None]
BeforeStep = Callable[[], None]

CRASH_TOKEN = 666  # a prompt that starts with it ends the process in the next step
FAIL_TOKEN = 667  # a prompt that starts with it makes `broken` fail for good in the next step
MAX_QUEUE = 1000


class CountingEngine:
    """Streams 0, 1, 2 … to every request, one token a step, in a thread of its own.

    The prompt decides about mischief: CRASH_TOKEN kills the process in the middle of a step.
    """

    def __init__(self, step_s: float, before_step: BeforeStep) -> None:
        self._step_s = step_s
        self._before_step = before_step
        self._condition = threading.Condition()
        self._active: dict[int, list[Any]] = {}
        self._cancelled: list[int] = []
        self._ready: deque[Response] = deque()
        self._stats: list[IterationStats] = []
        self._last_id = 7000  # unlike the proxy's ids
        self._iter = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def enqueue_request(self, request: Request) -> int:
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        with self._condition:
            if len(self._active) + len(requests) > MAX_QUEUE:  # all or none, as the surface says
                raise RuntimeError(f"Maximum queue size of {MAX_QUEUE} has been reached")
            ids = []
            for request in requests:
                self._last_id += 3
                self._active[self._last_id] = [request, 0]
                ids.append(self._last_id)
            self._condition.notify_all()
            return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        with self._condition:
            seconds = None if timeout is None else timeout.total_seconds()
            self._condition.wait_for(lambda: bool(self._ready) or self._closed, seconds)
            if self._closed:
                raise RuntimeError("shut down")
            responses = list(self._ready)
            self._ready.clear()
            return responses

    def get_num_responses_ready(self) -> int:
        return len(self._ready)

    def cancel_request(self, id: int) -> None:
        with self._condition:
            self._cancelled.append(id)
            self._condition.notify_all()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        with self._condition:
            stats, self._stats = self._stats, []
            return stats

    def can_enqueue_requests(self) -> bool:
        return not self._closed

    def get_kv_cache_event_manager(self) -> Any | None:
        return None

    def get_kv_tiering(self) -> Any | None:
        return None

    def shutdown(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._active) or self._closed)
                if self._closed:
                    return
            self._before_step()
            if self._step_s:
                time.sleep(self._step_s)
            with self._condition:
                self._step()
                self._condition.notify_all()

    def _step(self) -> None:
        self._iter += 1
        for id in self._cancelled:
            if self._active.pop(id, None) is not None:
                self._ready.append(_response(id, [], FinishReason.CANCELLED))
        self._cancelled.clear()
        for id, entry in list(self._active.items()):
            request, count = entry
            if request.input_token_ids[0] == CRASH_TOKEN:
                sys.stderr.write("about to crash in a step\n")
                os.kill(os.getpid(), signal.SIGKILL)
            entry[1] = count + 1
            done = count + 1 == request.max_tokens
            reason = FinishReason.LENGTH if done else FinishReason.NOT_FINISHED
            self._ready.append(_response(id, [count], reason, client_id=request.client_id))
            if done:
                del self._active[id]
        self._stats.append(stats_of(self._iter, len(self._active)))


def _response(
    id: int, tokens: list[int], reason: FinishReason, client_id: int | None = None
) -> Response:
    final = reason is not FinishReason.NOT_FINISHED
    return Response(
        request_id=id,
        client_id=client_id,
        payload=Result(
            is_final=final,
            is_sequence_final=final,
            output_token_ids=[tokens],
            finish_reasons=[reason],
            log_probs=[[-0.5 * token for token in tokens]],
        ),
    )


def stats_of(iteration: int, num_active: int) -> IterationStats:
    return IterationStats(
        iter=iteration,
        iter_latency_ms=0.0,
        num_active_requests=num_active,
        num_queued_requests=0,
        num_completed_requests=0,
        max_num_active_requests=num_active,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=1, free_num_blocks=1, used_num_blocks=0, tokens_per_block=1
        ),
        inflight_batching_stats=InflightBatchingStats(
            num_scheduled_requests=num_active,
            num_context_requests=0,
            num_gen_requests=num_active,
            num_paused_requests=0,
            num_ctx_tokens=0,
        ),
    )


def _info(config: ServingConfig) -> EngineInfo:
    return EngineInfo.from_config(config, vocab_size=1000)


def counting(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """The well-behaved one."""
    on_progress(0.5, "counting up")
    on_progress(1.0, "counted")
    return CountingEngine(config.scripted_step_s, before_step), _info(config)


def failing_load(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Cannot be created."""
    raise FileNotFoundError("no checkpoint in /nowhere")


def exiting_load(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """A library that calls sys.exit."""
    sys.exit("licence check failed")


def dying_load(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Ends without a word on the channel."""
    sys.stderr.write("reading shard 3\n")
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    raise AssertionError("unreachable")


def slow_load(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Says so and then takes for ever."""
    on_progress(0.25, f"pid {os.getpid()}")
    time.sleep(600)
    raise AssertionError("unreachable")


def garbage(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Writes nonsense into the channel once it has been ready for a moment."""
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    threading.Timer(0.3, os.write, (fd, b"\x05\x00\x00\x00nonsense, and more of it")).start()
    return counting(config, on_progress=on_progress, before_step=before_step)


def oversize(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Announces a frame larger than any message may be."""
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    threading.Timer(0.3, os.write, (fd, b"\xff\xff\xff\xff")).start()
    return counting(config, on_progress=on_progress, before_step=before_step)


class StuckEngine(CountingEngine):
    """Never comes back from shutdown."""

    def shutdown(self) -> None:
        time.sleep(600)


def stuck_shutdown(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Must be terminated; ignores SIGTERM too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return StuckEngine(config.scripted_step_s, before_step), _info(config)


class RefusingEngine(CountingEngine):
    """Its queue is always full."""

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        raise RuntimeError("Maximum queue size of 0 has been reached, please try again later")


def refusing(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Refuses every request."""
    return RefusingEngine(config.scripted_step_s, before_step), _info(config)


class BrokenEngine(CountingEngine):
    """Fails for good: each request gets the token of the step and then an error, at the moment at
    which the engine stops taking requests."""

    _broken = False

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        if self._broken:
            raise RuntimeError("nothing more will be taken")
        return super().enqueue_requests(requests)

    def can_enqueue_requests(self) -> bool:
        with self._condition:
            return not self._closed and not self._broken

    def _step(self) -> None:
        super()._step()
        if any(request.input_token_ids[0] == FAIL_TOKEN for request, _ in self._active.values()):
            self._fail()

    def _fail(self) -> None:
        self._broken = True
        for id in self._active:
            self._ready.append(Response(request_id=id, error="the device is lost\n(code 719)"))
        self._active.clear()


def broken(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Gives what it computed, then errors for the rest, and then refuses everything."""
    return BrokenEngine(config.scripted_step_s, before_step), _info(config)


class LateBrokenEngine(BrokenEngine):
    """Computes a second token and fails when it is asked whether it takes requests: after what was
    ready before was taken from it."""

    def can_enqueue_requests(self) -> bool:
        with self._condition:
            if any(count == 1 for _, count in self._active.values()):
                CountingEngine._step(self)
                self._fail()
        return super().can_enqueue_requests()

    def _step(self) -> None:
        if all(count == 0 for _, count in self._active.values()):
            CountingEngine._step(self)


def late_broken(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[CountingEngine, EngineInfo]:
    """Fails between two looks of the host."""
    return LateBrokenEngine(config.scripted_step_s, before_step), _info(config)


class StickyRunner(ScriptedRunner):
    """A device that never works again after the step in which FAIL_TOKEN was in a prompt."""

    _broken = False

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        self._broken |= any(FAIL_TOKEN in chunk.token_ids for chunk in chunks)
        if self._broken:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with DSA")
        return super().forward(chunks)


def sticky(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[InflightExecutor, EngineInfo]:
    """The embedded engine on a device with a sticky error."""
    runner = StickyRunner(script_by_name("counting", 1000), 1000, step_s=config.scripted_step_s)
    return InflightExecutor(GatedRunner(runner, before_step), config.executor_config()), _info(
        config
    )


class RecordedKv:
    """Event manager and KvTiering in one: each step is one event, each hint the next one, with what
    was asked as its hashes, and so is a request for everything anew. `locate` never comes back for
    the prefix (0,), fails for (1,), and answers with the length of any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[KVCacheEvent] = []
        self._num_events = 0
        self.say(KVCacheCreatedData([10, 20]))

    def say(self, data: KVCacheEventData) -> None:
        with self._lock:
            self._events.append(KVCacheEvent(self._num_events, data))
            self._num_events += 1

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        assert timeout_ms == 0
        with self._lock:
            events, self._events = self._events, []
        return events

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        if list(token_ids) == [0]:
            time.sleep(600)
        if list(token_ids) == [1]:
            raise EngineError("not today")
        return KvLocation(num_tokens=len(token_ids), num_device_blocks=cache_salt_id or 0)

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        self.say(KVCacheRemovedData([1, max_blocks, cache_salt_id or 0, *token_ids]))

    def request_snapshot(self) -> None:
        self.say(KVCacheRemovedData([4]))

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self.say(KVCacheRemovedData([2, cache_salt_id or 0, *token_ids]))

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        self.say(KVCacheRemovedData([3, cache_salt_id or 0, *token_ids]))


class KvEngine(CountingEngine):
    """Counts, and tells of its KV."""

    def __init__(self, step_s: float, before_step: BeforeStep) -> None:
        self._kv = RecordedKv()
        super().__init__(step_s, before_step)

    def get_kv_cache_event_manager(self) -> RecordedKv:
        return self._kv

    def get_kv_tiering(self) -> RecordedKv:
        return self._kv

    def _step(self) -> None:
        super()._step()
        self._kv.say(KVCacheRemovedData([0, self._iter]))


def with_kv(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[KvEngine, EngineInfo]:
    """KV events and KvTiering."""
    return KvEngine(config.scripted_step_s, before_step), _info(config)


def slow_copies(
    config: ServingConfig, *, on_progress: OnProgress, before_step: BeforeStep
) -> tuple[InflightExecutor, EngineInfo]:
    """The embedded engine; a block takes 0.6 s between the tiers."""
    pace = Timed(time.monotonic, time.sleep, 0.6)
    runner = ScriptedRunner(script_by_name("counting", 1000), 1000, pace=pace)
    return InflightExecutor(GatedRunner(runner, before_step), config.executor_config()), _info(
        config
    )
