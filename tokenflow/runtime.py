"""The loop: inbox -> coordinator -> plan -> apply -> emit.

Owns the runtime thread, which owns all sessions and decisions; every other thread only posts to
its inbox, the awaiter's (awaiter.py) with what the engine says. No lock is held across a call to
the executor or to `emit`. `emit` runs in the runtime thread and must not block. The thread never
ends by an exception: a failure ends every session with an error and the runtime refuses what comes
after.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenflow.answers import Counters
from tokenflow.awaiter import Awaiter
from tokenflow.clock import Clock, MonotonicClock
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.errors import EngineError, for_clients
from tokenflow.executor.api import Executor, Response
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.executor.supervisor import EngineKeeper
from tokenflow.holds import HoldRefusal, HoldReply
from tokenflow.policies import policy_from_config
from tokenflow.scheduler import plan
from tokenflow.trace import Tracer
from tokenflow.types import GenerateRequest, SessionState, TokenEvent

logger = logging.getLogger("tokenflow")

_IDLE_WAIT_S = 0.5
_MAX_TURN_S = 2 * _IDLE_WAIT_S
"""After a longer turn this process stood still (a frozen container), and the engine perhaps too."""

_S = SessionState
_RUNNING_STATES = (_S.PREFILLING, _S.RUNNING, _S.RESUMING, _S.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeGauges:
    """Numbers for metrics, as of the last turn of the loop.

    num_waiting counts those in the engine's own queue too; num_running those being cancelled;
    num_held is a part of the others.
    tiers: both KV tiers (blocks of each that are used, cached, free, on their way); None = unknown.
    kv_is_mirrored: where KV is is known from the engine's events, not estimated.
    healthy: an engine serves.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_paused: int = 0
    num_held: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    tiers: KvTierStats | None = None
    kv_is_mirrored: bool = False
    healthy: bool = True
    counters: Counters = field(default_factory=Counters)


