"""Validation of generation and control requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton.fakes import EOS, byte_level_tokenizer
from tokenflow.config import ServingConfig
from tokenflow.errors import InvalidRequestError
from triton_backend.codec import INPUT_NAMES, TextRequest, parse_request
from triton_backend.control import Acknowledgement, StopRequest, parse_control
from triton_backend.responses import OUTPUT_NAMES

TOKENIZER = byte_level_tokenizer()
CONFIG = ServingConfig(max_seq_len=64, max_tokens_in_paged_kv_cache=128, tokens_per_block=16)
CONFIG_PBTXT = Path(__file__).parents[2] / "model_repo" / "ensemble" / "config.pbtxt"

_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32}


def tensor(value: object, dtype: Any = None) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if dtype is None:
        dtype = np.object_ if not values else _DTYPES.get(type(values[0]), np.object_)
    data = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array([data], dtype=dtype).reshape(1, len(data))


def parse(parameters: Mapping[str, object] | None = None, **inputs: Any) -> TextRequest:
    tensors = {"text_input": tensor("hello"), "max_tokens": tensor(4)}
    for name, value in inputs.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value if isinstance(value, np.ndarray) else tensor(value)
    return parse_request(
        "r1",
        tensors,
        parameters or {},
        tokenizer=TOKENIZER,
        config=CONFIG,
        arrival_time=1.5,
        unset_seed=77,
    )


def uint64(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.uint64)


def test_plain_request() -> None:
    request = parse().generate
    assert request.request_id == "r1"
    assert request.input_token_ids == tuple(b"hello")
    assert (request.max_tokens, request.arrival_time) == (4, 1.5)
    assert request.end_id == EOS
    assert not request.streaming
    assert not request.has_reader
    assert request.read_rate is None
    assert request.priority == 0.5
    sampling = request.sampling_config
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (None, None, None)
    assert sampling.seed == 77
    assert sampling.min_tokens is None


def test_every_supported_input_reaches_the_request() -> None:
    request = parse(
        stream=True,
        top_k=5,
        top_p=0.5,
        temperature=0.75,
        min_tokens=2,
        seed=uint64(2**63),
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        beam_width=1,
        num_return_sequences=1,
        end_id=7,
        pad_id=0,
        read_rate=4.0,
        priority=0.25,
        stop_words=["x", "", "y", "x"],
    )
    generate, sampling = request.generate, request.generate.sampling_config
    assert generate.streaming
    assert generate.has_reader
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (5, 0.5, 0.75)
    assert (sampling.min_tokens, sampling.seed) == (2, 2**63)
    assert generate.output_config.return_log_probs
    assert generate.end_id == 7
    assert (generate.read_rate, generate.priority) == (4.0, 0.25)
    assert request.stop_strings == ("x", "y")
    assert request.return_num_input_tokens
    assert request.return_num_output_tokens


def test_renamed_inputs() -> None:
    old = parse(min_length=3, random_seed=uint64(5)).generate.sampling_config
    assert (old.min_tokens, old.seed) == (3, 5)
    assert parse(min_length=3, min_tokens=3).generate.sampling_config.min_tokens == 3
    with pytest.raises(InvalidRequestError, match=r"^min_length: "):
        parse(min_length=3, min_tokens=4)
    with pytest.raises(InvalidRequestError, match=r"^random_seed: "):
        parse(seed=uint64(1), random_seed=uint64(2))


def test_end_id_minus_one_means_no_end() -> None:
    assert parse(end_id=-1).generate.end_id is None


def test_further_end_tokens_become_stop_words() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token_ids = (EOS, 10)
    tensors = {"text_input": tensor("a"), "max_tokens": tensor(4)}
    request = parse_request(
        "", tensors, {}, tokenizer=tokenizer, config=CONFIG, arrival_time=0.0, unset_seed=0
    ).generate
    assert (request.end_id, request.stop_words) == (EOS, ((10,),))


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_temperature_zero_is_greedy(value: float) -> None:
    sampling = parse(temperature=value, top_p=0.9).generate.sampling_config
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, None, None)


@pytest.mark.parametrize(
    ("length", "expected"), [(62, 2), (63, 1), (64, None), (65, None), (5000, None)]
)
def test_prompt_and_max_tokens_at_the_length_limit(length: int, expected: int | None) -> None:
    for stream in (False, True):
        if expected is None:
            with pytest.raises(InvalidRequestError, match=r"text_input: has .* max_seq_len 64"):
                parse(text_input="a" * length, stream=stream)
        else:
            request = parse(text_input="a" * length, stream=stream).generate
            assert request.max_tokens == expected


def test_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    config = ServingConfig(max_seq_len=64, max_tokens_in_paged_kv_cache=32, tokens_per_block=16)
    tensors = {"text_input": tensor("a" * 30), "max_tokens": tensor(4)}
    kwargs: Any = {"tokenizer": TOKENIZER, "config": config, "arrival_time": 0.0, "unset_seed": 0}
    with pytest.raises(InvalidRequestError, match=r"max_tokens: .* 3 KV blocks .* pool has 2"):
        parse_request("", tensors, {}, **kwargs)
    tensors["max_tokens"] = tensor(3)
    assert parse_request("", tensors, {}, **kwargs).generate.max_tokens == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text_input", None),
        ("text_input", ""),
        ("text_input", 5),
        ("text_input", b"\xff\xfe"),
        ("text_input", b"hi \xed\xa0\x80 there"),
        ("text_input", np.array([["a", "b"]], dtype=np.object_)),
        ("max_tokens", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 4.0),
        ("max_tokens", np.array([[4]], dtype=np.int64)),
        ("max_tokens", np.array([[4, 4]], dtype=np.int32)),
        ("temperature", -3.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 7.0),
        ("top_p", -0.1),
        ("top_p", 100.0),
        ("top_k", -2),
        ("top_k", 2**31 - 1),
        ("read_rate", -1.0),
        ("read_rate", 0.0),
        ("read_rate", math.nan),
        ("read_rate", math.inf),
        ("priority", -1.0),
        ("priority", 1e9),
        ("priority", math.nan),
        ("end_id", -2),
        ("end_id", 257),
        ("min_tokens", -1),
        ("seed", np.array([[1]], dtype=np.int32)),
        ("stream", 1),
        ("stop_words", np.array([[1]], dtype=np.int32)),
        ("stop_words", ["x"] * 65),
        ("stop_words", ["x" * 1025]),
        ("beam_width", 0),
        ("beam_width", 2),
        ("num_return_sequences", 2),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("length_penalty", 2.0),
        ("bad_words", ["x"]),
        ("lora_task_id", uint64(1)),
        ("lora_weights", np.zeros((1, 2, 2), dtype=np.float16)),
        ("prompt_embedding_table", np.zeros((1, 2, 2), dtype=np.float16)),
        ("prompt_vocab_size", 4),
        ("prompt_table_extra_id", uint64(3)),
        ("guided_decoding_guide_type", "json"),
        ("guided_decoding_guide", "{}"),
        ("return_context_logits", True),
        ("return_generation_logits", True),
        ("return_perf_metrics", True),
        ("embedding_bias_words", ["x"]),
        ("embedding_bias_weights", 1.0),
        ("decoder_text_input", "x"),
        ("nonsense", 1),
        ("ack_tokens", 3),
        ("stop", True),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    if isinstance(value, bytes):
        value = np.array([[value]], dtype=np.object_)
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
        parse(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1.0),
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", 0),
        ("top_k", 1),
        ("priority", 0.0),
        ("priority", 1.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("length_penalty", 1.0),
        ("bad_words", ""),
        ("stop_words", ""),
        ("stop_words", [""]),
        ("stop_words", []),
        ("embedding_bias_words", []),
        ("guided_decoding_guide", ""),
        ("decoder_text_input", ""),
        ("return_perf_metrics", False),
        ("prompt_vocab_size", 0),
        ("prompt_table_extra_id", uint64(0)),
        ("stop", False),
        ("text_input", "   "),
        ("max_tokens", 2**31 - 1),
    ],
)
def test_neutral_and_border_values_are_accepted(field: str, value: Any) -> None:
    parse(**{field: value})


def test_batches_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="batch size must be 1, got 2"):
        parse(text_input=np.array([["a"], ["b"]], dtype=np.object_))


@pytest.mark.parametrize("value", [4, 4.0, "4", "4.0"])
def test_read_rate_as_parameter(value: object) -> None:
    assert parse({"read_rate": value}, stream=True).generate.read_rate == 4.0


def test_tensor_wins_over_parameter() -> None:
    assert parse({"read_rate": 4}, read_rate=8.0).generate.read_rate == 8.0


@pytest.mark.parametrize("value", [0, -1, "nan", "fast", True, None, [4], "1e999", 10**400])
def test_bad_read_rate_parameter(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^read_rate: "):
        parse({"read_rate": value})


def test_parameters_that_triton_and_its_clients_add_are_accepted() -> None:
    parse(
        {
            "id": "x", "timeout": 5, "sequence_id": 1, "sequence_start": True,
            "sequence_end": True, "binary_data_output": True, "priority": "0.5",
            "triton_enable_empty_final_response": True, "X-Tenant": "acme", "traceparent": "0",
        }
    )  # fmt: skip


def test_misspelt_input_is_named_with_a_suggestion() -> None:
    with pytest.raises(InvalidRequestError, match=r"^max_token: .*did you mean max_tokens\?"):
        parse({"max_token": 5})


def test_prompt_comes_back_only_when_asked_and_not_streaming() -> None:
    assert parse().prefix == ""
    assert parse(exclude_input_in_output=False).prefix == "hello"
    assert parse(exclude_input_in_output=False, stream=True).prefix == ""


_ARRAYS = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(lambda v: np.array([[v]], dtype=np.int32)),
    st.floats(width=32).map(lambda v: np.array([[v]], dtype=np.float32)),
    st.integers(0, 2**64 - 1).map(uint64),
    st.booleans().map(lambda v: np.array([[v]])),
    st.lists(st.binary(max_size=8), max_size=3).map(
        lambda v: np.array([v], dtype=np.object_).reshape(1, len(v))
    ),
    st.just(np.zeros((0,), dtype=np.float32)),
    st.just(np.array(3, dtype=np.int32)),
)


@given(
    st.dictionaries(st.sampled_from(INPUT_NAMES), _ARRAYS, max_size=6),
    st.dictionaries(
        st.sampled_from(["read_rate", "priority", "id", "foo", "x-a"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        max_size=2,
    ),
)
@settings(max_examples=400, deadline=None)
def test_any_input_is_a_request_or_one_named_refusal(
    tensors: dict[str, np.ndarray], parameters: dict[str, object]
) -> None:
    base = {"text_input": tensor("hello"), "max_tokens": tensor(4)}
    try:
        request = parse_request(
            "", {**base, **tensors}, parameters,
            tokenizer=TOKENIZER, config=CONFIG, arrival_time=0.0, unset_seed=0,
        )  # fmt: skip
    except InvalidRequestError as error:
        refused = error.field
    else:
        refused = None
    if refused is not None:
        assert refused in {**base, **tensors, **parameters}
        return
    generate = request.generate
    assert generate.max_tokens >= 1
    assert len(generate.input_token_ids) + generate.max_tokens <= CONFIG.max_seq_len
    assert 0.0 <= generate.priority <= 1.0
    assert generate.read_rate is None or 0 < generate.read_rate < math.inf


def test_config_pbtxt_declares_exactly_what_the_codec_knows() -> None:
    text = CONFIG_PBTXT.read_text()
    inputs, outputs = text.split("input [")[1].split("output [")
    for names, part in ((INPUT_NAMES, inputs), (OUTPUT_NAMES, outputs)):
        declared = [line.split('"')[1] for line in part.splitlines() if "{ name:" in line]
        assert sorted(declared) == sorted(names)


def test_control_requests() -> None:
    stop = {"stop": tensor(True)}
    assert parse_control("a", stop) == StopRequest("a")
    assert parse_control("a", {**stop, "text_input": tensor("x")}) == StopRequest("a")
    assert parse_control("a", {"ack_tokens": tensor(7)}) == Acknowledgement("a", 7)
    assert parse_control("a", {"stop": tensor(False), "text_input": tensor("x")}) is None
    assert parse_control("a", {"text_input": tensor("x")}) is None


@pytest.mark.parametrize(
    ("request_id", "tensors", "message"),
    [
        ("", {"stop": True}, "id: a request id must be provided for request cancellation"),
        ("", {"ack_tokens": 3}, "id: a request id must be provided for an acknowledgement"),
        ("a", {"ack_tokens": -1}, "ack_tokens: "),
        ("a", {"ack_tokens": 1.0}, "ack_tokens: "),
        ("a", {"stop": 1}, "stop: "),
        ("a", {"stop": True, "ack_tokens": 1}, "ack_tokens: "),
    ],
)
def test_bad_control_requests(request_id: str, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        parse_control(request_id, {name: tensor(value) for name, value in tensors.items()})
