"""Engines for the far end of the channel, one factory per behaviour.

Each is named by `module:function` and loaded by the host, so what is tested is the real process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from tests.inflight.paces import Timed
from tests.remote.counting_engine import BeforeStep, CountingEngine
from tests.remote.kv_engine import KvEngine
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Request, Response
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.factory import GatedRunner
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import script_by_name

OnProgress = Callable[[float, str], None]

FAIL_TOKEN = 667  # a prompt that starts with it makes `broken` fail for good in the next step


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
