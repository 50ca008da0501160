"""The sampling inputs: what reaches the engine, and what means "off"."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from tests.triton.parsing import parse, uint64
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import SamplingConfig
from tokenflow.preemption import unpausable_reason

EVERYTHING: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.5,
    "temperature": 0.75,
    "min_tokens": 2,
    "seed": uint64(9),
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_p": 0.125,
    "no_repeat_ngram_size": 3,
    "prompt_ignore_length": 4,
    "runtime_top_p_decay": 0.5,
    "runtime_top_p_min": 0.25,
    "runtime_top_p_reset_ids": 7,
}
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": -0.0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "prompt_ignore_length": 0,
    "runtime_top_p_decay": 1.0,
    "runtime_top_p_min": 0.5,
    "runtime_top_p_reset_ids": 3,
}


def sampling(**inputs: Any) -> SamplingConfig:
    return parse(**inputs).generate.sampling_config


def test_every_input_reaches_the_engine_and_every_field_has_an_input() -> None:
    given = sampling(**EVERYTHING)
    assert given == SamplingConfig(
        top_k=5, top_p=0.5, temperature=0.75, min_tokens=2, seed=9, repetition_penalty=1.25,
        presence_penalty=0.5, frequency_penalty=-0.5, min_p=0.125, no_repeat_ngram_size=3,
        prompt_ignore_length=4, top_p_decay=0.5, top_p_min=0.25, top_p_reset_ids=7,
    )  # fmt: skip
    unset = SamplingConfig()
    same = {
        name
        for name in SamplingConfig.__struct_fields__
        if getattr(given, name) == getattr(unset, name)
    }
    assert same == {"beam_width", "num_return_sequences"}  # refused by name (inputs.py)


def test_what_means_off_leaves_the_field_unset() -> None:
    assert sampling(**NEUTRAL) == SamplingConfig(seed=77)
    for name, value in NEUTRAL.items():
        assert sampling(**{name: value}) == SamplingConfig(seed=77), name


def test_a_token_that_resets_top_p_may_be_none() -> None:
    config = sampling(top_p=0.5, runtime_top_p_decay=0.5, runtime_top_p_reset_ids=-1)
    assert (config.top_p_decay, config.top_p_min, config.top_p_reset_ids) == (0.5, None, None)


def test_greedy_by_temperature_leaves_nothing_to_narrow_but_penalties_act() -> None:
    config = sampling(**{**EVERYTHING, "temperature": 0.0})
    greedy = msgspec.structs.replace(
        sampling(**EVERYTHING), temperature=None, top_k=1, top_p=None, min_p=None,
        top_p_decay=None, top_p_min=None, top_p_reset_ids=None,
    )  # fmt: skip
    assert config == greedy


def test_greedy_by_top_k_leaves_nothing_to_narrow_and_can_be_paused() -> None:
    request = parse(**{**EVERYTHING, "top_k": 1}).generate
    greedy = msgspec.structs.replace(
        sampling(**EVERYTHING), top_k=1, top_p=None, min_p=None,
        top_p_decay=None, top_p_min=None, top_p_reset_ids=None,
    )  # fmt: skip
    assert request.sampling_config == greedy
    assert unpausable_reason(request, max_seq_len=64, max_input_len=63) is None


def test_a_decay_needs_something_to_lower() -> None:
    with pytest.raises(InvalidRequestError, match=r"^runtime_top_p_decay: needs a top_p"):
        sampling(runtime_top_p_decay=0.5)
    assert sampling(runtime_top_p_min=0.5).top_p_min is None


def test_a_top_p_over_100_percent_is_refused_with_what_is_done_without() -> None:
    message = r"^top_p: must be in \(0, 1\], got 100; without top_k and top_p the answer is greedy$"
    with pytest.raises(InvalidRequestError, match=message):
        sampling(temperature=1.0, top_k=100, top_p=100.0)


@pytest.mark.parametrize(("seeds", "expected"), [((1, 2, 3), [1, 2, 3]), ((2**63,), [2**63])])
def test_seeds_are_taken_as_they_are(seeds: tuple[int, ...], expected: list[int]) -> None:
    for name in ("seed", "random_seed"):
        assert [sampling(**{name: uint64(seed)}).seed for seed in seeds] == expected


def test_values_are_the_same_for_one_answer_and_for_a_stream() -> None:
    requests = [parse(stream=stream, **EVERYTHING).generate for stream in (False, True)]
    plain = [dataclasses.replace(r, streaming=False, has_reader=False) for r in requests]
    assert plain[0] == plain[1]
