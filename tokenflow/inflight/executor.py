"""The embedded engine as an Executor: one thread around the in-flight batcher.

Owns the engine's thread, its inbox (requests and cancels, in the order of the calls) and the ready
responses. Semantics are those of executor/api.py; TensorRT-LLM facts that matter here:

- the responses of a step become visible together, with its statistics;
- `enqueue_request` raises RuntimeError when `max_queue_size` requests wait (None: no bound), and
  `enqueue_requests` takes all or none;
- an idle engine sleeps on a condition;
- after `shutdown` was called every other call raises, a waiting `await_responses` included, and
  responses nobody fetched are gone.

One lock guards what callers and the thread share; it is never held while the batcher works. The
inbox stays bounded by the requests alive: a cancel of an id whose final response is ready, or that
was cancelled already, is dropped at once.

The engine fails for good if the batcher raises (a bug, or a runner that cannot even forget a
request), or if MAX_FAILED_STEPS steps fail in a row (a sticky device error makes every step fail).
Every request alive then gets an error response, all at the moment at which `can_enqueue_requests`
turns False, and further calls raise EngineLostError as those of an engine whose process is gone do.
When the engine's thread has ended, the runner and its memory are let go.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from tokenflow.clock import Clock, MonotonicClock
from tokenflow.errors import EngineLostError
from tokenflow.executor.api import ExecutorConfig, IterationStats, Request, Response
from tokenflow.executor.kv_api import KVCacheEventManager, KvTiering
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.responses import error_response
from tokenflow.inflight.runner import Runner
from tokenflow.inflight.tiering import EngineTiering, KvCommand

logger = logging.getLogger("tokenflow")

MAX_FAILED_STEPS = 3

_POLL_FLIGHTS_S = 0.002
"""An idle engine looks so often for the end of copies; beside steps it looks at each."""


class InflightExecutor:
    """Implements `executor.api.Executor` on a runner.

    The runner is used by the constructor (KV pools) and from then on by the engine's thread only.
    num_host_blocks, block_bytes: blocks of the host pool, and bytes of one block.
    Raises ConfigError for a configuration that this engine cannot serve.
    """

    def __init__(self, runner: Runner, config: ExecutorConfig, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._batcher = InflightBatcher(runner, config)
        self._transport = runner.transport if self._batcher.num_host_blocks else None
        self.num_host_blocks = self._batcher.num_host_blocks
        self.block_bytes = self._batcher.block_bytes
        self._events = self._batcher.kv.events
        self._tiering = EngineTiering(self._post_command) if config.kv_tiering else None
        self._max_queue_size = config.max_queue_size
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._inbox: deque[tuple[int, Request | None] | KvCommand] = deque()
        self._live: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._num_queued = 0
        self._next_id = 1
        self._responses: deque[Response] = deque()
        self._stats: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations)
        self._is_shutdown = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)
        self._thread.start()

    def enqueue_request(self, request: Request) -> int:
        """See Executor."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """See Executor. Raises RuntimeError when not all of them fit in the queue, EngineLostError
        when the engine has failed for good."""
        with self._lock:
            self._check_running()
            if self._failure is not None:
                raise EngineLostError(self._failure)
            limit = self._max_queue_size
            if limit is not None and self._num_queued + len(requests) > limit:
                raise RuntimeError(
                    f"Maximum queue size of {limit} has been reached, please try again later"
                )
            ids = list(range(self._next_id, self._next_id + len(requests)))
            self._next_id += len(requests)
            self._num_queued += len(requests)
            for request_id, request in zip(ids, requests, strict=True):
                self._live[request_id] = request
                self._inbox.append((request_id, request))
            self._work.notify()
        return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """See Executor. Raises EngineLostError when the engine has failed for good and every
        response has been handed out."""
        seconds = None if timeout is None else timeout.total_seconds()
        with self._lock:
            self._ready.wait_for(self._has_news, seconds)
            self._check_running()
            if self._failure is not None and not self._responses:
                raise EngineLostError(self._failure)
            responses = list(self._responses)
            self._responses.clear()
        return responses

    def get_num_responses_ready(self) -> int:
        """See Executor."""
        with self._lock:
            self._check_running()
            return len(self._responses)

    def cancel_request(self, id: int) -> None:
        """See Executor."""
        with self._lock:
            self._check_running()
            if id in self._live and id not in self._cancelled:
                self._cancelled.add(id)
                self._inbox.append((id, None))
                self._work.notify()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """See Executor; at most `iter_stats_max_iterations`, older ones are lost."""
        with self._lock:
            self._check_running()
            stats = list(self._stats)
            self._stats.clear()
        return stats

    def can_enqueue_requests(self) -> bool:
        """See Executor."""
        with self._lock:
            return not self._is_shutdown and self._failure is None

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """See Executor."""
        return self._events

    def get_kv_tiering(self) -> KvTiering | None:
        """See Executor."""
        return self._tiering

    def shutdown(self) -> None:
        """See Executor. Returns when the engine's thread has ended."""
        with self._lock:
            self._is_shutdown = True
            self._work.notify_all()
            self._ready.notify_all()
        self._thread.join()

    def _check_running(self) -> None:
        if self._is_shutdown:
            raise RuntimeError("Shutdown called, the executor takes no further calls")

    def _end_error(self) -> Exception:
        """Why the engine's thread has ended, for who still asks."""
        if self._failure is not None:
            return EngineLostError(self._failure)
        return RuntimeError("The executor was shut down before it answered")

    def _has_news(self) -> bool:
        return bool(self._responses) or self._is_shutdown or self._failure is not None

    def _run(self) -> None:
        try:
            self._step_until_end()
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(repr(error))
        finally:
            if self._tiering is not None:
                self._tiering.close(self._end_error)
            if self._transport is not None:
                self._transport.close()
            del self._batcher, self._transport  # only this thread uses them

    def _step_until_end(self) -> None:
        """Step while there is work, until shutdown or until the runner fails again and again."""
        while self._wait_for_work():
            had_flights = self._batcher.kv.has_flights
            self._publish(self._batcher.begin_step(self._clock.now()), None)
            self._batcher.forward()
            self._take_inbox()
            result = self._batcher.finish_step(self._clock.now())
            num_failed = self._batcher.num_failed_steps
            if num_failed >= MAX_FAILED_STEPS:
                self._fail(
                    f"{num_failed} steps failed in a row, the last one with: "
                    f"{self._batcher.last_failure}"
                )
                return
            stats = result.stats
            if stats is None and had_flights:  # an empty step may see the last of them end
                stats = self._batcher.poll(self._clock.now())
            self._publish(result.responses, stats)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread has to end."""
        while True:
            poll_s = _POLL_FLIGHTS_S if self._batcher.kv.has_flights else None
            with self._lock:
                due = self._work.wait_for(self._has_work, poll_s)
                stopping = self._is_shutdown
            if due:
                break
            stats = self._batcher.poll(self._clock.now())
            if stats is not None:
                self._publish([], stats)
        self._take_inbox()
        if stopping:
            self._batcher.drop_queued()
            return self._batcher.num_active > 0
        return True

    def _has_work(self) -> bool:
        return bool(self._inbox) or self._is_shutdown or self._batcher.has_work

    def _post_command(self, command: KvCommand) -> None:
        """Raises RuntimeError after shutdown. After a failure commands are left out: they are
        hints, or questions, which `EngineTiering.close` ends."""
        with self._lock:
            self._check_running()
            if self._failure is None:
                self._inbox.append(command)
                self._work.notify()

    def _take_inbox(self) -> None:
        with self._lock:
            inbox, self._inbox = self._inbox, deque()
        for item in inbox:
            if not isinstance(item, tuple):
                self._batcher.command(item)
            elif item[1] is None:
                self._batcher.cancel(item[0])
            else:
                self._batcher.enqueue(item[0], item[1])

    def _publish(self, responses: list[Response], stats: IterationStats | None) -> None:
        with self._lock:
            num_undelivered = sum(
                isinstance(item, tuple) and item[1] is not None for item in self._inbox
            )
            self._num_queued = self._batcher.num_queued + num_undelivered
            if stats is not None:
                self._stats.append(stats)
            for response in responses:
                if response.payload is None or response.payload.is_final:
                    del self._live[response.request_id]
                    self._cancelled.discard(response.request_id)
            if responses:
                self._responses.extend(responses)
                self._ready.notify_all()

    def _fail(self, reason: str) -> None:
        message = f"The engine failed and takes no more requests: {reason}"
        with self._lock:
            self._failure = message
            self._inbox.clear()
            self._num_queued = 0
            self._responses.extend(error_response(i, r, message) for i, r in self._live.items())
            self._live.clear()
            self._cancelled.clear()
            self._ready.notify_all()
