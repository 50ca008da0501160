"""End token, min_tokens, stop words."""

from tests.inflight.helpers import MAX_UTILIZATION, VOCAB, Driver, executor_config
from tokenflow.executor.api import FinishReason, SamplingConfig
from tokenflow.inflight.scripts import counting


def test_end_token_is_not_part_of_the_output():
    driver = Driver(executor_config(), script=counting(VOCAB))
    output = driver.run_one([0], 10, end_id=3)
    assert (output.token_ids, output.reason) == ([1, 2], FinishReason.END_ID)
    assert output.final.result.output_token_ids == [[]]
    output = driver.run_one([0], 3, end_id=3)
    assert (output.token_ids, output.reason) == ([1, 2], FinishReason.END_ID)
    assert driver.run_one([0], 4, end_id=-1).token_ids == [1, 2, 3, 4]


def test_end_token_before_min_tokens_is_masked():
    driver = Driver(executor_config(), script=counting(VOCAB))
    sampling = SamplingConfig(min_tokens=4)
    output = driver.run_one([0], 8, end_id=3, sampling_config=sampling)
    assert output.token_ids == [1, 2, 4, 5, 6, 7, 8, 9]


def test_bans_look_at_the_whole_sequence_also_after_the_engine_paused_it():
    """Blocks run out, so the engine itself pauses the later one, and its output becomes context."""
    config = executor_config(num_blocks=8, max_batch_size=2, policy=MAX_UTILIZATION)
    sampling = SamplingConfig(min_tokens=15, no_repeat_ngram_size=3)
    fields = {"end_id": 6, "bad_words": ((14, 15), (3,)), "sampling_config": sampling}
    alone = Driver(config, script=counting(VOCAB)).run_one([0], 20, **fields)
    assert alone.token_ids[:14] == [1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17]
    driver = Driver(config, script=counting(VOCAB))
    ids = [driver.enqueue([0], 20, cache_salt_id=i, **fields) for i in (1, 2)]
    driver.run()
    assert sum(stats.inflight_batching_stats.num_paused_requests for stats in driver.stats) > 0
    assert all(driver.outputs[i].token_ids == alone.token_ids for i in ids)


def test_stop_words():
    driver = Driver(executor_config(), script=counting(VOCAB))

    def stop(*words, prompt=(0,), max_tokens=6):
        output = driver.run_one(prompt, max_tokens, stop_words=words)
        return output.token_ids, output.reason

    assert stop((2, 3)) == ([1, 2, 3], FinishReason.STOP_WORDS)
    assert stop((9,), (2,)) == ([1, 2], FinishReason.STOP_WORDS)
    assert stop((0, 1)) == ([1], FinishReason.STOP_WORDS), "spans prompt and output"
    assert stop((0,))[1] is FinishReason.LENGTH, "only looked at with a new token"
    assert stop((2, 3), max_tokens=3)[1] is FinishReason.STOP_WORDS, "wins over LENGTH"
    assert stop((90, 91, 0, 1))[1] is FinishReason.LENGTH, "longer than what there is"
