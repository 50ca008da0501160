"""What the adapter writes into the bindings, and what it does where they lack something."""

from __future__ import annotations

import types
from datetime import timedelta
from typing import Any

import pytest

from tests.trtllm import changed
from tests.trtllm.conftest import Starter
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import (
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tokenflow.executor.lora import LoraConfig
from tokenflow.executor.trtllm_engine import LoraBuild
from tokenflow.executor.trtllm_values import RequestMaker

MINUTE = timedelta(seconds=60)
LORA = LoraBuild(dtype="bfloat16", max_adapter_size=16)
EVERYTHING = Request(
    input_token_ids=(5, 6, 7),
    max_tokens=9,
    sampling_config=SamplingConfig(
        top_k=5, top_p=0.5, top_p_min=0.25, top_p_reset_ids=3, top_p_decay=0.75, seed=2**64 - 1,
        temperature=0.5, min_tokens=2, repetition_penalty=1.25, presence_penalty=0.5,
        frequency_penalty=0.125, prompt_ignore_length=1, no_repeat_ngram_size=3,
        num_return_sequences=1, min_p=0.25,
    ),
    output_config=OutputConfig(return_log_probs=True, return_perf_metrics=True),
    end_id=-1,
    pad_id=0,
    bad_words=((1, 2), (3,)),
    stop_words=((4, 4),),
    kv_cache_retention_config=KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(token_start=0, token_end=2, priority=60, duration_ms=MINUTE),
            TokenRangeRetentionConfig(token_start=2, token_end=None, priority=31),
        ),
        decode_retention_priority=20,
        decode_duration_ms=MINUTE,
    ),
    client_id=77,
    priority=0.75,
    cache_salt_id=2**63,
    lora_config=LoraConfig(task_id=2**64 - 1),
)  # fmt: skip


def make(bindings: Any, request: Request) -> Any:
    return RequestMaker(bindings, 16, "float32", LORA).make(request)


def test_every_field_arrives(double: types.ModuleType) -> None:
    made = make(double, EVERYTHING)
    for name in ("max_tokens", "end_id", "pad_id", "client_id", "cache_salt_id"):
        assert getattr(made, name) == getattr(EVERYTHING, name)
    assert made._values["priority"] == 0.75
    assert made.input_token_ids == [5, 6, 7]
    assert (made.bad_words, made.stop_words) == ([[1, 2], [3]], [[4, 4]])
    for name in SamplingConfig.__struct_fields__:
        assert getattr(made.sampling_config, name) == getattr(EVERYTHING.sampling_config, name)
    retention = made.kv_cache_retention_config
    ranges = [
        (r.token_start, r.token_end, r.priority, r.duration_ms)
        for r in retention.token_range_retention_configs
    ]
    assert ranges == [(0, 2, 60, MINUTE), (2, None, 31, None)]
    assert (retention.decode_retention_priority, retention.decode_duration_ms) == (20, MINUTE)
    assert retention.directory == ""


def test_requests_always_stream_and_leave_out_what_is_unset(double: types.ModuleType) -> None:
    keep = OutputConfig(exclude_input_from_output=False)
    made = make(
        double,
        Request(input_token_ids=(1,), max_tokens=1, streaming=False, output_config=keep),
    )
    assert made.streaming
    assert made.output_config.exclude_input_from_output
    assert {name for name in double.usage.names if name.startswith("Request(")} == {
        f"Request({name})"
        for name in ("input_token_ids", "max_tokens", "streaming", "sampling_config",
                     "output_config", "priority")
    }  # fmt: skip
    assert "SamplingConfig(top_k)" not in double.usage.names


def test_a_bias_is_a_tensor_of_the_vocabulary(double: types.ModuleType) -> None:
    torch = pytest.importorskip("torch")
    request = Request(input_token_ids=(1,), max_tokens=1, embedding_bias=((3, -8.0), (15, 1.5)))
    bias = make(double, request).embedding_bias
    assert bias.dtype is torch.float32
    assert bias.tolist() == [0.0] * 3 + [-8.0] + [0.0] * 11 + [1.5]
    half = RequestMaker(double, 16, "float16").make(request)
    assert half.embedding_bias.dtype is torch.float16
    outside = Request(input_token_ids=(1,), max_tokens=1, embedding_bias=((16, 1.0),))
    with pytest.raises(InvalidRequestError, match="embedding_bias: token ids are in"):
        make(double, outside)


@pytest.mark.parametrize(
    "name", [name for name in SamplingConfig.__struct_fields__ if name != "beam_width"]
)
def test_a_sampling_field_that_is_missing_is_named_when_it_is_wanted(name: str) -> None:
    older = changed.without_argument("SamplingConfig", name)
    with pytest.raises(InvalidRequestError, match=f"^sampling_config.{name}: this version"):
        make(older, EVERYTHING)
    plain = make(older, Request(input_token_ids=(1,), max_tokens=1))
    assert plain.max_tokens == 1


def test_a_salt_that_is_missing_is_named_when_it_is_wanted() -> None:
    older = changed.without_argument("Request", "cache_salt_id")
    with pytest.raises(InvalidRequestError, match=r"^cache_salt_id: this version"):
        make(older, EVERYTHING)
    make(older, Request(input_token_ids=(1,), max_tokens=1))


def test_what_the_binding_refuses_is_an_error_of_the_request(double: types.ModuleType) -> None:
    for fields, words in (
        ({"sampling_config": SamplingConfig(seed=-1)}, "sampling_config: TensorRT-LLM refuses"),
        ({"client_id": -1}, "request: Request.__init__"),
        (
            {"kv_cache_retention_config": KvCacheRetentionConfig(decode_retention_priority=101)},
            "kv_cache_retention_config: priorities",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            make(double, Request(input_token_ids=(1,), max_tokens=1, **fields))


def test_several_sequences_of_a_request_are_refused(double: types.ModuleType) -> None:
    sampling = SamplingConfig(num_return_sequences=2)
    with pytest.raises(InvalidRequestError, match="num_return_sequences: only 1 is supported"):
        make(double, Request(input_token_ids=(1,), max_tokens=1, sampling_config=sampling))


def test_nothing_is_enqueued_of_requests_of_which_one_is_refused(start: Starter) -> None:
    executor = start.executor()
    good = Request(input_token_ids=(1,), max_tokens=1)
    bad = Request(input_token_ids=(1,), max_tokens=1, sampling_config=SamplingConfig(seed=-1))
    with pytest.raises(InvalidRequestError):
        executor.enqueue_requests([good, bad])
    assert executor.await_responses(timedelta(milliseconds=50)) == []
