"""Steps, copies and runners that fail: errors for those concerned, nothing poisoned."""

import pytest

from tests.inflight.helpers import VOCAB, Driver, executor_config
from tokenflow.executor.api import FinishReason, OutputConfig
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


class Failing(ScriptedRunner):
    """Fails while `broken`, after having written its chunks."""

    broken = False

    def forward(self, chunks):
        output = super().forward(chunks)
        if self.broken:
            raise RuntimeError("out of order")
        return output


def test_failed_step_ends_every_active_request_and_the_queue_goes_on():
    driver = Driver(executor_config(max_batch_size=2), runner=Failing(RANDOM, VOCAB))
    a, b = driver.enqueue([1], 9), driver.enqueue([2], 9)
    c = driver.enqueue([3], 9)
    driver.step()
    driver.runner.broken = True
    driver.step(lambda: driver.cancel(b))
    for request_id in (a, b):
        assert driver.outputs[request_id].error == (
            "Encountered an error in forward function: out of order"
        )
    assert driver.batcher.kv.num_used_blocks == 0
    assert driver.runner.num_requests == 0
    driver.runner.broken = False
    driver.run()
    assert driver.outputs[c].token_ids == expected(RANDOM, [3], 9)[0]
    assert driver.run_one([1], 9).token_ids == expected(RANDOM, [1], 9)[0]


def test_a_failed_request_stores_nothing_more():
    driver = Driver(executor_config(), runner=Failing(RANDOM, VOCAB))
    prompt = list(range(6))
    driver.enqueue(prompt, 9)
    driver.step()
    driver.runner.broken = True
    driver.step()
    driver.runner.broken = False
    metrics = OutputConfig(return_perf_metrics=True)
    output = driver.run_one(prompt, 9, output_config=metrics)
    assert output.final.result.request_perf_metrics.num_reused_tokens == 4, "full blocks only"
    assert output.token_ids == expected(RANDOM, prompt, 9)[0]


def test_a_failed_copy_ends_requests_and_poisons_nothing():
    class CannotCopy(ScriptedRunner):
        broken = True

        def copy_blocks(self, copies):
            if self.broken:
                raise RuntimeError("no copy today")
            super().copy_blocks(copies)

    driver = Driver(executor_config(), runner=CannotCopy(RANDOM, VOCAB))
    driver.run_one([1, 2, 3, 4, 5, 6, 7], 1)
    fork = [1, 2, 3, 4, 5, 6, 50, 51]
    assert "no copy today" in driver.run_one(fork, 4).error
    driver.runner.broken = False
    assert driver.run_one(fork, 4).token_ids == expected(RANDOM, fork, 4)[0]
    assert driver.run_one([1, 2, 3, 4, 5, 6, 7, 8], 4).reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [[1, 2], [VOCAB], []])
def test_runner_that_returns_nonsense_is_a_failed_step(tokens):
    class Nonsense(ScriptedRunner):
        def forward(self, chunks):
            output = super().forward(chunks)
            output.token_ids[:] = tokens
            return output

    driver = Driver(executor_config(), runner=Nonsense(RANDOM, VOCAB))
    assert "forward function" in driver.run_one([1], 3).error


def test_runner_that_refuses_a_request():
    class Refusing(ScriptedRunner):
        def add_request(self, request_id, request):
            if request.input_token_ids[0] == 66:
                raise ValueError("cannot sample like this")
            super().add_request(request_id, request)

    driver = Driver(executor_config(), runner=Refusing(RANDOM, VOCAB))
    bad, good = driver.enqueue([66, 1], 3), driver.enqueue([1], 3)
    driver.run()
    assert "cannot sample like this" in driver.outputs[bad].error
    assert driver.outputs[good].token_ids == expected(RANDOM, [1], 3)[0]
    assert driver.runner.num_requests == 0