class Runtime:
    """Serves requests on an executor, from any number of threads.

    emit: called with every TokenEvent, in the runtime thread.
    planner: the decision function; by default `plan` with the configured policy.
    keeper: starts another engine when one is lost; without one a loss ends the service.
    The executor is the caller's (with a keeper, the keeper's): `shutdown` ends what runs on it but
    does not shut it down.
    """

    def __init__(
        self,
        executor: Executor,
        config: ServingConfig,
        *,
        emit: Callable[[TokenEvent], None],
        clock: Clock | None = None,
        tracer: Tracer | None = None,
        planner: Planner | None = None,
        keeper: EngineKeeper | None = None,
    ) -> None:
        policy = policy_from_config(config)
        self._executor = executor
        self._keeper = keeper
        self._stall_timeout_s = config.engine_stall_timeout_s
        self._engine_is_killed = False
        self._last_turn_time = self._awake_since = float("-inf")
        self._clock = clock or MonotonicClock()
        self._coordinator = Coordinator(
            executor, config, planner or (lambda snapshot: plan(snapshot, policy)), emit, tracer
        )
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = (
            queue.SimpleQueue()
        )
        self._stopping = threading.Event()
        self._is_over = False
        self._shutdown_lock = threading.Lock()  # no submission comes behind the shutdown
        self._failure: str | None = None
        self._gauges = self._read_gauges()
        self._loop = threading.Thread(target=self._run, name="tokenflow-runtime", daemon=True)
        self._awaiter = Awaiter(executor, keeper, self, self._stopping)

    def start(self) -> None:
        """Start the threads; once."""
        self._loop.start()
        self._awaiter.start()

    # -- called from any thread ----------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> int:
        """Take a request in and return its handle; everything else comes as events.

        Raises EngineError when the runtime is shut down. A refusal (overloaded, engine lost) is an
        ERROR event with the handle returned here.
        """
        with self._shutdown_lock:
            if self._stopping.is_set():
                raise EngineError("the server is shutting down")
            handle = self._coordinator.new_handle()
            self._inbox.put((self._on_submit, (handle, request)))
        return handle

    def count_invalid(self) -> None:
        """A request was refused before it came here; it counts as failed."""
        self._inbox.put((self._coordinator.count_invalid, ()))

    def cancel(self, handle: int) -> None:
        """The client left or asked for the end: one more event, CANCELLED, if it had no end yet."""
        self._inbox.put((self._on_cancel, (handle,)))

    def pause(self, handle: int) -> None:
        """The client holds its stream paused, at most for max_hold_s. Nothing happens to one that
        is held, has ended, or can never be paused."""
        self.pause_all((handle,), lambda refusal: None)

    def pause_all(self, handles: Sequence[int], reply: HoldReply) -> None:
        """The same for some streams, all or none. `reply` is called once, in the runtime thread;
        never after the shutdown."""
        self._inbox.put((self._on_pause, (handles, reply)))

    def resume(self, handle: int) -> None:
        """The client holds its stream no longer."""
        self._inbox.put((self._on_resume, (handle,)))

    def unpausable_reason(self, request: GenerateRequest) -> str | None:
        """Why such a request can never be paused, or None."""
        return self._coordinator.table.unpausable_reason(request)

    def finish(self, handle: int) -> None:
        """The answer is complete by a stop string: stop the work, no further event."""
        self._inbox.put((self._on_finish, (handle,)))

    def acknowledge(self, handle: int, num_consumed: int) -> None:
        """The client consumed this many tokens in all."""
        self._inbox.put((self._on_acknowledge, (handle, num_consumed)))

    def gauges(self) -> RuntimeGauges:
        """The numbers of the last turn."""
        return self._gauges

    def drain_ttft_s(self) -> list[float]:
        """Times to first token (s) since the last call, for a histogram. One caller only."""
        return self._coordinator.drain_ttft_s()

    def shutdown(self, timeout_s: float) -> None:
        """End every request (ERROR, retryable) and stop the threads within about `timeout_s`."""
        with self._shutdown_lock:
            if not self._stopping.is_set():
                self._stopping.set()
                self._inbox.put((self._on_shutdown, ()))
        until = time.monotonic() + timeout_s
        if self._loop.ident is not None:
            self._loop.join(timeout_s)
        self._awaiter.join(max(0.0, until - time.monotonic()))

    # -- runtime thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._turn():
            pass

    def _turn(self) -> bool:
        """One turn: everything that is in the inbox, then a plan if one is due; True: the last."""
        coordinator = self._coordinator
        try:
            self._take_inbox()
            now = self._clock.now()
            if self._failure is None:
                self._check_progress(now)
                if now >= coordinator.next_plan_time():
                    coordinator.plan(now)
            coordinator.flush()
        except Exception as error:
            logger.exception("the runtime failed")
            self._fail(f"unhealthy: internal error: {error}")
        self._gauges = self._read_gauges()
        return self._is_over and self._inbox.empty()

    def _take_inbox(self) -> None:
        wait_s = _IDLE_WAIT_S
        if self._failure is None:
            wait_s = self._coordinator.next_plan_time() - self._clock.now()
        try:
            item = self._inbox.get(timeout=max(0.0, min(_IDLE_WAIT_S, wait_s)))
        except queue.Empty:
            self._hear_of_copies()
            return
        while True:
            function, arguments = item
            function(*arguments)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _hear_of_copies(self) -> None:
        """Nothing came; but copies that ended while nothing was computed have their statistics."""
        if self._failure is None and self._coordinator.engine_is_up:
            stats = self._executor.get_latest_iteration_stats()
            self._coordinator.on_stats(stats, self._clock.now())

    def _on_submit(self, handle: int, request: GenerateRequest) -> None:
        now = self._clock.now()
        if self._failure is not None:
            self._coordinator.refuse(handle, request, self._failure, now)
            return
        self._coordinator.submit(handle, request, now)

    def _on_cancel(self, handle: int) -> None:
        self._coordinator.cancel(handle, self._clock.now())

    def _on_pause(self, handles: Sequence[int], reply: HoldReply) -> None:
        refusal: HoldRefusal | None = HoldRefusal.ENDED  # so all have, if this fails
        try:
            refusal = self._coordinator.hold_all(handles, self._clock.now())
        finally:
            reply(refusal)

    def _on_resume(self, handle: int) -> None:
        self._coordinator.release(handle, self._clock.now())

    def _on_finish(self, handle: int) -> None:
        self._coordinator.finish(handle, self._clock.now())

    def _on_acknowledge(self, handle: int, num_consumed: int) -> None:
        self._coordinator.acknowledge(handle, num_consumed, self._clock.now())

    def _on_responses(self, responses: list[Response], now: float) -> None:
        self._coordinator.on_stats(self._executor.get_latest_iteration_stats(), now)
        self._coordinator.on_responses(responses, now)

    def _check_progress(self, now: float) -> None:
        """An engine that holds requests and computes nothing is ended like one that crashed."""
        if now - self._last_turn_time > _MAX_TURN_S:
            self._awake_since = now
        self._last_turn_time = now
        if self._stalled_s(now) < self._stall_timeout_s or self._engine_is_killed:
            return
        # Statistics of iterations without a response have waited until now.
        self._coordinator.on_stats(self._executor.get_latest_iteration_stats(), now)
        if self._stalled_s(now) < self._stall_timeout_s:
            return
        reason = f"no iteration for {self._stall_timeout_s:g} s (engine_stall_timeout_s)"
        logger.error("the engine is stuck: %s", reason)
        if self._keeper is not None and self._keeper.kill(reason):
            self._engine_is_killed = True
        else:
            self._fail(f"unhealthy: the engine is stuck: {reason}")

    def _stalled_s(self, now: float) -> float:
        """Seconds without progress of the engine, as far as this thread was there to see it."""
        return min(self._coordinator.stalled_s(now), now - self._awake_since)

    def _on_engine_lost(self, message: str) -> None:
        if self._stopping.is_set():
            return
        logger.error("engine lost: %s", message)
        if self._keeper is None:
            self._fail(f"the engine is not running: {for_clients(message)}")
        elif self._failure is None:
            self._coordinator.on_engine_lost(message, self._clock.now())

    def _on_engine_started(self, executor: Executor) -> None:
        self._executor = executor
        self._engine_is_killed = False
        if self._failure is None:
            logger.info("the engine was started again")
            self._coordinator.on_engine_started(executor, self._clock.now())

    def _on_engine_given_up(self, message: str) -> None:
        if not self._stopping.is_set():
            logger.error("the engine is not started again: %s", message)
            self._fail(f"unhealthy: {for_clients(message)}")

    def _on_shutdown(self) -> None:
        self._fail("the server is shutting down")
        self._is_over = True

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
        try:
            self._coordinator.fail_all(message, self._clock.now(), retryable=True)
        except Exception:
            logger.exception("ending the sessions failed")

    def _read_gauges(self) -> RuntimeGauges:
        coordinator = self._coordinator
        table = coordinator.table
        queued = coordinator.num_queued_in_engine
        return RuntimeGauges(
            num_waiting=table.count(_S.WAITING) + queued,
            num_running=table.count(*_RUNNING_STATES) - queued,
            num_paused=table.count(_S.PAUSING, _S.PREEMPTED),
            num_total_blocks=coordinator.num_total_blocks,
            num_held=coordinator.num_held,
            num_free_blocks=coordinator.num_free_blocks,
            tiers=coordinator.tiers,
            kv_is_mirrored=coordinator.kv_is_mirrored,
            healthy=self._failure is None and coordinator.engine_is_up,
            counters=dataclasses.replace(coordinator.counters),
        )

    # -- called by the awaiter's thread (awaiter.EngineListener) --------------------------------

    def post_responses(self, responses: list[Response]) -> None:
        """See EngineListener."""
        self._inbox.put((self._on_responses, (responses, self._clock.now())))

    def post_loss(self, message: str, known: Callable[[], None]) -> None:
        """See EngineListener."""
        self._inbox.put((self._on_engine_lost, (message,)))
        self._inbox.put((known, ()))

    def post_start(self, executor: Executor) -> None:
        """See EngineListener."""
        self._inbox.put((self._on_engine_started, (executor,)))

    def post_end(self, message: str) -> None:
        """See EngineListener."""
        self._inbox.put((self._on_engine_given_up, (message,)))
