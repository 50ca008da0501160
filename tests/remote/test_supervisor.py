"""When an engine is started again, when not, and that a stop ends it: rules, on fakes and a clock
that stands still. The real processes are in `test_restart`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote.helpers import LIMIT_S, request
from tests.remote.helpers import tokens as tokens_of
from tokenflow.clock import ManualClock
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.factory import start_engine
from tokenflow.executor.supervisor import EngineKeeper, EngineSupervisor

NEVER = threading.Event()


class Engine:
    """An executor as far as a supervisor is concerned."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.live.append(self)

    def shutdown(self) -> None:
        if self in self._world.live:
            self._world.live.remove(self)


class World:
    """Starts engines, fails where the plan says so, and keeps count of time and of what lives."""

    def __init__(self, *plan: BaseException | None, **options: Any) -> None:
        self.clock = ManualClock(1000.0)
        self.live: list[Engine] = []
        self.start_times: list[float] = []
        self.plan = list(plan)  # what the coming starts do; none = they work
        self.on_sleep: Callable[[], None] = lambda: None
        options = {"max_restarts": 100, "window_s": 300.0, **options}
        self.supervisor = EngineSupervisor(
            self._start, clock=self.clock, sleep=self._sleep, **options
        )

    def _start(self, stop: Any) -> Any:
        self.start_times.append(self.clock.now())
        assert not self.live, "two engines at a time"
        assert not stop.is_set(), "a start that nobody wants"
        error = self.plan.pop(0) if self.plan else None
        if error is not None:
            raise error
        return Engine(self)

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.05, "a stop would be noticed late"
        self.clock.advance(seconds)
        self.on_sleep()

    def restart(self, reason: str = "it broke", stop: threading.Event = NEVER) -> Any:
        before = self.clock.now()
        try:
            return self.supervisor.restart(reason, stop)
        finally:
            self.waited_s = self.clock.now() - before


def test_first_loss_is_made_good_at_once_and_the_next_ones_ever_later() -> None:
    world = World()
    waits = []
    for _ in range(9):
        assert world.restart() is world.supervisor.executor
        waits.append(world.waited_s)
    assert waits == pytest.approx([0, 0.5, 1, 2, 4, 8, 15, 15, 15])
    assert len(world.live) == 1


def test_losses_are_forgotten_after_the_window() -> None:
    world = World(window_s=60.0, max_restarts=2)
    for _ in range(5):
        world.restart()
        assert world.waited_s == 0
        world.restart()
        assert world.waited_s == pytest.approx(0.5)
        world.clock.advance(60.0)


def test_start_that_fails_is_a_loss_and_is_tried_again() -> None:
    world = World()
    world.plan = [EngineError("no memory"), OSError("no process"), RuntimeError("CUDA"), None]
    assert world.restart() is not None
    first, *rest = world.start_times[1:]
    assert [time - first for time in rest] == pytest.approx([0.5, 1.5, 3.5])
    assert len(world.live) == 1


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_too_many_losses_are_the_end_with_the_last_reason(allowed: int) -> None:
    world = World(max_restarts=allowed, window_s=120.0)
    for i in range(allowed):
        assert world.restart(f"reason {i}") is not None
    with pytest.raises(EngineError, match=rf"lost {allowed + 1} times? within 120 s.*: the end"):
        world.restart("the end")
    assert world.live == []
    assert len(world.start_times) == 1 + allowed


def test_starts_that_never_work_are_given_up() -> None:
    world = World(max_restarts=4)
    world.plan = [EngineError(f"failure {i}") for i in range(100)]
    with pytest.raises(EngineError, match=r"lost 5 times.*could not be started: failure 3"):
        world.restart()
    assert world.waited_s == pytest.approx(0 + 0.5 + 1 + 2)
    assert world.live == []


def test_first_start_raises_what_it_raises() -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        World(FileNotFoundError("no checkpoint"))


def test_stop_during_the_back_off_ends_it() -> None:
    world = World()
    world.restart()
    stop = threading.Event()
    world.on_sleep = stop.set
    assert world.restart(stop=stop) is None
    assert world.waited_s == pytest.approx(0.05)
    assert world.live == []
    assert len(world.start_times) == 2


def test_stop_that_is_set_already_starts_nothing() -> None:
    world = World()
    stop = threading.Event()
    stop.set()
    assert world.restart(stop=stop) is None
    assert world.live == []
    assert len(world.start_times) == 1


def test_shutdown_during_the_back_off_ends_it() -> None:
    world = World()
    world.restart()
    closers = []

    def close() -> None:
        if not closers:
            closers.append(threading.Thread(target=world.supervisor.shutdown))
            closers[0].start()
            while not world.supervisor._closing.is_set():
                pass

    world.on_sleep = close
    assert world.restart() is None
    closers[0].join(LIMIT_S)
    assert not closers[0].is_alive()
    assert world.live == []
    assert world.restart() is None, "closed for good"


@pytest.mark.parametrize("outcome", ["starts", "fails"])
def test_stop_during_a_start_releases_what_it_started(outcome: str) -> None:
    stop = threading.Event()
    started: list[Engine] = []
    world = World()

    def start(signal: Any) -> Any:
        if started:
            assert not signal.is_set()
            stop.set()
            assert signal.is_set()
            if outcome == "fails":
                raise EngineError("the start of the engine was stopped")
        started.append(Engine(world))
        return started[-1]

    supervisor = EngineSupervisor(start, max_restarts=9, window_s=9.0, clock=world.clock)
    world.supervisor.shutdown()
    assert supervisor.restart("it broke", stop) is None
    assert world.live == []
    supervisor.shutdown()


