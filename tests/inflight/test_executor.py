"""The engine's thread: what becomes visible when, bounds, sleep, and its own failure."""

import resource
import threading
import time
from datetime import timedelta

import msgspec
import pytest

from tests.inflight.helpers import VOCAB, executor_config, request
from tokenflow.clock import ManualClock
from tokenflow.errors import EngineLostError
from tokenflow.executor.api import FinishReason
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

SCRIPT = pseudo_random(VOCAB)


class SteppedRunner(ScriptedRunner):
    """Waits inside each step until the test allows it."""

    def __init__(self):
        super().__init__(SCRIPT, VOCAB)
        self.entered, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, chunks):
        self.entered.release()
        assert self.allowed.acquire(timeout=10)
        return super().forward(chunks)

    def step(self):
        """Let the step that has been entered (or will be) go on."""
        assert self.entered.acquire(timeout=10)
        self.allowed.release()


@pytest.fixture
def make():
    executors = []

    def get(runner, **limits):
        clock = limits.pop("clock", None)
        extra = {k: limits.pop(k) for k in list(limits) if k.startswith(("max_queue", "iter_"))}
        config = msgspec.structs.replace(executor_config(**limits), **extra)
        executors.append((InflightExecutor(runner, config, clock), runner))
        return executors[-1][0]

    yield get
    for executor, runner in executors:
        if isinstance(runner, SteppedRunner):
            runner.allowed.release(1000)
        executor.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "inflight-engine"]


def take(executor, seconds=10.0):
    return executor.await_responses(timedelta(seconds=seconds))


def test_a_steps_responses_become_visible_together_with_its_statistics(make):
    runner, clock = SteppedRunner(), ManualClock(100.0)
    executor = make(runner, clock=clock)
    executor.enqueue_requests([request([i], 3) for i in range(3)])
    assert runner.entered.acquire(timeout=10)
    clock.advance(0.25)
    runner.allowed.release()
    responses = take(executor)
    assert [r.request_id for r in responses] == [1, 2, 3]
    (stats,) = executor.get_latest_iteration_stats()
    assert (stats.iter_latency_ms, stats.end_time) == (250.0, 100.25)


def test_cancel_then_enqueue_during_a_step_take_effect_at_its_end(make):
    runner = SteppedRunner()
    executor = make(runner, max_batch_size=1)
    a = executor.enqueue_request(request([1], 20))
    runner.step()
    assert take(executor)[0].request_id == a
    assert runner.entered.acquire(timeout=10)
    executor.cancel_request(a)
    b = executor.enqueue_request(request([2], 20))
    runner.allowed.release()
    (cancelled,) = take(executor)
    assert cancelled.result.finish_reasons == [FinishReason.CANCELLED]
    assert cancelled.result.output_token_ids == [[]]
    runner.step()
    (first,) = take(executor)
    assert first.request_id == b
    assert first.result.output_token_ids == [expected(SCRIPT, [2], 1)[0]]
    assert runner.num_steps == 3


def test_a_cancelled_waiting_request_ends_at_the_end_of_the_step_in_flight(make):
    runner = SteppedRunner()
    executor = make(runner, max_batch_size=1)
    executor.enqueue_request(request([1], 20))
    waiting = executor.enqueue_request(request([2], 20))
    runner.step()
    take(executor)
    executor.cancel_request(waiting)
    runner.step()
    assert waiting in [r.request_id for r in take(executor)]


def test_statistics_are_bounded_and_can_be_off(make):
    for limit, kept in ((3, 3), (0, 0)):
        executor = make(ScriptedRunner(SCRIPT, VOCAB), iter_stats_max_iterations=limit)
        executor.enqueue_request(request([1], 20, streaming=False))
        assert len(take(executor)) == 1
        deadline = time.monotonic() + 30
        stats = []
        while kept and not stats and time.monotonic() < deadline:
            stats = executor.get_latest_iteration_stats()
        assert len(stats) <= kept
        assert bool(stats) == bool(kept)


def test_queue_bound_counts_what_waits_and_takes_all_or_none(make):
    runner = SteppedRunner()
    executor = make(runner, max_batch_size=1, max_queue_size=2)
    executor.enqueue_request(request([1], 2))
    runner.step()
    take(executor)
    executor.enqueue_request(request([2], 2))
    with pytest.raises(RuntimeError, match="Maximum queue size of 2"):
        executor.enqueue_requests([request([3], 2), request([4], 2)])
    executor.enqueue_request(request([5], 2))
    with pytest.raises(RuntimeError, match="Maximum queue size of 2"):
        executor.enqueue_request(request([6], 2))
    runner.step()
    take(executor)
    assert runner.entered.acquire(timeout=10)
    runner.allowed.release()
    executor.enqueue_request(request([6], 2))


