"""The meaning of a generation request's inputs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.triton.fakes import EOS, byte_level_tokenizer
from tests.triton.parsing import CONFIG, TOKENIZER, parse, tensor, uint64
from tokenflow.config import ServingConfig
from tokenflow.errors import InvalidRequestError
from triton_backend.codec import MAX_READER_RATE, parse_request


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


TWO_ENDS = byte_level_tokenizer(special=["<end>", "<bos>"], num_eos=2)
END, BOS = EOS + 1, EOS + 2


@pytest.mark.parametrize(
    ("inputs", "end_id", "further"),
    [
        ({}, EOS, {END}),
        ({"end_id": END}, END, set()),
        ({"end_id": -1}, None, set()),
        ({"end_id": -1, "stop_words": ["x", "<end>"]}, None, {END}),
        ({"stop_words": "<bos>"}, EOS, {END, BOS}),
        ({"stop_words": ["<eos>", "<end>"]}, EOS, {END}),
    ],
)
def test_end_tokens_of_the_model_and_named_as_stop_words(
    inputs: dict[str, Any], end_id: int | None, further: set[int]
) -> None:
    request = parse(tokenizer=TWO_ENDS, **inputs)
    assert (request.generate.end_id, request.further_end_ids) == (end_id, further)
    assert request.generate.stop_words == tuple((token_id,) for token_id in sorted(further))
    request = parse(tokenizer=TWO_ENDS, min_tokens=2, **inputs)
    assert (request.generate.end_id, request.further_end_ids) == (end_id, further)
    assert request.generate.stop_words == ()  # the engine would not hold them back


def test_stop_words_are_texts_without_what_the_tokenizer_adds() -> None:
    assert parse(stop_words=["[END]", "a"]).stop_strings == ("[END]", "a")
    for none in ("", [], [""]):
        assert parse(stop_words=none).stop_strings == ()


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


def test_a_prompt_of_very_many_bytes_is_refused_at_once() -> None:
    """A token is so long that it could fit; up to 256 KiB all that fits is taken."""
    word = "x" * 1000
    tokenizer = byte_level_tokenizer(special=[word])
    config = ServingConfig(max_seq_len=20_000, max_tokens_in_paged_kv_cache=32_768)
    start = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"^text_input: has 15000000 bytes; max_seq_len"):
        parse(tokenizer=tokenizer, config=config, text_input="a " * 7_500_000)
    assert time.process_time() - start < 2.0
    for kind, num_tokens in ((config, 319), (CONFIG, 63)):  # 16 bytes for each of 19,999, and more
        request = parse(tokenizer=tokenizer, config=kind, text_input=word * num_tokens).generate
        assert len(request.input_token_ids) == num_tokens


def test_a_request_without_max_tokens_gets_the_default_within_max_seq_len() -> None:
    config = ServingConfig(max_seq_len=64, default_max_tokens=10)
    assert parse(config=config, max_tokens=None).generate.max_tokens == 10
    assert parse(config=config, max_tokens=None, text_input="a" * 60).generate.max_tokens == 4
    assert parse(max_tokens=None).generate.max_tokens == 64 - len("hello")


@pytest.mark.parametrize(
    ("timeout", "timeout_s"),
    [(1_000_000, 1.0), (1, 1e-6), (2.5e6, 2.5), ("500000", 0.5), (0, None), ("0", None)],
)
def test_timeout_is_a_parameter_in_microseconds(timeout: object, timeout_s: float | None) -> None:
    assert parse({"timeout": timeout}).generate.timeout_s == timeout_s
    assert parse().generate.timeout_s is None


@pytest.mark.parametrize("value", [-1, 2**64 - 1, "soon", "nan", True, [1], "inf"])
def test_a_bad_timeout_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^timeout: must be "):
        parse({"timeout": value})


def test_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    config = ServingConfig(max_seq_len=64, max_tokens_in_paged_kv_cache=32, tokens_per_block=16)
    tensors = {"text_input": tensor("a" * 30), "max_tokens": tensor(4)}
    kwargs: Any = {"tokenizer": TOKENIZER, "config": config, "arrival_time": 0.0, "unset_seed": 0}
    with pytest.raises(InvalidRequestError, match=r"max_tokens: .* 3 KV blocks .* pool has 2"):
        parse_request("", tensors, {}, **kwargs)
    tensors["max_tokens"] = tensor(3)
    assert parse_request("", tensors, {}, **kwargs).generate.max_tokens == 3


def test_without_chunks_a_prompt_fits_into_one_iteration() -> None:
    config = ServingConfig(max_seq_len=64, max_num_tokens=32, enable_chunked_context=False)
    assert len(parse(config=config, text_input="a" * 32).generate.input_token_ids) == 32
    message = r"^text_input: has 33 tokens; max_num_tokens 32 without chunked context leaves"
    with pytest.raises(InvalidRequestError, match=message):
        parse(config=config, text_input="a" * 33)
    config = ServingConfig(max_seq_len=64, max_num_tokens=32)
    assert len(parse(config=config, text_input="a" * 33).generate.input_token_ids) == 33


@pytest.mark.parametrize(
    ("stream", "declared", "read_rate", "has_reader"),
    [
        (True, None, None, True),
        (True, MAX_READER_RATE, MAX_READER_RATE, True),
        (True, MAX_READER_RATE + 1, None, False),
        (True, 10_000.0, None, False),
        (False, None, None, False),
        (False, 4.0, None, False),
    ],
)
def test_who_reads(
    stream: bool, declared: float | None, read_rate: float | None, has_reader: bool
) -> None:
    inputs = {} if declared is None else {"read_rate": declared}
    request = parse(stream=stream, **inputs).generate
    assert (request.read_rate, request.has_reader) == (read_rate, has_reader)
    assert request.streaming is stream


@pytest.mark.parametrize("value", [4, 4.0, "4", "4.0"])
def test_read_rate_as_parameter(value: object) -> None:
    assert parse({"read_rate": value}, stream=True).generate.read_rate == 4.0


def test_tensor_wins_over_parameter() -> None:
    assert parse({"read_rate": 4}, read_rate=8.0, stream=True).generate.read_rate == 8.0


@pytest.mark.parametrize("value", [0, -1, "nan", "fast", True, None, [4], "1e999", 10**400])
def test_bad_read_rate_parameter(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^read_rate: "):
        parse({"read_rate": value})


def test_prompt_comes_back_only_when_asked_and_not_streaming() -> None:
    assert parse().prefix == ""
    assert parse(exclude_input_in_output=False).prefix == "hello"
    assert parse(exclude_input_in_output=False, stream=True).prefix == ""
