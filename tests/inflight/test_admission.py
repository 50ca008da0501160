"""What the engine refuses, of its configuration and of a request, and what it accepts."""

import pytest

from tests.inflight.helpers import VOCAB, Driver, executor_config
from tokenflow.errors import ConfigError
from tokenflow.executor.api import FinishReason, KvCacheRetentionConfig, SamplingConfig
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        (range(64), {}, ["64", "63"]),
        ([97], {}, ["input_token_ids", "97"]),
        ([-1], {}, ["input_token_ids", "-1"]),
        ([1], {"end_id": 97}, ["end_id", "97"]),
        ([1], {"end_id": -2}, ["end_id", "-2"]),
        ([1], {"stop_words": ((),)}, ["stop_words"]),
        ([1], {"stop_words": ((1, 97),)}, ["stop_words", "97"]),
        ([1], {"bad_words": ((1,), ())}, ["bad_words"]),
        ([1], {"bad_words": ((1,), (2, 97))}, ["bad_words", "97"]),
        ([1], {"bad_words": ((1,),) * 1025}, ["bad_words", "1024", "1025"]),
        ([1], {"bad_words": ((1,) * 9000, (1,) * 9000)}, ["bad_words", "16384", "18000"]),
        ([1], {"embedding_bias": ((97, 1.0),)}, ["embedding_bias", "97"]),
        ([1], {"embedding_bias": ((-1, 1.0),)}, ["embedding_bias", "-1"]),
        ([1], {"embedding_bias": ((3, 1.0), (3, 2.0))}, ["embedding_bias", "once"]),
        ([1], {"embedding_bias": ((3, float("inf")),)}, ["embedding_bias", "3"]),
        ([1], {"embedding_bias": ((3, float("nan")),)}, ["embedding_bias", "3"]),
        ([1], {"embedding_bias": ((3, -1e39),)}, ["embedding_bias", "3"]),
        ([1], {"priority": float("nan")}, ["priority"]),
        (["a"], {}, ["fetching"]),
        ([1], {"max_tokens": 34}, ["max_tokens", "9", "8"]),
    ]
    + [
        ([1], {"sampling_config": SamplingConfig(**{name: value})}, [name])
        for name, value in [
            ("beam_width", 2),
            ("num_return_sequences", 2),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", -1.0),
            ("repetition_penalty", float("inf")),
            ("repetition_penalty", float("nan")),
            ("presence_penalty", float("inf")),
            ("presence_penalty", float("nan")),
            ("presence_penalty", -1e39),
            ("frequency_penalty", float("-inf")),
            ("frequency_penalty", float("nan")),
            ("prompt_ignore_length", -1),
            ("no_repeat_ngram_size", -1),
            ("no_repeat_ngram_size", 33),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("min_p", float("nan")),
            ("top_p_decay", 0.9),
            ("top_p_min", 0.5),
            ("top_p_reset_ids", 3),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", -0.1),
            ("top_p", 1.01),
            ("top_p", float("nan")),
            ("temperature", -0.1),
            ("temperature", float("inf")),
            ("temperature", float("nan")),
            ("min_tokens", -1),
            ("min_tokens", 2**31),
            ("prompt_ignore_length", 2**70),
            ("seed", -1),
            ("seed", 2**64),
        ]
    ]
    + [
        ([1], {"sampling_config": SamplingConfig(top_p=0.5, **{name: value})}, [name])
        for name, value in [
            ("top_p_decay", 0.0),
            ("top_p_decay", 1.1),
            ("top_p_decay", float("nan")),
            ("top_p_min", 0.0),
            ("top_p_min", 1.1),
            ("top_p_reset_ids", -1),
            ("top_p_reset_ids", 97),
        ]
    ],
)
def test_refused_request_is_an_error_response_and_the_others_go_on(prompt, fields, words):
    driver = Driver(executor_config(num_blocks=8, max_seq_len=64))
    other = driver.enqueue([1], 8)
    driver.step()
    bad = driver.enqueue(prompt, **fields)
    driver.step()
    message = driver.outputs[bad].error
    assert message.startswith("Encountered an error when fetching new request: ")
    assert all(word in message for word in words), message
    driver.run()
    assert driver.outputs[other].token_ids == expected(RANDOM, [1], 8)[0]


def test_every_sampling_field_is_accepted():
    driver = Driver(executor_config())
    sampling = SamplingConfig(
        repetition_penalty=1e-3, presence_penalty=-2.0, frequency_penalty=2.0,
        prompt_ignore_length=10**6, no_repeat_ngram_size=32, min_tokens=3, min_p=1.0, top_k=5,
        top_p=0.5, top_p_decay=1e-6, top_p_min=1.0, top_p_reset_ids=96, temperature=1e-300, seed=0,
    )  # fmt: skip
    fields = {"bad_words": ((1,), (2,) * 9000), "embedding_bias": ((0, -3e38), (96, 3e38))}
    output = driver.run_one([1], 2, sampling_config=sampling, **fields)
    assert output.reason is FinishReason.LENGTH


def test_neutral_values_and_hints_are_accepted():
    driver = Driver(executor_config())
    sampling = SamplingConfig(
        num_return_sequences=1, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        top_k=0, temperature=0.0, seed=2**64 - 1, prompt_ignore_length=0, no_repeat_ngram_size=0,
        min_p=0.0, min_tokens=0, top_p_decay=1.0,
    )  # fmt: skip
    output = driver.run_one(
        [1], 2, sampling_config=sampling, kv_cache_retention_config=KvCacheRetentionConfig()
    )
    assert output.reason is FinishReason.LENGTH


def test_max_tokens_is_lowered_to_max_seq_len():
    driver = Driver(executor_config(max_seq_len=64))
    assert [len(driver.run_one(range(n), 4).token_ids) for n in (60, 62, 63)] == [4, 2, 1]


def test_limits_that_cannot_work():
    for fields in ({"max_num_tokens": 3}, {"max_batch_size": 0}, {"max_seq_len": 1}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config(**fields))