def test_release_that_fails_or_hangs_holds_nothing_up() -> None:
    go_on = threading.Event()

    class Stubborn:
        def __init__(self, act: Callable[[], object]) -> None:
            self.shutdown = act

    def fail() -> None:
        raise RuntimeError("cannot stop")

    engines = [Stubborn(fail), Stubborn(lambda: go_on.wait(LIMIT_S)), Stubborn(lambda: None)]
    supervisor = EngineSupervisor(
        lambda stop: engines.pop(0),  # type: ignore[arg-type, return-value]
        max_restarts=5,
        window_s=60.0,
        clock=(clock := ManualClock()),
        sleep=clock.advance,
        release_wait_s=0.05,
    )
    assert supervisor.restart("it broke", NEVER) is not None
    assert supervisor.restart("it hangs", NEVER) is not None
    supervisor.shutdown()
    go_on.set()


def test_shutdown_does_not_wait_for_ever_for_a_start_that_heeds_no_signal() -> None:
    go_on, entered = threading.Event(), threading.Event()
    world = World()

    def start(signal: Any) -> Any:
        if world.start_times[1:]:
            entered.set()
            go_on.wait(LIMIT_S)
        world.start_times.append(0.0)
        return Engine(world)

    supervisor = EngineSupervisor(
        start, max_restarts=5, window_s=60.0, clock=world.clock, release_wait_s=0.02
    )
    results: list[object] = []
    restarting = threading.Thread(target=lambda: results.append(supervisor.restart("x", NEVER)))
    restarting.start()
    assert entered.wait(LIMIT_S)
    supervisor.shutdown()
    go_on.set()
    restarting.join(LIMIT_S)
    assert results == [None]
    world.supervisor.shutdown()
    assert world.live == [], "the thread that started it released it"


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 3)), max_size=12),
    max_restarts=st.integers(0, 5),
    window_s=st.floats(1, 60),
)
def test_restarts_follow_the_rule(
    steps: list[tuple[float, int]], max_restarts: int, window_s: float
) -> None:
    """Against a model that keeps all losses: after each, the wait and the end are as promised."""
    world = World(max_restarts=max_restarts, window_s=window_s)
    losses: list[float] = []
    for gap_s, num_failures in steps:
        world.clock.advance(gap_s)
        world.plan = [EngineError("no")] * num_failures
        lost_time, num_starts = world.clock.now(), len(world.start_times)
        try:
            world.restart()
            ended = False
        except EngineError:
            ended = True
        starts = world.start_times[num_starts:]
        loss_times = [lost_time, *starts[:num_failures]]
        for loss_time, start_time in zip(loss_times, starts, strict=False):
            losses.append(loss_time)
            recent = sum(time > loss_time - window_s for time in losses)
            assert recent <= max_restarts
            wait_s = 0 if recent == 1 else min(15.0, 0.5 * 2 ** (recent - 2))
            assert start_time - loss_time == pytest.approx(wait_s, abs=1e-6)
        if ended:
            last = loss_times[len(starts)]
            losses.append(last)
            assert sum(time > last - window_s for time in losses) > max_restarts
            assert world.live == []
            return
        assert len(world.live) == 1


# -- an engine in this process -------------------------------------------------------------------


def _in_process() -> EngineSupervisor:
    config = ServingConfig(engine="scripted", engine_process=False)
    clock = ManualClock()
    return EngineSupervisor(
        lambda stop: start_engine(config, stop=stop),
        max_restarts=5,
        window_s=60.0,
        clock=clock,
        sleep=clock.advance,
    )


def _final_tokens(executor: Any, first: int) -> list[int]:
    id = executor.enqueue_request(request(3, first=first))
    responses: list[Any] = []
    while not responses or not responses[-1].result.is_final:
        responses += executor.await_responses(timedelta(seconds=LIMIT_S))
    return tokens_of(responses, id)


def test_an_engine_without_a_process_is_replaced_and_cannot_be_killed() -> None:
    supervisor = _in_process()
    keeper: EngineKeeper = supervisor
    first = supervisor.executor
    assert not keeper.kill("it hangs")
    assert first.can_enqueue_requests()
    second = keeper.restart("it broke", NEVER)
    assert second is supervisor.executor
    assert second is not first
    assert not first.can_enqueue_requests()
    assert len(_final_tokens(second, 7)) == 3
    supervisor.shutdown()
    supervisor.shutdown()
    assert not second.can_enqueue_requests()


def test_load_in_this_process_ends_at_its_next_progress() -> None:
    stop = threading.Event()
    config = ServingConfig(engine_process=False, gpt_model_path="/nowhere")
    stop.set()
    with pytest.raises(EngineError, match="was stopped"):
        start_engine(config, stop=stop)


def test_a_failed_engine_in_this_process_is_released_without_waiting() -> None:
    from tests.inflight.test_failed_engine import BAD, Picky, take_all
    from tests.inflight.test_failed_engine import request as inflight_request
    from tokenflow.inflight.executor import InflightExecutor

    config = ServingConfig(engine="scripted").executor_config()
    supervisor = EngineSupervisor(
        lambda stop: InflightExecutor(Picky(), config),
        max_restarts=5,
        window_s=60.0,
        clock=ManualClock(),
    )
    failed = supervisor.executor
    for _ in range(2):
        failed.enqueue_request(inflight_request([BAD]))
        assert failed.await_responses(timedelta(seconds=LIMIT_S))[-1].has_error()
    failed.enqueue_request(inflight_request([BAD]))
    assert take_all(failed)
    with pytest.raises(EngineLostError):
        failed.await_responses()
    executor = supervisor.restart("three steps failed", NEVER)
    assert executor is not None
    assert executor.can_enqueue_requests()
    supervisor.shutdown()
