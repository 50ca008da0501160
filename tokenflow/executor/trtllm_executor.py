"""TensorRT-LLM's Executor behind our surface, once it runs.

Owns one `tensorrt_llm.bindings.executor.Executor` (TensorRT-LLM 1.2.x) and its habits; what is
written to it and read from it is in trtllm_values.py, what it has in hand in trtllm_requests.py.

Facts of TensorRT-LLM 1.2 that shape this file:
- responses are taken by one thread at a time, of all requests, in short waits;
- a cancel before the first token after an enqueue would poison the reuse cache: it is kept;
- the tokens of a step are ready before the statistics of the next one, so that who hears from those
  that requests were paused may still be handed tokens from before the pause;
- a failed step ends every active request with an error, and the next step is tried: after
  MAX_FAILED_STEPS of them in a row the engine is given up, and the end of its process is what
  makes the supervisor start another one; at once where it ended one in its context, of which
  blocks that were not computed are now kept for reuse, as after such a cancel;
- `shutdown` waits for active requests and no response can be fetched after it: so all are cancelled
  and their ends taken before it is called.

Weaker than the embedded engine, because the Executor does not tell: whether a request was paused by
the engine itself is known only after the iteration (until then a cancel may find it in the middle
of its context); a full window of the channel does not stop the engine's steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tokenflow.errors import EngineLostError
from tokenflow.executor.api import ExecutorConfig, IterationStats, Request, Response
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.kv_api import KVCacheEventManager, KvTiering
from tokenflow.executor.trtllm_engine import BuiltEngine
from tokenflow.executor.trtllm_events import TrtllmKvEvents
from tokenflow.executor.trtllm_gpus import GpuLocks
from tokenflow.executor.trtllm_requests import FailedSteps, LiveRequests, is_failed_step
from tokenflow.executor.trtllm_stats import StatsReader
from tokenflow.executor.trtllm_values import EventReader, RequestMaker

logger = logging.getLogger("tokenflow")

MAX_FAILED_STEPS = 3

_SLICE_S = 0.1  # of a wait for responses; a shutdown waits for the end of one
_SHORTEST_S = 0.001  # the binding counts in milliseconds
_DRAIN_S = 5.0


class TrtllmExecutor:
    """Implements `executor.api.Executor`, and `kv_api.KvPools`.

    executor: the binding's, running. limits: what it was started with. info: what it is; set once,
    by who started it.
    """

    info: EngineInfo

    def __init__(
        self,
        bindings: Any,
        executor: Any,
        built: BuiltEngine,
        limits: ExecutorConfig,
        locks: GpuLocks,
    ) -> None:
        self._executor = executor
        self._locks = locks
        self._requests = RequestMaker(bindings, built.vocab_size, built.logits_dtype, built.lora)
        self._lock = threading.Lock()  # what is known of requests; held over an enqueue
        self._awaiting = threading.Lock()  # one thread takes responses
        self._live = LiveRequests(built.tokens_per_block)
        self._num_waits = 0  # for responses, that have begun
        self._last_stale_wait = 0  # up to it, tokens may be from before the engine's last pause
        self._failed_steps = FailedSteps()
        self._reuses_blocks = limits.kv_cache_config.enable_block_reuse
        self._is_cache_spoiled = False  # it may give KV that was never computed
        self._failure: str | None = None
        self._is_closing = self._is_shutdown = False
        self._shutdown_lock = threading.Lock()
        manager = executor.get_kv_cache_event_manager()
        max_size = limits.kv_cache_config.event_buffer_max_size
        self._events = None
        if manager is not None and max_size:
            self._events = TrtllmKvEvents(manager, EventReader(bindings), max_size)
        self._stats = StatsReader(
            executor, self._events, built.block_bytes, limits.iter_stats_max_iterations
        )

    # -- requests ------------------------------------------------------------------------------

    def enqueue_request(self, request: Request) -> int:
        """See Executor."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """See Executor. Raises InvalidRequestError for a field that this TensorRT-LLM does not
        have, EngineLostError when the engine was given up."""
        made = [self._requests.make(request) for request in requests]
        with self._lock:  # an id is known here before its first response is looked at
            if self._is_closing:
                raise RuntimeError("Shutdown called, the executor takes no further requests")
            if self._failure is not None:
                raise EngineLostError(self._failure)
            ids = [int(id) for id in self._executor.enqueue_requests(made)]
            for id, request in zip(ids, requests, strict=True):
                self._live.add(id, request)
        return ids

    def cancel_request(self, id: int) -> None:
        """See Executor. Before the first token after the enqueue it is kept until that comes."""
        self._check_running()
        self._pull_stats()  # whom the engine paused by itself is in the middle of its context
        with self._lock:
            if self._failure is None and self._live.want_cancel(id):
                self._executor.cancel_request(id)

    # -- responses -----------------------------------------------------------------------------

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """See Executor. Raises EngineLostError when the engine was given up and every response was
        handed out."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            rest_s = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            if rest_s > 0:
                rest_s = max(rest_s, _SHORTEST_S)
            if self._is_closing:  # leave the turn to `shutdown`
                time.sleep(_SHORTEST_S)
                rest_s = min(rest_s, _SHORTEST_S)
            with self._awaiting:
                self._check_running()
                if self._failure is not None:
                    raise EngineLostError(self._failure)
                responses = self._take(timedelta(seconds=max(0.0, rest_s)))
            if responses or (end is not None and time.monotonic() >= end):
                return responses

    def get_num_responses_ready(self) -> int:
        """See Executor; those of requests that do not stream count as they come."""
        self._check_running()
        return 0 if self._failure is not None else int(self._executor.get_num_responses_ready())

    def _take(self, wait: timedelta) -> list[Response]:
        """What came; called with `_awaiting` held."""
        with self._lock:
            self._num_waits += 1
        given = self._executor.await_responses(timeout=wait)
        responses: list[Response] = []
        with self._lock:
            for response in given:
                mine = self._receive(response)
                if mine is not None:
                    responses.append(mine)
            num_failed = self._failed_steps.num_in_a_row
            if self._failure is None and self._is_cache_spoiled:
                why = "a step failed in the middle of a prompt, whose blocks would be reused"
                responses += self._give_up(f"{why}: {_last_error(responses)}")
            elif self._failure is None and num_failed >= MAX_FAILED_STEPS:
                why = f"{num_failed} steps failed in a row, the last one with"
                responses += self._give_up(f"{why}: {_last_error(responses)}")
        return responses

    def _receive(self, response: Any) -> Response | None:
        """Called with `_lock` held, while the last wait that has begun is the one that it came
        with."""
        id = int(response.request_id)
        if id not in self._live:
            return None
        if response.has_error():
            message = str(response.error_msg)
            if is_failed_step(message):
                self._failed_steps.failed(id, self._live.ids())
                if self._reuses_blocks and self._live.is_computing_context(id):
                    self._is_cache_spoiled = True
            return self._live.fail(id, message)
        result = response.result
        if result.output_token_ids and result.output_token_ids[0]:
            self._failed_steps.succeeded()
        is_stale = self._num_waits <= self._last_stale_wait
        mine, cancel_is_due = self._live.take(id, result, is_stale=is_stale)
        if cancel_is_due:
            self._executor.cancel_request(id)
        return mine

    def _give_up(self, why: str) -> list[Response]:
        """Every request alive ends now, and nothing is taken any more."""
        self._failure = f"The engine failed and takes no more requests: {why}"
        logger.error("%s", self._failure)
        return self._live.fail_all(self._failure)

    # -- statistics and events -----------------------------------------------------------------

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """See Executor, and `trtllm_stats.StatsReader` for what is an estimate."""
        self._check_running()
        self._pull_stats()
        return self._stats.take()

    def _pull_stats(self) -> None:
        if self._failure is None and self._stats.pull(self._mean_context_tokens):
            with self._lock:  # the next wait takes all that is ready
                is_one_ready = self._executor.get_num_responses_ready() > 0
                self._last_stale_wait = self._num_waits + is_one_ready
                self._live.paused_by_engine()

    def _mean_context_tokens(self) -> float:
        with self._lock:
            return self._live.mean_context_tokens()

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """See Executor; None in orchestrator mode, and without event_buffer_max_size."""
        return self._events

    def num_blocks_per_level(self) -> list[int]:
        """Sizes of [device, host], as KV events told them; [] if they did not."""
        return [] if self._events is None else self._events.num_blocks_per_level()

    def get_kv_tiering(self) -> KvTiering | None:
        """None: TensorRT-LLM's Executor has no call that moves KV."""
        return None

    @property
    def num_host_blocks(self) -> int:
        """See kv_api.KvPools."""
        return self.info.num_host_blocks

    @property
    def block_bytes(self) -> int:
        """See kv_api.KvPools."""
        return self.info.block_bytes

    # -- end -----------------------------------------------------------------------------------

    def has_request(self, id: int) -> bool:
        """True until the final response of a request was taken."""
        return id in self._live

    def can_enqueue_requests(self) -> bool:
        """See Executor."""
        if self._is_closing or self._failure is not None:
            return False
        return bool(self._executor.can_enqueue_requests())

    def shutdown(self) -> None:
        """See Executor. Cancels all and takes their ends, for a few seconds, before TensorRT-LLM is
        told to stop."""
        with self._shutdown_lock:
            if self._is_shutdown:
                return
            with self._lock:  # what an enqueue under way brings is known before all is cancelled
                self._is_closing = True
            if self._failure is None:
                self._drain()
            self._is_shutdown = True
            with self._awaiting:  # nobody is inside the binding when it stops
                self._executor.shutdown()
            self._locks.release()

    def _drain(self) -> None:
        """End what is active; whoever waits for responses may take part in it."""
        for id in self._live.ids():
            self.cancel_request(id)
        end = time.monotonic() + _DRAIN_S
        while len(self._live) and self._failure is None and time.monotonic() < end:
            with self._awaiting:
                self._take(timedelta(seconds=_SHORTEST_S))

    def _check_running(self) -> None:
        if self._is_shutdown:
            raise RuntimeError("Shutdown called, the executor takes no further calls")


def _last_error(responses: Sequence[Response]) -> str:
    return next((r.error for r in reversed(responses) if r.error), "")
