"""The steps of a batcher: what a request sends, and the order of the phases."""

import pytest

from tests.inflight.helpers import VOCAB, Driver, executor_config, request
from tokenflow.errors import InternalError
from tokenflow.executor.api import FinishReason, OutputConfig
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


def test_deltas_and_final():
    driver = Driver(executor_config())
    request_id = driver.enqueue([5, 6], 3)
    assert [r.result.output_token_ids for r in driver.step()] == [
        [[expected(RANDOM, [5, 6], 1)[0][0]]]
    ]
    driver.run()
    output = driver.outputs[request_id]
    assert (output.token_ids, output.log_probs) == expected(RANDOM, [5, 6], 3)
    assert output.reason is FinishReason.LENGTH
    assert output.num_responses == 3, "the last token comes with the final response"
    assert output.final.result.cum_log_probs == [sum(output.log_probs)]


def test_non_streaming_comes_once_with_or_without_prompt():
    driver = Driver(executor_config())
    for exclude in (True, False):
        config = OutputConfig(exclude_input_from_output=exclude, return_log_probs=True)
        output = driver.run_one([5, 6], 3, streaming=False, output_config=config)
        ids, log_probs = expected(RANDOM, [5, 6], 3)
        assert output.token_ids == ([] if exclude else [5, 6]) + ids
        assert output.log_probs == log_probs
        assert output.num_responses == 1


def test_step_returns_everything_at_once():
    batcher = InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config())
    batcher.enqueue(1, request([1], 1))
    batcher.enqueue(2, request([VOCAB], 1))
    assert sorted(r.request_id for r in batcher.step(0.0).responses) == [1, 2]


def test_phases_out_of_order_raise():
    batcher = InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config())
    with pytest.raises(InternalError):
        batcher.finish_step(0.0)
    batcher.begin_step(0.0)
    with pytest.raises(InternalError):
        batcher.begin_step(0.0)
