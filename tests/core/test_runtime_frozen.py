"""A process that stood still for a while, as in a frozen container, must not blame its engine."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.core.test_runtime import CONFIG, Sink
from tests.core.test_runtime_losses import Keeper
from tokenflow.clock import ManualClock
from tokenflow.runtime import Runtime
from tokenflow.types import GenerateRequest

STALL_TIMEOUT_S = 5.0


def test_time_that_the_runtime_slept_through_does_not_count_as_a_stall() -> None:
    """The engine is silent throughout. After the thaw it has its whole time again, not more."""
    config = replace(CONFIG, engine_stall_timeout_s=STALL_TIMEOUT_S)
    keeper, clock, sink = Keeper(config), ManualClock(), Sink()
    engine = keeper.executor
    runtime = Runtime(engine, config, emit=sink, clock=clock, keeper=keeper)
    runtime.start()
    try:
        handle = runtime.submit(
            GenerateRequest(
                request_id="r", input_token_ids=(1,), max_tokens=400, arrival_time=clock.now()
            )
        )
        sink.wait_tokens(handle, 3)
        engine.stuck.set()
        time.sleep(0.1)  # what it had computed is heard
        pass_time(runtime, clock, 100.0)
        assert engine.lost is None
        for _ in range(4):
            pass_time(runtime, clock, 0.9)
        assert engine.lost is None
        for _ in range(3):
            pass_time(runtime, clock, 0.9)
        assert "no iteration for 5 s" in (engine.lost or "")
    finally:
        engine.stuck.clear()
        runtime.shutdown(5.0)
        for executor in {engine, *keeper.gone, keeper.executor}:
            executor.shutdown()


def pass_time(runtime: Runtime, clock: ManualClock, seconds: float) -> None:
    """Let the clock jump, and the runtime have two turns."""
    clock.advance(seconds)
    for _ in range(2):
        before = runtime.gauges()
        runtime.acknowledge(0, 0)
        deadline = time.monotonic() + 20.0
        while runtime.gauges() is before:
            assert time.monotonic() < deadline, "no turn"
            time.sleep(0.002)
