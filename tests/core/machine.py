"""The rules of the state machines: any interleaving of what can happen to a server.

Each rule does one thing through the driver (drive.py), which checks it; then some half steps of the
engine follow, so that the next rule falls between two steps or into one in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.arrivals import Arrival, arrivals
from tests.core.drive import Driver
from tests.core.harness import CONFIG, ChosenPlanner
from tests.core.model import TOTALS
from tests.support.failing import Failure
from tokenflow.config import ServingConfig
from tokenflow.coordinator import Planner
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import SessionState

S = SessionState

BASE = replace(
    CONFIG,
    max_num_tokens=16,
    max_tokens_in_paged_kv_cache=64,
    plan_interval_s=0.15,
    max_queue_delay_s=4.0,
    max_hold_s=6.0,
)
EAGER = TokenflowPolicy(
    slack_margin_s=0.1, min_quantum_s=0.2, max_bypass_s=1.0, max_machine_pause_s=1.5
)

THEN = st.sampled_from([0, 1, 1, 2, 3, 4, 6, 8, 12])
"""Half steps after a rule."""
PICK = st.integers(0, 30)
WHAT = st.sampled_from(["lag", "lag", "fail", "kill", "quiet", "quiet", "quiet", "shutdown"])
FAILURES = st.sampled_from(["before the step", "after writing", "adding a request"])
DELAYS = st.tuples(*[st.integers(0, 3)] * 3)


def picked(pick: int, handles: list[int]) -> int:
    """One of `handles`, or 0 if there is none."""
    return handles[pick % len(handles)] if handles else 0


class CoordinatorMachine(RuleBasedStateMachine):
    """config: of the server. policy: what is planned by; None for `ChosenMachine`."""

    config: ClassVar[ServingConfig] = BASE
    policy: ClassVar[Policy | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.d = Driver(self.config, self._planner(), self.policy)
        self.arrivals: list[Arrival] = []
        self.is_broken = False

    def _planner(self) -> Planner:
        policy = self.policy
        assert policy is not None
        return lambda snapshot: plan(snapshot, policy)

    @contextmanager
    def _rule(self, then: int) -> Iterator[None]:
        """Around what a rule does: everything is checked, then half steps follow."""
        self.is_broken = True
        yield
        self.d.settle()
        self.d.check()
        for _ in range(then):
            self._half_step()
        self.is_broken = False

    def _half_step(self) -> None:
        self.d.half_step()

    @initialize(arrival=arrivals(), count=st.integers(1, 4), then=THEN)
    def open(self, arrival: Arrival, count: int, then: int) -> None:
        self.arrive(arrival, count, then)

    @rule(arrival=arrivals(), count=st.sampled_from([1, 2, 3, 5]), then=THEN)
    def arrive(self, arrival: Arrival, count: int, then: int) -> None:
        with self._rule(then):
            self.arrivals.append(arrival)
            for i in range(count):
                self.d.submit(replace(arrival, salt=arrival.salt + i))

    @rule(pick=PICK, then=THEN)
    def arrive_again(self, pick: int, then: int) -> None:
        """The same request once more: it finds the other's blocks."""
        with self._rule(then):
            self.d.submit(self.arrivals[-1 - pick % len(self.arrivals)])

    @rule(first=arrivals(), second=arrivals(), then=THEN)
    def arrive_together(self, first: Arrival, second: Arrival, then: int) -> None:
        with self._rule(then):
            self.arrivals += first, second
            self.d.submit(first)
            self.d.submit(second)

    @rule(then=st.integers(1, 30))
    def go_on(self, then: int) -> None:
        with self._rule(then):
            pass

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 1.0, 4.2, 6.2]), then=THEN)
    def wait(self, seconds: float, then: int) -> None:
        """Nothing happens for a while, or a step takes long."""
        with self._rule(then):
            self.d.h.now += seconds

    @rule(pick=PICK, count=st.integers(-5, 60), then=THEN)
    def acknowledge(self, pick: int, count: int, then: int) -> None:
        with self._rule(then):
            if handle := picked(pick, list(self.d.model.asked)):
                self.d.acknowledge(handle, count)

    @rule(pick=PICK, how=st.sampled_from(["cancel", "finish", "late cancel"]), then=THEN)
    def leave(self, pick: int, how: str, then: int) -> None:
        """The client goes, its text is complete, or it goes after its end."""
        with self._rule(then):
            live = self.d.live()
            if how == "finish":
                if handle := picked(pick, [s.handle for s in live if s.output_token_ids]):
                    self.d.finish(handle)
                return
            late = [n for n, asked in self.d.model.asked.items() if asked.ended]
            handles = [s.handle for s in live] if how == "cancel" else late
            if handle := picked(pick, handles):
                self.d.cancel(handle)

    @rule(pick=PICK, how=st.sampled_from(["hold", "hold", "release", "any"]), then=THEN)
    def hold_or_release(self, pick: int, how: str, then: int) -> None:
        """Also of streams that are held already, are not held, or have ended."""
        with self._rule(then):
            asked = self.d.model.asked
            handles = list(asked)
            if how == "release":
                handles = [n for n in handles if asked[n].held_until is not None]
            elif how == "hold":
                handles = [s.handle for s in self.d.live() if s.held_until is None]
            if handle := picked(pick, handles):
                if how == "release" or (how == "any" and pick % 2):
                    self.d.release(handle)
                else:
                    self.d.hold(handle)

    @rule(what=WHAT, failure=FAILURES, delays=DELAYS, again_in=PICK, then=THEN)
    def calamity(
        self, what: str, failure: Failure, delays: tuple[int, int, int], again_in: int, then: int
    ) -> None:
        """The engine is lost, once or twice, fails, or is not listened to for a while; or, rarely,
        the server shuts down."""
        with self._rule(then):
            if what == "kill":
                self.d.kill(delays, again_in)
            elif what == "fail":
                self.d.fail_next(failure)
            elif what == "lag":
                self.d.is_deaf = True
            elif what == "shutdown" and delays[0] == 0:
                self.d.shut_down()

    def teardown(self) -> None:
        """Run to empty, unless a rule found something already."""
        if not self.is_broken:
            self.d.run_to_empty()
            name = f"{type(self).__name__} pauses"
            TOTALS[name] += self.d.coordinator.counters.num_pauses


