"""Questions to the engine about its tiers end with it, and its last statistics are true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest

from tests.inflight.helpers import VOCAB, executor_config, request
from tests.inflight.paces import WhenTold
from tokenflow.errors import EngineLostError
from tokenflow.executor.api import IterationStats
from tokenflow.executor.kv_api import KvLocation, KvTiering
from tokenflow.inflight.executor import MAX_FAILED_STEPS, InflightExecutor
from tokenflow.inflight.runner import SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import pseudo_random

LIMIT_S = 10.0
SCRIPT = pseudo_random(VOCAB)


class HeldRunner(ScriptedRunner):
    """Computes when the test allows it, until it `is_broken`."""

    def __init__(self) -> None:
        super().__init__(SCRIPT, VOCAB)
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.is_broken = False

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        self.entered.release()
        assert self.allowed.acquire(timeout=LIMIT_S)
        if self.is_broken:
            raise RuntimeError("device lost")
        return super().forward(chunks)


@pytest.fixture
def asker() -> Iterator[Callable[[KvTiering], Future[KvLocation]]]:
    """Asks in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:

        def ask(tiering: KvTiering) -> Future[KvLocation]:
            return pool.submit(tiering.locate, [1, 2, 3, 4, 5])

        yield ask


def engine(runner: ScriptedRunner) -> tuple[InflightExecutor, KvTiering]:
    executor = InflightExecutor(
        runner, executor_config(num_blocks=16, num_host_blocks=16, kv_tiering=True)
    )
    tiering = executor.get_kv_tiering()
    assert tiering is not None
    return executor, tiering


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_question_is_answered_between_two_steps(asker) -> None:
    runner = HeldRunner()
    executor, tiering = engine(runner)
    executor.enqueue_request(request([1, 2, 3, 4, 5], 3))
    assert runner.entered.acquire(timeout=LIMIT_S)
    answer = asker(tiering)
    wait_until(lambda: executor._inbox)
    assert not answer.done()
    runner.allowed.release(3)
    assert answer.result(LIMIT_S).num_tokens == 4
    executor.shutdown()


def test_a_question_that_shutdown_overtakes_ends_with_it(asker) -> None:
    """It comes while the last step computes; no other begins."""
    runner = HeldRunner()
    executor, tiering = engine(runner)
    executor.enqueue_request(request([1, 2, 3, 4, 5], 1))
    assert runner.entered.acquire(timeout=LIMIT_S)
    answer = asker(tiering)
    wait_until(lambda: executor._inbox)
    closer = threading.Thread(target=executor.shutdown)
    closer.start()
    wait_until(lambda: not executor.can_enqueue_requests())
    runner.allowed.release()
    with pytest.raises(RuntimeError, match="shut down before it answered"):
        answer.result(LIMIT_S)
    closer.join(LIMIT_S)
    with pytest.raises(RuntimeError, match="was shut down"):
        tiering.locate([1, 2])


def test_a_question_that_a_failure_overtakes_ends_with_it_and_so_do_later_ones(asker) -> None:
    runner = HeldRunner()
    executor, tiering = engine(runner)
    for i in range(MAX_FAILED_STEPS):
        executor.enqueue_request(request([i, 2, 3, 4, 5], 1))
        assert runner.entered.acquire(timeout=LIMIT_S)
        if i == MAX_FAILED_STEPS - 1:
            answer = asker(tiering)
            wait_until(lambda: executor._inbox)
        runner.is_broken = True
        runner.allowed.release()
        assert executor.await_responses(timedelta(seconds=LIMIT_S))
    with pytest.raises(EngineLostError, match="device lost"):
        answer.result(LIMIT_S)
    with pytest.raises(EngineLostError, match="device lost"):
        asker(tiering).result(LIMIT_S)
    tiering.prefetch([1, 2])  # a hint to nobody
    executor.shutdown()


class TellingPrompt(tuple[int, ...]):
    """Too long, so that it is refused; calls `on_look` when the engine looks at it."""

    on_look: Callable[[], None] = staticmethod(lambda: None)

    def __len__(self) -> int:
        self.on_look()
        return 1 << 20


def test_the_last_statistics_of_an_idle_engine_have_nothing_on_its_way() -> None:
    """Even if the copies end in a step that has nothing to compute."""
    pace = WhenTold()
    executor, tiering = engine(ScriptedRunner(SCRIPT, VOCAB, pace=pace))
    stats: list[IterationStats] = []

    def num_in_transit() -> int:
        stats.extend(executor.get_latest_iteration_stats())
        tiers = stats[-1].kv_tier_stats if stats else None
        return tiers.num_host_in_transit_blocks if tiers is not None else -1

    executor.enqueue_request(request(range(1, 10), 2, streaming=False))
    assert executor.await_responses(timedelta(seconds=LIMIT_S))
    tiering.offload([*range(1, 10), 0], 2)
    wait_until(lambda: num_in_transit() == 2)
    prompt = TellingPrompt()
    telling = msgspec.structs.replace(request([1]), input_token_ids=prompt)
    prompt.on_look = pace.complete_all
    executor.enqueue_request(telling)
    assert executor.await_responses(timedelta(seconds=LIMIT_S))[0].has_error()
    wait_until(lambda: num_in_transit() == 0)
    executor.shutdown()