def test_idle_engine_sleeps(make):
    executor = make(ScriptedRunner(SCRIPT, VOCAB))
    executor.enqueue_request(request([1], 3))
    while not take(executor)[-1].result.is_final:
        pass
    time.sleep(0.05)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.4)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2


def test_shutdown_finishes_active_requests_and_drops_queued_ones(make):
    runner = SteppedRunner()
    executor = make(runner, max_batch_size=1)
    executor.enqueue_request(request([1], 20))
    executor.enqueue_request(request([2], 20))
    runner.step()
    take(executor)
    closer = threading.Thread(target=executor.shutdown)
    closer.start()
    while executor.can_enqueue_requests():
        time.sleep(0.001)
    runner.allowed.release(1000)
    closer.join(30)
    assert runner.num_steps == 20
    assert runner.num_requests == 0


def test_failed_step_is_an_error_response_and_the_engine_goes_on(make):
    class FailsOnce(ScriptedRunner):
        def forward(self, chunks):
            output = super().forward(chunks)
            if self.num_steps == 2:
                raise RuntimeError("device lost")
            return output

    executor = make(FailsOnce(SCRIPT, VOCAB))
    executor.enqueue_request(request([1], 5))
    responses = []
    while not responses or not responses[-1].has_error():
        responses += take(executor)
    assert responses[-1].error_msg == "Encountered an error in forward function: device lost"
    executor.enqueue_request(request([1], 1))
    assert take(executor)[0].result.output_token_ids == [expected(SCRIPT, [1], 1)[0]]


def test_a_bug_in_the_engine_ends_every_request_and_refuses_more(make):
    class CannotForget(ScriptedRunner):
        def remove_request(self, request_id):
            raise KeyError(request_id)

    executor = make(CannotForget(SCRIPT, VOCAB), max_batch_size=2)
    ids = [executor.enqueue_request(request([i], 3)) for i in range(5)]
    errors = []
    while len(errors) < 5:
        errors += [r for r in take(executor) if r.has_error()]
    assert sorted(r.request_id for r in errors) == ids
    assert "KeyError" in errors[0].error_msg
    assert not executor.can_enqueue_requests()
    executor.cancel_request(ids[0])
    with pytest.raises(EngineLostError, match="KeyError"):
        executor.enqueue_request(request([1], 1))
    with pytest.raises(EngineLostError, match="KeyError"):
        executor.await_responses()


def test_a_flood_of_cancels_is_not_kept(make):
    runner = SteppedRunner()
    executor = make(runner)
    a = executor.enqueue_request(request([1], 5))
    assert runner.entered.acquire(timeout=10)
    for i in range(1000):
        executor.cancel_request(a)
        executor.cancel_request(10_000 + i)
    assert len(executor._inbox) == 1


def test_many_callers(make):
    """Requests, cancels and resumes from several threads; every request ends exactly once."""
    executor = make(ScriptedRunner(SCRIPT, VOCAB), max_batch_size=4)
    finals = {}
    tokens = {}
    stop = threading.Event()

    def awaiter():
        while not stop.is_set():
            for response in take(executor, 0.02):
                result = response.result
                tokens.setdefault(response.request_id, []).extend(result.output_token_ids[0])
                if result.is_final:
                    assert response.request_id not in finals
                    finals[response.request_id] = result.finish_reasons[0]

    prompts = {}
    lock = threading.Lock()

    def caller(seed):
        for i in range(25):
            prompt = [seed, i % 5]
            with lock:
                request_id = executor.enqueue_request(request(prompt, 12))
                prompts[request_id] = prompt
            if i % 3 == 0:
                executor.cancel_request(request_id)

    threads = [threading.Thread(target=awaiter)]
    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in threads + callers:
        thread.start()
    for thread in callers:
        thread.join()
    deadline = time.monotonic() + 20
    while len(finals) < 100 and time.monotonic() < deadline:
        time.sleep(0.005)
    stop.set()
    threads[0].join()
    assert len(finals) == 100
    for request_id, reason in finals.items():
        got = tokens[request_id]
        assert got == expected(SCRIPT, prompts[request_id], len(got))[0]
        assert len(got) == 12 or reason is FinishReason.CANCELLED
