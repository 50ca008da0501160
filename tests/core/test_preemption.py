"""What a resume asks of the engine."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.executor.api import OutputConfig, Request, SamplingConfig
from tokenflow.executor.lora import LoraConfig
from tokenflow.preemption import derive_seed, engine_request, unpausable_reason
from tokenflow.types import GenerateRequest


def make_request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "input_token_ids": (1, 2, 3),
        "max_tokens": 10,
        "arrival_time": 0.0,
        "sampling_config": SamplingConfig(
            top_k=5, temperature=0.7, seed=11, min_tokens=6, repetition_penalty=1.1
        ),
        "output_config": OutputConfig(return_log_probs=True),
        "end_id": 2,
        "stop_words": ((7, 8),),
        "bad_words": ((9,),),
        "priority": 0.8,
        "cache_salt_id": 3,
        "lora_config": LoraConfig(task_id=4),
    }
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def reason_of(
    request: GenerateRequest, *, max_seq_len: int = 1000, max_input_len: int = 999
) -> str | None:
    return unpausable_reason(request, max_seq_len=max_seq_len, max_input_len=max_input_len)


def test_a_resume_keeps_every_field_and_lowers_the_limits() -> None:
    request = make_request()
    first = engine_request(request, [], 42)
    resumed = engine_request(request, [4, 5, 6, 7], 42)
    assert first.input_token_ids == (1, 2, 3)
    assert resumed.input_token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert (first.max_tokens, resumed.max_tokens) == (10, 6)
    assert first.sampling_config.min_tokens == 6
    assert resumed.sampling_config.min_tokens == 2
    assert first.sampling_config.seed == 11
    assert resumed.sampling_config.seed not in (None, 11)
    for name in ("end_id", "stop_words", "bad_words", "priority", "cache_salt_id", "client_id",
                 "lora_config"):  # fmt: skip
        assert getattr(first, name) == getattr(resumed, name)
    for name in ("top_k", "temperature", "repetition_penalty"):
        assert getattr(resumed.sampling_config, name) == getattr(request.sampling_config, name)
    assert first.streaming
    assert resumed.streaming
    assert resumed.output_config.return_log_probs


NOT_OURS = {  # what the engine surface has and no request of ours asks for
    "streaming": True,
    "pad_id": None,
    "kv_cache_retention_config": None,
}


def test_no_field_is_forgotten_at_a_resume() -> None:
    """Every field that the engine knows is set here; one that a resume drops or changes fails."""
    every = SamplingConfig(
        beam_width=2, top_k=5, top_p=0.9, top_p_min=0.2, top_p_reset_ids=4, top_p_decay=0.9,
        seed=11, temperature=0.7, min_tokens=6, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.2, prompt_ignore_length=2, no_repeat_ngram_size=3,
        num_return_sequences=2, min_p=0.05,
    )  # fmt: skip
    defaults = SamplingConfig()
    for name in SamplingConfig.__struct_fields__:
        assert getattr(every, name) != getattr(defaults, name), f"set {name} in this test"
    request = make_request(sampling_config=every, embedding_bias=((5, 1.5),))
    first, resumed = engine_request(request, [], 42), engine_request(request, [4, 5], 42)
    assert first.sampling_config == every
    changed = msgspec.structs.replace(resumed.sampling_config, seed=11, min_tokens=6)
    assert changed == every
    untouched = Request(input_token_ids=(1,), max_tokens=1)
    for name in Request.__struct_fields__:
        if name in NOT_OURS:
            assert getattr(resumed, name) == NOT_OURS[name]
            continue
        assert getattr(resumed, name) != getattr(untouched, name), f"{name} is not handed on"
        if name not in ("input_token_ids", "max_tokens", "sampling_config"):
            assert getattr(resumed, name) == getattr(first, name)


def test_no_output_is_ignored_that_was_not_ignored_before() -> None:
    request = make_request(sampling_config=SamplingConfig(prompt_ignore_length=50))
    assert engine_request(request, [4], 1).sampling_config.prompt_ignore_length == 3
    request = make_request(sampling_config=SamplingConfig(prompt_ignore_length=2))
    assert engine_request(request, [4], 1).sampling_config.prompt_ignore_length == 2


def test_min_tokens_never_goes_below_zero() -> None:
    assert engine_request(make_request(), [1] * 8, 1).sampling_config.min_tokens == 0


@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.integers(0, 5000))
def test_seeds_of_parts_differ_and_stay_in_range(seed: int, first: int, second: int) -> None:
    a, b = derive_seed(seed, first), derive_seed(seed, second)
    assert a is not None
    assert 0 <= a < 2**64
    if first == 0:
        assert a == seed
    if first and second and first != second:
        assert a != b


def test_parts_of_a_request_without_seed_do_not_repeat_its_random_numbers() -> None:
    assert derive_seed(None, 0) is None
    assert derive_seed(None, 7) == derive_seed(0, 7) not in (None, 0)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingConfig(), None),
        (SamplingConfig(beam_width=2), "beam search"),
        (SamplingConfig(num_return_sequences=2), "several return sequences"),
        (SamplingConfig(num_return_sequences=1), None),
    ],
)
def test_what_cannot_be_resumed_is_never_paused(
    sampling: SamplingConfig, reason: str | None
) -> None:
    assert reason_of(make_request(sampling_config=sampling)) == reason


def test_a_resume_that_would_be_too_long_a_prompt_is_ruled_out() -> None:
    request = make_request()  # 3 + 10 tokens: a resume brings 12 at most
    assert reason_of(request, max_input_len=12) is None
    assert reason_of(request, max_input_len=11) == "longer than a prompt may be"
    assert reason_of(request, max_input_len=9, max_seq_len=10) is None  # it ends at 10 tokens
