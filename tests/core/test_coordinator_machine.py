"""Random interleavings: whatever happens, each token once, in order, then one end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.inflight.scripts import expected
from tokenflow.types import EndReason, SessionState


class CoordinatorMachine(RuleBasedStateMachine):
    policy = "guaranteed_no_evict"

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(
            replace(CONFIG, batch_scheduler_policy=self.policy, max_tokens_in_paged_kv_cache=64)
        )
        self.asked: dict[int, tuple[tuple[int, ...], int]] = {}
        self.cancelled: set[int] = set()
        self.stopped: set[int] = set()
        self.failed: set[int] = set()
        self.in_step = False

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=14),
        max_tokens=st.integers(1, 30),
        shared=st.booleans(),
    )
    def arrive(self, prompt: list[int], max_tokens: int, shared: bool) -> None:
        tokens = (9, 8, 7, 6, 5, *prompt) if shared else tuple(prompt)
        handle = self.h.submit(tokens, max_tokens, read_rate=3.0)
        self.asked[handle] = (tokens, max_tokens)

    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.half_step()
            self.half_step()

    @rule()
    def half_step(self) -> None:
        """Begin or end a step, so that other rules fall into a step in flight."""
        if self.in_step:
            self.h.end()
        else:
            self.h.plan()
            self.h.begin()
        self.in_step = not self.in_step

    @rule(pick=st.integers(0, 10**6))
    def pause(self, pick: int) -> None:
        running = [s.handle for s in self.h.coordinator.table if s.state is SessionState.RUNNING]
        if running:
            self.h.pause(running[pick % len(running)])
            self.h.plan()

    @rule(pick=st.integers(0, 10**6))
    def cancel(self, pick: int) -> None:
        live = [s.handle for s in self.h.coordinator.table if not s.answered]
        if live:
            handle = live[pick % len(live)]
            self.h.coordinator.cancel(handle, self.h.now)
            self.cancelled.add(handle)

    @rule(pick=st.integers(0, 10**6))
    def stop_string(self, pick: int) -> None:
        live = [s.handle for s in self.h.coordinator.table if not s.answered and s.output_token_ids]
        if live:
            handle = live[pick % len(live)]
            self.h.coordinator.finish(handle, self.h.now)
            self.stopped.add(handle)

    @rule(pick=st.integers(0, 10**6), count=st.integers(-5, 100))
    def acknowledge(self, pick: int, count: int) -> None:
        live = [s.handle for s in self.h.coordinator.table]
        if live:
            self.h.coordinator.acknowledge(live[pick % len(live)], count, self.h.now)

    @rule(hold=st.booleans())
    def hold(self, hold: bool) -> None:
        assert isinstance(self.h.planner, ChosenPlanner)
        self.h.planner.hold = hold

    @rule()
    def lose_everything(self) -> None:
        live = {s.handle for s in self.h.coordinator.table if not s.answered}
        self.h.coordinator.fail_all("gone", self.h.now)
        self.failed |= live

    @invariant()
    def every_stream_is_a_prefix_of_its_script(self) -> None:
        for handle, (prompt, max_tokens) in self.asked.items():
            tokens = self.h.tokens_of(handle)
            whole, _ = expected(self.h.script, prompt, max_tokens)
            assert tokens == whole[: len(tokens)]
            self.h.end_of(handle)

    @invariant()
    def the_table_counts_what_it_holds(self) -> None:
        table = self.h.coordinator.table
        states = [s.state for s in table]
        for state in SessionState:
            assert table.count(state) == states.count(state)
        columns = table.columns(self.h.now)
        assert columns.state.tolist() == [int(s) for s in states]
        assert columns.num_generated.tolist() == [len(s.output_token_ids) for s in table]

    def teardown(self) -> None:
        if self.in_step:
            self.h.end()
        assert isinstance(self.h.planner, ChosenPlanner)
        self.h.planner.hold = False
        self.h.planner.pause_next.clear()
        self.h.run_to_empty()
        for handle, (prompt, max_tokens) in self.asked.items():
            end = self.h.end_of(handle)
            if handle in self.failed:
                assert end is EndReason.ERROR
            elif handle in self.cancelled:
                assert end is EndReason.CANCELLED
            elif handle in self.stopped:
                assert end is None
            elif end is EndReason.ERROR:
                error = self.h.events_of(handle)[-1].error or ""
                assert "max_queue_size" in error or "KV blocks" in error
            else:
                self.h.expect_whole(handle, prompt, max_tokens)
        self.h.expect_nothing_left()


class MaxUtilizationMachine(CoordinatorMachine):
    policy = "max_utilization"


_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGuaranteedNoEvict = CoordinatorMachine.TestCase
TestGuaranteedNoEvict.settings = _SETTINGS
TestMaxUtilization = MaxUtilizationMachine.TestCase
TestMaxUtilization.settings = _SETTINGS
