"""Cancel at, before and during a step, and resuming from what was streamed."""

from tests.inflight.helpers import VOCAB, Driver, executor_config
from tokenflow.executor.api import FinishReason, OutputConfig
from tokenflow.inflight.scripts import expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


def test_cancel_before_a_boundary_gives_slot_and_blocks_to_the_next():
    driver = Driver(executor_config(max_batch_size=1, num_blocks=8))
    a = driver.enqueue([1, 2], 28)
    for _ in range(3):
        driver.step()
    driver.cancel(a)
    b = driver.enqueue([3, 4], 28)
    driver.step()
    assert driver.outputs[a].reason is FinishReason.CANCELLED
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 3)[0]
    assert driver.outputs[b].token_ids == expected(RANDOM, [3, 4], 1)[0]


def test_cancel_during_the_step_loses_its_token_and_frees_the_slot():
    driver = Driver(executor_config(max_batch_size=1, num_blocks=8))
    a = driver.enqueue([1, 2], 28)
    driver.step()
    ids = []

    def during():
        driver.cancel(a)
        ids.append(driver.enqueue([3, 4], 28))

    responses = driver.step(during)
    assert [r.result.output_token_ids for r in responses] == [[[]]]
    assert responses[0].result.finish_reasons == [FinishReason.CANCELLED]
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 1)[0]
    driver.step()
    assert driver.outputs[ids[0]].token_ids == expected(RANDOM, [3, 4], 1)[0]


def test_natural_end_wins_over_a_cancel_in_the_same_step():
    driver = Driver(executor_config())
    a = driver.enqueue([1, 2], 2)
    driver.step()
    driver.step(lambda: driver.cancel(a))
    assert driver.outputs[a].reason is FinishReason.LENGTH
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 2)[0]
    driver.run()
    assert driver.outputs[a].num_responses == 2


def test_cancel_of_a_waiting_request_and_of_one_not_admitted_yet():
    driver = Driver(executor_config(max_batch_size=1))
    a = driver.enqueue([1], 10)
    b = driver.enqueue([2], 10)
    driver.step()
    driver.cancel(b)
    c = driver.enqueue([3], 10)
    driver.cancel(c)
    driver.step()
    for cancelled in (b, c):
        assert driver.outputs[cancelled].reason is FinishReason.CANCELLED
        assert driver.outputs[cancelled].token_ids == []
    driver.run()
    assert driver.outputs[a].token_ids == expected(RANDOM, [1], 10)[0]


def test_cancel_in_mid_prefill_stores_only_computed_chunks():
    driver = Driver(executor_config(max_num_tokens=11, tokens_per_block=4))  # chunks of 8
    prompt = list(range(30))
    a = driver.enqueue(prompt, 4)
    driver.step()
    driver.step(lambda: driver.cancel(a))
    assert driver.outputs[a].reason is FinishReason.CANCELLED
    computed = driver.runner.num_computed_tokens
    assert computed == 16
    output = driver.run_one(prompt, 4)
    assert output.token_ids == expected(RANDOM, prompt, 4)[0]
    assert driver.runner.num_computed_tokens == computed + 14 + 3


def test_unknown_finished_and_repeated_cancels_do_nothing():
    driver = Driver(executor_config())
    a = driver.enqueue([1], 2)
    driver.cancel(99)
    driver.run()
    driver.cancel(a)
    b = driver.enqueue([2], 5)
    driver.step()
    driver.cancel(b)
    driver.cancel(b)
    driver.run()
    assert driver.outputs[a].reason is FinishReason.LENGTH
    assert driver.outputs[b].reason is FinishReason.CANCELLED
    assert not driver.batcher._queue._cancels


def test_cancelled_non_streaming_request_returns_no_generated_tokens():
    for exclude, tokens in ((True, []), (False, [7, 8])):
        driver = Driver(executor_config())
        output = OutputConfig(exclude_input_from_output=exclude)
        a = driver.enqueue([7, 8], 9, streaming=False, output_config=output)
        driver.step()
        driver.cancel(a)
        driver.step()
        assert driver.outputs[a].final.result.output_token_ids == [tokens]


def test_resume_after_a_cancel_at_every_index_computes_one_token():
    prompt, total = [11, 12, 13], 60
    ids, log_probs = expected(RANDOM, prompt, total)
    for during in (False, True):
        for k in range(1, total):
            driver = Driver(executor_config(tokens_per_block=8))
            a = driver.enqueue(prompt, total)
            for _ in range(k - during):
                driver.step()
            if during:
                driver.step()
                driver.step(lambda a=a, driver=driver: driver.cancel(a))
            else:
                driver.cancel(a)
                driver.step()
            first = driver.outputs[a]
            if k == total - 1 and during:
                assert first.reason is FinishReason.LENGTH
                continue
            assert first.reason is FinishReason.CANCELLED
            assert len(first.token_ids) == k
            before = driver.runner.num_computed_tokens
            metrics = OutputConfig(return_log_probs=True, return_perf_metrics=True)
            b = driver.run_one(prompt + first.token_ids, total - k, output_config=metrics)
            assert first.token_ids + b.token_ids == ids
            assert first.log_probs + b.log_probs == log_probs
            assert b.reason is FinishReason.LENGTH
            assert driver.runner.num_computed_tokens - before == total - k
            assert b.final.result.request_perf_metrics.num_reused_tokens == len(prompt) + k - 1
