"""The engine in a process of its own, behind the executor surface.

Owns the request ids that callers see and the responses that nobody took yet; `link.EngineLink` owns
the process and the channel. Callers never wait for the engine: `enqueue_request` chooses the id
itself and hands the request to the socket, or to a bounded buffer.

Invariants:
- Every request gets exactly one final response. When the engine ends, for whatever reason, what it
  had already sent is delivered first and then each unfinished request gets one error response.
  No error of that kind is visible while `can_enqueue_requests` is still True.
- Commands of one thread arrive in the order in which it gave them.
- No more than `window` messages wait for `await_responses`; the next ones are acknowledged only
  when it has taken them, so a caller that does not read stops the engine instead of filling memory.
- Liveness is the end of the channel or of the process, never a heartbeat: loading a model may block
  the engine's process for minutes.

Unlike an executor in this process, a full queue of the engine answers with an error response (as
TensorRT-LLM does in orchestrator mode), and `shutdown` cuts running requests short: their responses
could not be fetched any more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from tokenflow.config import ServingConfig, format_parameters
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.api import IterationStats, Request, Response
from tokenflow.executor.backpressure import DEFAULT_WINDOW, MAX_BACKLOG_BYTES
from tokenflow.executor.channel import (
    Ack,
    Cancel,
    EngineInfo,
    Enqueue,
    FromHost,
    Iteration,
    Located,
    Setup,
    Shutdown,
)
from tokenflow.executor.link import EngineLink
from tokenflow.executor.remote_kv import RemoteKvEvents, RemoteKvTiering
from tokenflow.executor.startup import EngineStartup, StopSignal

logger = logging.getLogger("tokenflow")

ENGINE_FACTORY = "tokenflow.executor.factory:create_engine"

_STOP_WAIT_S = 10.0
_TERMINATE_WAIT_S = 2.0


class RemoteExecutor:
    """An `api.Executor` whose engine runs in another process.

    The constructor starts the process and returns when the engine takes requests. It calls
    `on_progress(fraction, text)` in the calling thread while the engine loads. Raises EngineError,
    with the engine's own message, when it cannot be started or takes longer than `load_timeout_s`.

    factory: `module:function` that makes the executor over there (`host.EngineFactory`).
    window: iteration messages that may be on their way, and again as many that may wait here.
    max_backlog_bytes: commands that may wait for an engine that does not read.
    log_path: file to which the engine's output is appended; None = this process's stderr.
    stop: ends a start that waits for the engine to load, within a fraction of a second.
    stop_wait_s, terminate_wait_s: what `shutdown` grants the process to end when asked, and when
        told by SIGTERM, before the next harder step.
    """

    def __init__(
        self,
        config: ServingConfig,
        on_progress: Callable[[float, str], None] | None = None,
        *,
        factory: str = ENGINE_FACTORY,
        window: int = DEFAULT_WINDOW,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        load_timeout_s: float | None = None,
        log_path: Path | None = None,
        stop: StopSignal | None = None,
        stop_wait_s: float = _STOP_WAIT_S,
        terminate_wait_s: float = _TERMINATE_WAIT_S,
    ) -> None:
        self._stop_wait_s = stop_wait_s
        self._terminate_wait_s = terminate_wait_s
        self._condition = threading.Condition()
        self._responses: deque[Response] = deque()
        self._window = window
        self._num_untaken = 0  # messages in `_responses`
        self._received_seq = 0
        self._acked_seq = 0
        self._stats: deque[IterationStats] = deque(
            maxlen=config.executor_config().iter_stats_max_iterations
        )
        self._kv_events = RemoteKvEvents(
            config.executor_config().kv_cache_config.event_buffer_max_size,
            lambda message: self._link.send_hint(message),
        )
        self._unfinished: dict[int, int | None] = {}  # request id -> client_id
        self._cancelled: set[int] = set()
        self._last_id = 0
        self._startup = EngineStartup()
        self._lost: str | None = None
        self._kill_reason: str | None = None
        self._shut_down = False
        self._shutdown_lock = threading.Lock()
        self._kv_tiering = RemoteKvTiering(
            lambda message: self._link.send_hint(message), lambda message: self._link.send(message)
        )
        self._link = EngineLink(
            on_message=self._on_message,
            on_end=self._on_end,
            num_threads=config.num_threads,
            max_backlog_bytes=max_backlog_bytes,
            log_path=log_path,
        )
        try:
            self._link.send(Setup(format_parameters(config), factory, window))
            self._startup.wait(on_progress or _no_progress, load_timeout_s, stop)
        except BaseException:
            self._link.kill()
            self._close(0.0)
            raise

    # -- what an executor does -----------------------------------------------------------------

    def enqueue_request(self, request: Request) -> int:
        """Hand a request to the engine and return its id at once.

        Raises EngineLostError when the engine is gone, RuntimeError after shutdown, EngineError
        when the engine takes no commands and the buffer for it is full, or when the request is
        larger than a message may be.
        """
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Several in one message, in order; all or none are refused."""
        with self._condition:
            self._check_open()
            if self._lost is not None:
                raise EngineLostError(self._lost)
            ids = list(range(self._last_id + 1, self._last_id + 1 + len(requests)))
            self._last_id += len(ids)
            for id, request in zip(ids, requests, strict=True):
                self._unfinished[id] = request.client_id
        try:
            self._link.send(Enqueue(ids, list(requests)), bounded=True)
        except EngineError:
            with self._condition:
                if self._lost is not None:
                    return ids  # the loss has answered them already
                for id in ids:
                    del self._unfinished[id]
            raise
        return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """All responses that are ready, oldest first; [] after `timeout`.

        Raises RuntimeError after shutdown, and EngineLostError when the engine is gone and every
        response has been handed out.
        """
        with self._condition:
            self._condition.wait_for(
                self._has_news, None if timeout is None else timeout.total_seconds()
            )
            self._check_open()
            if not self._responses:
                if self._lost is not None:
                    raise EngineLostError(self._lost)
                return []
            responses = list(self._responses)
            self._responses.clear()
            self._num_untaken = 0
            seq = self._received_seq
            acknowledge = seq > self._acked_seq
            self._acked_seq = seq
        if acknowledge:
            self._link.send(Ack(seq))
        return responses

    def get_num_responses_ready(self) -> int:
        """Responses that `await_responses` would return at once."""
        with self._condition:
            self._check_open()
            return len(self._responses)

    def cancel_request(self, id: int) -> None:
        """Ask for the end of a request; never blocks, unknown or finished ids are ignored."""
        with self._condition:
            self._check_open()
            if id not in self._unfinished or id in self._cancelled:
                return
            self._cancelled.add(id)
        self._link.send(Cancel(id))

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Drain the statistics received since the last call (the oldest are dropped beyond
        `iter_stats_max_iterations`)."""
        with self._condition:
            self._check_open()
            stats = list(self._stats)
            self._stats.clear()
            return stats

    def can_enqueue_requests(self) -> bool:
        """False after shutdown and when the engine is gone."""
        with self._condition:
            return not self._shut_down and self._lost is None

    def get_kv_cache_event_manager(self) -> RemoteKvEvents | None:
        """The events that came over the channel, or None where the engine has none."""
        return self._kv_events if self.info.has_kv_events else None

    def get_kv_tiering(self) -> RemoteKvTiering | None:
        """See Executor."""
        return self._kv_tiering if self.info.has_kv_tiering else None

    def shutdown(self) -> None:
        """Stop the engine and its process within a bounded time; every thread, descriptor and
        process is gone afterwards. Idempotent; a second caller waits for the first."""
        self._close(self._stop_wait_s)

    # -- what only this executor has -----------------------------------------------------------

    def kill(self, reason: str) -> None:
        """End the engine's process at once, whatever it does (a stuck one, or one that is stopped).
        Never waits, from any thread. The loss comes as that of any engine, with `reason` (one line
        that may be shown to a client) in front of its message. Nothing happens to an engine that is
        gone already."""
        with self._condition:
            if self._shut_down or self._lost is not None:
                return
            self._kill_reason = self._kill_reason or reason
        self._link.kill()

    @property
    def info(self) -> EngineInfo:
        """What the engine said about itself when it was ready."""
        assert self._startup.info is not None
        return self._startup.info

    @property
    def num_host_blocks(self) -> int:
        """See kv_api.KvPools."""
        return self.info.num_host_blocks

    @property
    def block_bytes(self) -> int:
        """See kv_api.KvPools."""
        return self.info.block_bytes

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._link.pid

    # -- end -----------------------------------------------------------------------------------

    def _close(self, stop_wait_s: float) -> None:
        """Ask, wait, terminate, kill; then release everything."""
        with self._shutdown_lock:
            with self._condition:
                if self._shut_down:
                    return
                self._shut_down = True
                if self._lost is not None:
                    stop_wait_s = 0.0
                self._responses.clear()
                self._condition.notify_all()
            if stop_wait_s > 0:
                self._link.send(Shutdown())
            self._link.close(stop_wait_s, self._terminate_wait_s)

    def _check_open(self) -> None:
        if self._shut_down:
            raise RuntimeError("the executor was shut down")

    def _has_news(self) -> bool:
        return bool(self._responses) or self._shut_down or self._lost is not None

    # -- the link's reader thread --------------------------------------------------------------

    def _on_message(self, message: FromHost) -> None:
        if isinstance(message, Iteration):
            self._take(message)
        elif isinstance(message, Located):
            self._kv_tiering.take(message)
        else:
            self._startup.take(message)

    def _take(self, message: Iteration) -> None:
        """Make responses, statistics and KV events visible: the events first, so that whoever took
        a response finds what happened before it. A message is acknowledged here while few wait for
        the caller; beyond that the caller does it when it takes them."""
        self._kv_events.take(message.events)
        with self._condition:
            self._received_seq = message.seq
            self._stats.extend(message.stats)
            num_before = len(self._responses)
            for response in message.responses:
                if response.request_id not in self._unfinished:
                    continue
                if response.payload is None or response.payload.is_final:
                    del self._unfinished[response.request_id]
                    self._cancelled.discard(response.request_id)
                self._responses.append(response)
            if self._shut_down:
                self._responses.clear()
            if len(self._responses) > num_before:
                self._num_untaken += 1
                self._condition.notify_all()
            acknowledge = self._shut_down or self._num_untaken <= self._window
            if acknowledge:
                self._acked_seq = message.seq
        if acknowledge:
            self._link.send(Ack(message.seq))

    def _on_end(self, message: str) -> None:
        """The engine is gone: say so to every unfinished request, once."""
        with self._condition:
            if self._kill_reason is not None:
                message = f"{self._kill_reason}: {message}"
            self._lost = message
            self._responses.extend(
                Response(request_id=id, client_id=client_id, error=message)
                for id, client_id in self._unfinished.items()
            )
            self._unfinished.clear()
            self._cancelled.clear()
            self._condition.notify_all()
            expected = self._shut_down or self._startup.info is None
        self._kv_events.close()
        self._kv_tiering.lose(message)
        self._startup.lose(message)
        if not expected:
            logger.error("%s", message)


def _no_progress(fraction: float, text: str) -> None:
    """Nobody wants to know."""
