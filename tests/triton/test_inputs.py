"""Inputs that are refused by name, and those that do no harm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton.parsing import CONFIG, TOKENIZER, parse, tensor, uint64
from tokenflow.errors import InvalidRequestError
from triton_backend.codec import parse_request
from triton_backend.inputs import INPUT_NAMES
from triton_backend.responses import OUTPUT_NAMES

CONFIG_PBTXT = Path(__file__).parents[2] / "model_repo" / "ensemble" / "config.pbtxt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text_input", None),
        ("text_input", ""),
        ("text_input", 5),
        ("text_input", b"\xff\xfe"),
        ("text_input", b"hi \xed\xa0\x80 there"),
        ("text_input", np.array([["a", "b"]], dtype=np.object_)),
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
        ("read_rate", 10_001.0),
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
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 2e6),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2e6),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 33),
        ("no_repeat_ngram_size", 2.0),
        ("prompt_ignore_length", -1),
        ("runtime_top_p_min", 0.0),
        ("runtime_top_p_min", 1.5),
        ("runtime_top_p_decay", 0.0),
        ("runtime_top_p_decay", 1.1),
        ("runtime_top_p_decay", 0.5),  # without a top_p
        ("runtime_top_p_reset_ids", -2),
        ("runtime_top_p_reset_ids", 257),
        ("length_penalty", 2.0),
        ("bad_words", ["x"] * 65),
        ("bad_words", ["x" * 1025]),
        ("bad_words", [chr(ord("a") + n % 26) + "x" * (1000 + n // 26) for n in range(60)]),
        ("bad_words", 5),
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
        ("pause", True),
        ("resume", True),
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
        ("bad_words", ["", ""]),
        ("embedding_bias_words", ""),
        ("embedding_bias_words", ["", ""]),
        ("embedding_bias_weights", 0.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("no_repeat_ngram_size", 0),
        ("no_repeat_ngram_size", 32),
        ("prompt_ignore_length", 0),
        ("runtime_top_p_decay", 1.0),
        ("runtime_top_p_min", 1.0),
        ("runtime_top_p_reset_ids", -1),
        ("max_tokens", None),
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
        ("pause", False),
        ("resume", False),
        ("text_input", "   "),
        ("max_tokens", 2**31 - 1),
    ],
)
def test_neutral_and_border_values_are_accepted(field: str, value: Any) -> None:
    parse(**{field: value})


def test_batches_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="batch size must be 1, got 2"):
        parse(text_input=np.array([["a"], ["b"]], dtype=np.object_))


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


def test_a_long_unknown_name_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all names it would take many seconds, in which nobody else is let in; and of what it is
    the message has the beginning alone."""
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("compared"))
    with pytest.raises(InvalidRequestError, match=r"unknown input or parameter$") as refused:
        parse({"z" * 30_000: 5})
    assert str(refused.value) == f"{'z' * 200}… (30,000 characters): unknown input or parameter"


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
        st.sampled_from(["read_rate", "priority", "timeout", "id", "foo", "x-a"]),
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
    assert generate.timeout_s is None or 0 < generate.timeout_s < math.inf
    assert all(0 <= token_id < TOKENIZER.vocab_size for token_id, _ in generate.embedding_bias)
    assert all(generate.bad_words)


def test_config_pbtxt_declares_exactly_what_the_codec_knows() -> None:
    text = CONFIG_PBTXT.read_text()
    inputs, outputs = text.split("input [")[1].split("output [")
    for names, part in ((INPUT_NAMES, inputs), (OUTPUT_NAMES, outputs)):
        declared = [line.split('"')[1] for line in part.splitlines() if "{ name:" in line]
        assert sorted(declared) == sorted(names)