class SlackMachine(CoordinatorMachine):
    """With the real plan, which pauses sooner than it would by default."""

    policy = EAGER


class FcfsMachine(CoordinatorMachine):
    """With the baseline, which hands everything to the engine."""

    policy = FcfsReservePolicy()


class ChosenMachine(CoordinatorMachine):
    """With a planner that pauses whom the rules choose, and starts nobody while they say so."""

    def __init__(self) -> None:
        self.chosen = ChosenPlanner(self.config.max_batch_size)
        self.opens_in = 0
        super().__init__()

    def _planner(self) -> Planner:
        return self.chosen

    def _half_step(self) -> None:
        if self.opens_in:
            self.opens_in -= 1
            if not self.opens_in:
                self._open()
        self.d.half_step()
        if not self.d.in_step:
            self._check_no_idle_room()

    def _open(self) -> None:
        self.chosen.hold = self.chosen.hold_paused = False
        self.d.plan()

    def _check_no_idle_room(self) -> None:
        """Nobody who could be started waits for the next regular plan."""
        coordinator = self.d.coordinator
        is_up = coordinator.engine_is_up and not self.d.is_lost
        if is_up and not coordinator.table.count(S.PAUSING, S.CANCELLING):
            assert not self.chosen(coordinator.snapshot(self.d.h.now))

    @rule(pick=PICK, everybody=st.booleans(), in_flight=st.booleans(), then=THEN)
    def pause(self, pick: int, everybody: bool, in_flight: bool, then: int) -> None:
        """Pick 0 is the one that is nearest to its end."""
        with self._rule(then):
            if in_flight and not self.d.in_step:
                self._half_step()
            asked = self.d.model.asked
            running = [s for s in self.d.live() if s.state is S.RUNNING]
            running = [s for s in running if asked[s.handle].is_pausable]
            running.sort(key=lambda s: asked[s.handle].num_missing)
            if running:
                chosen = running if everybody else [running[pick % len(running)]]
                self.chosen.pause_next |= {session.slot for session in chosen}
                self.d.plan()

    @rule(everybody=st.booleans(), closed_for=st.sampled_from([2, 6, 12, 30]), then=THEN)
    def close_gate(self, everybody: bool, closed_for: int, then: int) -> None:
        """For so many half steps nobody is started, or nobody who was paused."""
        with self._rule(then):
            self.chosen.hold, self.chosen.hold_paused = everybody, True
            self.opens_in = closed_for
            self.d.plan()

    def teardown(self) -> None:
        if not self.is_broken:
            self._open()
        super().teardown()
