"""An engine whose steps fail again and again: when it is given up, and what callers see of it."""

import gc
import threading
import weakref
from datetime import timedelta

import pytest

from tests.inflight.helpers import VOCAB, Driver, executor_config, request
from tokenflow.errors import EngineLostError
from tokenflow.inflight.executor import MAX_FAILED_STEPS, InflightExecutor
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

SCRIPT = pseudo_random(VOCAB)
BAD = 66  # a prompt with it fails its step


class Picky(ScriptedRunner):
    """Fails each step that computes BAD; `allowed` lets the step go on."""

    def __init__(self, allowed=None):
        super().__init__(SCRIPT, VOCAB)
        self._allowed = allowed

    def forward(self, chunks):
        if self._allowed is not None:
            assert self._allowed.acquire(timeout=10)
        if any(BAD in chunk.token_ids for chunk in chunks):
            raise RuntimeError("device lost")
        return super().forward(chunks)


def take(executor):
    return executor.await_responses(timedelta(seconds=10))


def final(executor):
    """The final response of the one request that runs."""
    while True:
        for response in take(executor):
            if response.has_error() or response.result.is_final:
                return response


def take_all(executor):
    """Every response until the engine is lost."""
    responses = []
    while True:
        try:
            responses += take(executor)
        except EngineLostError:
            return responses


@pytest.fixture
def make():
    executors = []

    def get(runner, **limits):
        executors.append(InflightExecutor(runner, executor_config(**limits)))
        return executors[-1]

    yield get
    for executor in executors:
        executor.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "inflight-engine"]


def test_failures_are_counted_until_a_step_computes_something():
    driver = Driver(executor_config(), runner=Picky())
    for count in (1, 2):
        driver.run_one([BAD])
        assert driver.batcher.num_failed_steps == count
    driver.step()  # nothing to compute: says nothing about the device
    assert driver.batcher.num_failed_steps == 2
    assert "device lost" in driver.batcher.last_failure
    driver.run_one([1])
    assert driver.batcher.num_failed_steps == 0


def test_third_failure_in_a_row_is_the_end_of_the_engine_and_no_requests_own(make):
    executor = make(Picky())
    for _ in range(MAX_FAILED_STEPS - 1):
        executor.enqueue_request(request([BAD]))
        assert final(executor).error_msg == "Encountered an error in forward function: device lost"
        assert executor.can_enqueue_requests()
    last = executor.enqueue_request(request([BAD]))
    response = final(executor)
    assert not executor.can_enqueue_requests()
    assert response.request_id == last
    assert response.error_msg.startswith("The engine failed and takes no more requests: 3 steps")
    assert "device lost" in response.error_msg
    for call in (executor.await_responses, lambda: executor.enqueue_request(request([1]))):
        with pytest.raises(EngineLostError, match="device lost"):
            call()
    executor.cancel_request(last)


def test_everything_alive_ends_with_the_engine(make):
    allowed = threading.Semaphore(0)
    executor = make(Picky(allowed), max_batch_size=1)
    ids = [executor.enqueue_request(request([BAD, i])) for i in range(6)]
    allowed.release(1000)
    responses = take_all(executor)
    assert [r.request_id for r in responses] == ids
    ends = ["takes no more requests" in r.error_msg for r in responses]
    assert ends == [False] * (MAX_FAILED_STEPS - 1) + [True] * (6 - MAX_FAILED_STEPS + 1)


def test_a_step_that_works_makes_good_for_those_that_failed(make):
    executor = make(Picky())
    for i in range(3 * MAX_FAILED_STEPS):
        if i % MAX_FAILED_STEPS == MAX_FAILED_STEPS - 1:
            executor.enqueue_request(request([i], 1))
            assert final(executor).result.output_token_ids == [expected(SCRIPT, [i], 1)[0]]
        else:
            executor.enqueue_request(request([BAD]))
            assert final(executor).has_error()
    assert executor.can_enqueue_requests()


@pytest.mark.parametrize("failed", [False, True])
def test_an_engine_that_has_ended_holds_no_model_and_no_kv(make, failed):
    runner = Picky()
    is_alive = weakref.ref(runner)
    executor = make(runner)
    if failed:
        executor.enqueue_requests([request([BAD])] * 4)
        executor.enqueue_requests([request([BAD])] * 4)
        executor.enqueue_requests([request([BAD])] * 4)
        take_all(executor)
    else:
        executor.enqueue_request(request([1], 3))
        final(executor)
    executor.shutdown()
    executor.shutdown()
    del runner
    gc.collect()
    assert is_alive() is None
