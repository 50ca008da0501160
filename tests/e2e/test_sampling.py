"""Sampling on a real server with a real (tiny, random) model: what clients send has its effect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.clients import GrpcStream, post
from tests.e2e.conftest import Factory
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer

pytestmark = pytest.mark.torch

PROMPT = "The reader reads the stream"
SAMPLED = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1, "temperature": 0.9, "top_p": 0.95}
GREEDY = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1}


@pytest.fixture(scope="module")
def torch_server(
    scripted_config: ServingConfig, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    factory = Factory(scripted_config, tmp_path_factory.mktemp("sampling"))
    try:
        yield factory.start(
            engine="inflight", gpt_model_path=str(tiny_model), tokenizer_dir="", dtype="float32",
            num_threads=1,
        )  # fmt: skip
    finally:
        for server in factory.servers:
            server.stop(timeout_s=5.0)


def say(server: TritonServer, **body: Any) -> str:
    status, text = post(server, "generate", body)
    assert status == 200, text
    answer: str = json.loads(text)["text_output"]
    return answer


def test_seeds_over_grpc_make_different_answers_each_the_same_again(
    torch_server: TritonServer,
) -> None:
    seeds = (1, 2, 3, 2**63)
    for name in ("random_seed", "seed"):
        with GrpcStream(torch_server) as stream:
            rounds = [[stream.ask(**SAMPLED, **{name: s}).text for s in seeds] for _ in range(2)]
            assert rounds[0] == rounds[1]
            assert len(set(rounds[0])) == len(seeds)
            wrong = stream.ask(**SAMPLED, **{name: np.array([[1]], dtype=np.int32)})
            assert name in (wrong.error or "")


def test_answers_without_a_seed_differ(torch_server: TritonServer) -> None:
    answers = {say(torch_server, **{**SAMPLED, "temperature": 1.2}) for _ in range(5)}
    assert len(answers) > 1


def test_temperature_zero_and_top_k_one_are_greedy(torch_server: TritonServer) -> None:
    greedy = say(torch_server, **GREEDY)
    assert say(torch_server, **{**SAMPLED, "temperature": 0.0}) == greedy
    assert say(torch_server, **{**SAMPLED, "top_k": 1}) == greedy


def test_bad_words_do_not_come(torch_server: TritonServer) -> None:
    before = say(torch_server, **GREEDY)
    words = re.findall(r"[A-Za-z]{2,}", before)
    assert words, before
    after = say(torch_server, **GREEDY, bad_words=words)
    assert not [word for word in words if word in after]
    assert say(torch_server, **GREEDY, bad_words=[""]) == before


def test_a_biased_word_comes(torch_server: TritonServer) -> None:
    answer = say(torch_server, **GREEDY, embedding_bias_words=["e"], embedding_bias_weights=[1e4])
    assert answer == "e" * 24
    body = {"embedding_bias_words": ["e", "q"], "embedding_bias_weights": [1e4]}
    status, text = post(torch_server, "generate", {**GREEDY, **body})
    assert (status, "embedding_bias_weights: 1 weights for 2" in text) == (400, True)


@pytest.mark.parametrize(
    "inputs",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0, "prompt_ignore_length": 4},
        {"no_repeat_ngram_size": 1},
    ],
)
def test_penalties_act(torch_server: TritonServer, inputs: dict[str, Any]) -> None:
    body = {**GREEDY, "embedding_bias_words": ["e", "q"], "embedding_bias_weights": [40.0, 39.5]}
    plain, changed = say(torch_server, **body), say(torch_server, **body, **inputs)
    assert plain != changed


def test_min_p_leaves_only_the_likeliest(torch_server: TritonServer) -> None:
    body = {**SAMPLED, "top_p": 1.0, "temperature": 1.5}
    assert say(torch_server, **body, min_p=1.0, seed=3) == say(torch_server, **GREEDY)
    assert say(torch_server, **body, seed=3) != say(torch_server, **GREEDY)


def test_a_top_p_that_decays_samples_the_first_token_only(torch_server: TritonServer) -> None:
    body = {**SAMPLED, "temperature": 1.5, "seed": 5}
    plain = say(torch_server, **body)
    decaying = say(torch_server, **body, runtime_top_p_decay=1e-6)
    assert say(torch_server, **body, runtime_top_p_decay=1.0) == plain
    assert decaying != plain
    assert decaying.startswith(say(torch_server, **{**body, "max_tokens": 1}))
    assert decaying == say(torch_server, **body, runtime_top_p_decay=1e-6, runtime_top_p_min=1e-6)
    assert plain == say(torch_server, **body, runtime_top_p_decay=1e-6, runtime_top_p_min=0.95)
