"""Drives a whole server without threads, half step by half step, and checks it all the time.

Owns what the outside does to a server: requests, clients' actions, the engine's losses and
failures, how late the server hears of them, and time. As the runtime does, it plans whenever a plan
is due, at once. After every action the model takes in what came of it; after every step, and after
every action of the outside, all invariants are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from tests.core.arrivals import Arrival, request_of
from tests.core.harness import VOCAB_SIZE, Harness
from tests.core.invariants import (
    check_counters,
    check_engine,
    check_table,
    check_whereabouts,
    engine_of,
)
from tests.core.model import TOTALS, Model
from tests.core.watching import WatchedExecutor, WatchedPlanner
from tests.support.failing import FailingRunner, Failure
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Coordinator, Planner
from tokenflow.policies import Policy
from tokenflow.session import IN_ENGINE, Session
from tokenflow.types import SessionState, Snapshot

S = SessionState

STEP_S = 0.05
MAX_PLANS_AT_ONCE = 4
HEARS_AT_LEAST_EVERY = 4


def script(history: tuple[int, ...]) -> tuple[int, float]:
    """A hash of the whole history, of few different tokens, so that stop words and shared
    beginnings come about."""
    value = hash(history)
    return value % 11, -((value >> 8) % 64 + 1) / 32


class Driver:
    """A server with its model.

    planner, policy: see WatchedPlanner.
    is_deaf: the engine's next steps are heard of late.
    """

    def __init__(self, config: ServingConfig, planner: Planner, policy: Policy | None) -> None:
        self.config = config
        self.planner = WatchedPlanner(planner, policy, self._on_snapshot)
        self.h = Harness(config, self.planner, script, WatchedExecutor, FailingRunner)
        self.model = Model(self.h)
        self.num_steps = 0
        self.in_step = False
        self.is_deaf = False
        self._num_failures_heard = 0
        self._orphan_ids: set[int] = set()
        self._emptied_step = 0
        self._num_losses = 0
        self._kill_again_in = 0
        self._repair: list[tuple[int, Callable[[], None]]] = []
        self._num_tokens_lost = 0
        self._was_evicted = False

    @property
    def coordinator(self) -> Coordinator:
        return self.h.coordinator

    @property
    def is_lost(self) -> bool:
        """The engine is gone, whether or not that was noticed."""
        return self.h.executor.is_lost

    def live(self) -> list[Session]:
        """Sessions whose clients wait for more."""
        return [session for session in self.coordinator.table if not session.answered]

    # -- clients -------------------------------------------------------------------------------

    def submit(self, arrival: Arrival) -> None:
        handle = self.coordinator.new_handle()
        request = request_of(arrival, f"r{handle}", self.h.now, script, VOCAB_SIZE)
        self.model.ask(handle, request, is_malformed=arrival.is_malformed)
        self._do("submit", lambda: self.coordinator.submit(handle, request, self.h.now), handle)

    def acknowledge(self, handle: int, num_consumed: int) -> None:
        self._do(
            "acknowledge", lambda: self.coordinator.acknowledge(handle, num_consumed, self.h.now)
        )

    def cancel(self, handle: int) -> None:
        self._do("cancel", lambda: self.coordinator.cancel(handle, self.h.now), handle)
        assert self.model.asked[handle].ended

    def finish(self, handle: int) -> None:
        """Its text is complete; no event says so."""
        asked = self.model.asked[handle]
        self._do("finish", lambda: self.coordinator.finish(handle, self.h.now), handle)
        assert not asked.ended
        asked.ended, asked.held_until = True, None

    def hold(self, handle: int) -> None:
        asked = self.model.asked[handle]
        left_s = self.config.max_hold_s - asked.held_s
        num_held = sum(other.held_until is not None for other in self.model.asked.values())
        may_hold = left_s > 0 and asked.is_pausable and num_held < self.config.max_queue_size
        if asked.held_until is None and may_hold and not asked.ended:
            asked.held_until, asked.hold_time = self.h.now + left_s, self.h.now
            TOTALS["holds"] += 1
        self._do("hold", lambda: self.coordinator.hold(handle, self.h.now), handle)

    def release(self, handle: int) -> None:
        self.model.asked[handle].held_until = None
        self._do("release", lambda: self.coordinator.release(handle, self.h.now), handle)

    def shut_down(self) -> None:
        """Everything is ended; what comes later is served again."""
        engine = engine_of(self.h)
        engine.is_being_emptied = True
        self._do(
            "shutdown",
            lambda: self.coordinator.fail_all("shut down", self.h.now, retryable=True),
        )
        engine.is_being_emptied = False
        self._orphan_ids, self._emptied_step = engine.unfinished_ids, self.num_steps
        assert not len(self.coordinator.table)
        assert all(asked.ended for asked in self.model.asked.values())
        TOTALS["shutdowns"] += 1

    # -- the engine ----------------------------------------------------------------------------

    def fail_next(self, failure: Failure) -> None:
        """The runner will fail once."""
        assert isinstance(self.h.runner, FailingRunner)
        self.h.runner.fail_next = failure

    def kill(self, delays: tuple[int, int, int], again_in: int = 0) -> None:
        """The engine is lost: what it said last is heard, its loss is noticed, and another one is
        started, each so many half steps later. again_in: that one is lost too, after so many."""
        if self.is_lost:
            return
        self.h.lose_engine(noticed=False)
        for handle in engine_of(self.h).handles_in_error():
            self.model.asked[handle].num_kills += 1
        actions = (self._hear, self._notice, self._restart)
        self._repair = list(zip(delays, actions, strict=True))
        self._kill_again_in = again_in
        self.in_step = False
        self._num_losses += 1

    def _hear(self) -> None:
        self._listen("hear", self.h.hear)
        self.is_deaf = False

    def _listen(self, what: str, action: Callable[[], None]) -> None:
        engine = engine_of(self.h)
        engine.joins = self.num_steps % 2 == 0
        num_failures = engine.num_failures
        self.model.is_failure_news = num_failures > self._num_failures_heard
        self._do(what, action)
        self._num_failures_heard = num_failures
        self.model.is_failure_news = False

    def _notice(self) -> None:
        self._listen("notice", self.h.notice_loss)
        coordinator = self.coordinator
        assert not coordinator.engine_is_up
        assert not coordinator.table.count(*IN_ENGINE)
        assert not coordinator.kv_is_mirrored
        assert coordinator.tiers is None
        assert coordinator.num_free_blocks == coordinator.num_total_blocks
        for session in coordinator.table:
            assert session.num_losses == self.model.asked[session.handle].num_kills <= 1
            if session.state is S.PREEMPTED:
                assert session.num_resume_tokens == session.num_tokens
                self._num_tokens_lost += session.num_tokens - 1

    def _restart(self) -> None:
        self._end_of_engine()
        self._do("start", self.h.start_engine)
        self._num_failures_heard = self.model.num_requests_seen = 0
        self._orphan_ids = set()
        assert self.coordinator.engine_is_up

    def _end_of_engine(self) -> None:
        self._was_evicted |= engine_of(self.h).num_free_low == 0

    # -- time ----------------------------------------------------------------------------------

    def plan(self) -> None:
        now = self.h.now
        self._do("plan", self.h.plan)
        limit = now - self.config.max_queue_delay_s
        for session in self.live():
            assert session.deadline > now
            assert session.held_until is None or session.held_until > now
            if session.state is S.WAITING and session.held_until is None:
                assert self.model.asked[session.handle].waiting_since > limit

    def settle(self) -> None:
        """Plan as often as the runtime would at this instant, then check everything."""
        for _ in range(MAX_PLANS_AT_ONCE):
            if self.h.now < self.coordinator.next_plan_time():
                break
            self.plan()
        else:
            raise AssertionError("a plan is due at once, again and again")
        if not self.in_step:
            self.check()

    def half_step(self) -> None:
        """Begin or end a step of the engine, or pass as much time without one."""
        if self._kill_again_in and not self.is_lost:
            self._kill_again_in -= 1
            if not self._kill_again_in:
                self.kill((0, 0, 0))
        if self.is_lost:
            self.h.now += STEP_S / 2
            self._go_on_with_repair()
        elif not self.in_step:
            self.h.begin()
            self.in_step = True
        else:
            self._end_step()
        self.settle()

    def _end_step(self) -> None:
        self.in_step = False
        self.h.end(STEP_S, heard=False)
        self.num_steps += 1
        TOTALS["steps"] += 1
        TOTALS["running"] += self.coordinator.table.count(S.RUNNING)
        if not self.is_deaf or self.num_steps % HEARS_AT_LEAST_EVERY == 0:
            self._hear()
            self._orphan_ids &= engine_of(self.h).unfinished_ids
            assert not self._orphan_ids or self.num_steps < self._emptied_step + 2

    def _go_on_with_repair(self) -> None:
        while self._repair and self._repair[0][0] == 0:
            self._repair.pop(0)[1]()
        if self._repair:
            delay, action = self._repair[0]
            self._repair[0] = (delay - 1, action)

    def run_to_empty(self) -> None:
        """Nothing more comes: in bounded time everybody has ended and nothing is left."""
        self._kill_again_in = 0
        while self.is_lost:
            self.half_step()
        assert isinstance(self.h.runner, FailingRunner)
        self.h.runner.fail_next = None
        for handle, asked in self.model.asked.items():
            if asked.held_until is not None:
                self.release(handle)
        self.settle()
        bound, num_before = self._bound(), self.num_steps
        while len(self.coordinator.table) or self.h.executor.batcher.has_work or self.in_step:
            assert self.num_steps - num_before <= bound, "somebody waits for ever"
            self.half_step()
        percent = 100 * (self.num_steps - num_before) // bound
        TOTALS["slowest drain %"] = max(TOTALS["slowest drain %"], percent)
        self._check_end()

    def _bound(self) -> int:
        """Steps that suffice: a few for every token that is missing and every chunk of context."""
        work = 0
        for session in self.coordinator.table:
            work += session.request.max_tokens - len(session.output_token_ids)
            work += session.num_tokens // self.config.tokens_per_block + 2
        return 60 + 2 * work

    # -- checks --------------------------------------------------------------------------------

    def _do(self, what: str, action: Callable[[], None], about: int = 0) -> None:
        """Run `action` and let the model see what came of it."""
        self.model.pass_time()
        self.model.doing, self.model.about = what, about
        action()
        self.model.observe()
        self.model.doing = ""

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        check_whereabouts(self.h)
        kv = snapshot.kv
        num_held = int(snapshot.sessions.num_blocks_held.sum())
        assert kv.num_free_blocks == kv.num_total_blocks - num_held
        self.model.check_times(snapshot.sessions)
        assert min(asdict(snapshot.costs).values()) >= 0

    def check(self) -> None:
        """Every invariant."""
        check_table(self.h)
        check_engine(self.h, self._orphan_ids)
        check_counters(self.h)
        self.model.check()
        assert self.coordinator.counters.num_forced_pauses == self.planner.num_forced

    def _check_end(self) -> None:
        self._end_of_engine()
        assert all(asked.ended for asked in self.model.asked.values())
        assert not engine_of(self.h).unfinished_ids
        self.h.expect_nothing_left()
        ttft_s = self.coordinator.drain_ttft_s()
        assert len(ttft_s) == sum(asked.num_tokens > 0 for asked in self.model.asked.values())
        counters = self.coordinator.counters
        assert counters.num_engine_losses == self._num_losses
        if not self._was_evicted:  # then only losses cost anything, and twins, who take over the
            # last block of one that is out, which is not full
            num_taken_over = (self.config.tokens_per_block - 1) * counters.num_resumes_recomputed
            assert counters.num_recomputed_tokens <= self._num_tokens_lost + num_taken_over
            TOTALS["examples without eviction"] += 1
        for name, value in asdict(counters).items():
            TOTALS[name] += value
