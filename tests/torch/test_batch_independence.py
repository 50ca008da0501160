"""Who else is in the batch, in which order, and what the engine pauses by itself never change the
tokens of a request: the in-flight batcher on logits from a script, with the real sampler."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inflight.helpers import GUARANTEED, MAX_UTILIZATION, Driver, Output, executor_config
from tests.support.logits_runner import LogitsRunner
from tokenflow.executor.api import SamplingConfig

pytestmark = pytest.mark.torch
VOCAB = 40
_tokens = st.integers(0, VOCAB - 1)
_words = st.lists(st.lists(_tokens, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple)
_SAMPLING = {
    "top_k": st.integers(0, 9),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "temperature": st.sampled_from([0.0, 0.5, 1.5]),
    "seed": st.integers(0, 3),
    "min_tokens": st.integers(0, 9),
    "repetition_penalty": st.sampled_from([0.7, 1.4]),
    "presence_penalty": st.sampled_from([-0.6, 0.9]),
    "frequency_penalty": st.sampled_from([-0.3, 0.3]),
    "prompt_ignore_length": st.integers(0, 6),
    "no_repeat_ngram_size": st.integers(0, 3),
}
_DECAY = {"top_p": st.just(0.9), "top_p_decay": st.just(0.7), "top_p_reset_ids": _tokens}
_fields = st.fixed_dictionaries(
    {
        "prompt": st.lists(_tokens, min_size=1, max_size=20),
        "max_tokens": st.integers(1, 16),
        "sampling_config": st.one_of(
            st.fixed_dictionaries({}, optional=_SAMPLING),
            st.fixed_dictionaries(_DECAY, optional={"seed": st.integers(0, 3)}),
        ).map(lambda fields: SamplingConfig(**fields)),
        "bad_words": _words,
        "stop_words": _words,
        "embedding_bias": st.dictionaries(_tokens, st.floats(-3, 3), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
        "end_id": st.none() | _tokens,
        "priority": st.sampled_from([0.1, 0.5, 0.9]),
    }
)


def _seen(output: Output) -> tuple[object, ...]:
    assert output.error is None
    return output.token_ids, output.log_probs, output.reason


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(_fields, st.integers(0, 6)), min_size=2, max_size=7),
    max_batch_size=st.integers(1, 4),
    policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
)
def test_nothing_but_the_request_decides_its_tokens(requests, max_batch_size, policy) -> None:
    alone = []
    for fields, _ in requests:
        driver = Driver(executor_config(), runner=LogitsRunner(VOCAB))
        alone.append(_seen(driver.run_one(**fields)))
    # 11 blocks of 4: the longest request fits, two of them do not, so MAX_UTILIZATION pauses.
    config = executor_config(
        num_blocks=11, max_batch_size=max_batch_size, max_num_tokens=16, policy=policy
    )
    driver = Driver(config, runner=LogitsRunner(VOCAB))
    ids = []
    for fields, delay in requests:
        ids.append(driver.enqueue(**fields))
        for _ in range(delay):
            driver.step()
    driver.run()
    assert [_seen(driver.outputs[i]) for i in ids] == alone
    assert driver.runner.num_requests == 0
