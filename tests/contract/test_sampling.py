"""No sampling feature is changed by a pause, by other requests, or by the engine's own pauses.

Greedy requests with every feature: unpaused equals paused. Drawn ones get another seed at a resume,
so what is compared is each part with what a fresh request with that prompt and seed gives. Besides
the engines of the suite run two whose logits come from a script and whose sampler is the real one:
one used directly, and one behind the adapter of TensorRT-LLM.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.contract.client import Client, Output
from tests.contract.conftest import PAUSING, WIDE, _params
from tests.contract.engines import (
    ENGINES,
    VOCAB,
    Engine,
    in_process,
    same_exactly,
    trtllm_in_process,
)
from tests.contract.stories import Story, run_stories
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Executor, FinishReason, OutputConfig, SamplingConfig
from tokenflow.preemption import derive_seed, engine_request
from tokenflow.types import GenerateRequest

PROMPT = (18, 9, 27, 9, 140, 18, 36, 9)
LENGTH = 46
PAUSES = (1, 13, 39)


def _logits_engine(config: ServingConfig) -> Executor:
    from tests.support.logits_runner import LogitsRunner

    return in_process(LogitsRunner(VOCAB, step_s=config.scripted_step_s), config)


LOGITS = Engine("logits", VOCAB, _logits_engine, same_exactly)
# With the script alone nothing would be seen of what is lost on the way to TensorRT-LLM.
TRTLLM_LOGITS = replace(
    next(engine for engine in ENGINES if engine.name == "trtllm"),
    name="trtllm-logits",
    create=lambda config: trtllm_in_process(config, runner="logits"),
    create_bounded=None,
    script=None,
)
WITH_LOGITS = (LOGITS, TRTLLM_LOGITS)
LOGITS_PARAMS = [
    pytest.param(engine, id=engine.name, marks=pytest.mark.torch) for engine in WITH_LOGITS
]
ALL_ENGINES = [*_params(e for e in ENGINES if e.name != "trtllm"), *LOGITS_PARAMS]
SAMPLING_ENGINES = [*_params(e for e in ENGINES if e.name == "torch"), *LOGITS_PARAMS]
on_all_engines = pytest.mark.parametrize("engine", ALL_ENGINES, indirect=True, scope="session")
on_sampling_engines = pytest.mark.parametrize(
    "engine", SAMPLING_ENGINES, indirect=True, scope="session"
)


@dataclass(frozen=True)
class Feature:
    """fields(plain): fields of a GenerateRequest, given the output without the feature; what is
    in SamplingConfig goes there. reweighs: it cannot change what a script with one token says.
    ends: the output is shorter than LENGTH where the plain one holds no token twice."""

    fields: Callable[[list[int]], dict[str, object]]
    reweighs: bool = False
    ends: bool = False


def _reweighs(**fields: object) -> Feature:
    return Feature(lambda plain: fields, reweighs=True)


FEATURES = {
    "repetition": _reweighs(repetition_penalty=1.6),
    "repetition below 1": _reweighs(repetition_penalty=0.6),
    "presence": _reweighs(presence_penalty=1.1),
    "presence, part of the prompt ignored": _reweighs(presence_penalty=1.1, prompt_ignore_length=5),
    "presence, prompt ignored": _reweighs(presence_penalty=1.1, prompt_ignore_length=8),
    "presence, more than the prompt ignored": _reweighs(
        presence_penalty=1.1, prompt_ignore_length=1000
    ),
    "frequency": _reweighs(frequency_penalty=0.4),
    "frequency, prompt ignored": _reweighs(frequency_penalty=0.4, prompt_ignore_length=8),
    "penalty with temperature": _reweighs(presence_penalty=0.8, temperature=1.7, top_k=1),
    "bias": Feature(
        lambda plain: {"embedding_bias": ((plain[2], -8.0), (plain[20], 1.5))}, reweighs=True
    ),
    "bad word": Feature(lambda plain: {"bad_words": ((plain[3],), (plain[20],))}),
    "bad word of two": Feature(lambda plain: {"bad_words": ((plain[20], plain[21]),)}),
    "bad word from the prompt": Feature(lambda plain: {"bad_words": ((PROMPT[-1], plain[0]),)}),
    "bad word across a pause": Feature(lambda plain: {"bad_words": (tuple(plain[11:14]),)}),
    # Next to a penalty that wants repetition, or there would be none to prevent.
    "no repeated n-gram": _reweighs(no_repeat_ngram_size=2, repetition_penalty=0.5),
    "min_tokens": Feature(lambda plain: {"min_tokens": 20, "end_id": plain[15]}),
    "stop words": Feature(
        lambda plain: {"stop_words": ((VOCAB - 1,) * 3, tuple(plain[36:41]), (1, 2))}, ends=True
    ),
    "stop word from the prompt": Feature(
        lambda plain: {"stop_words": ((2, 2), (*PROMPT[-2:], *plain[:2]))}, ends=True
    ),
}


def _everything(plain: list[int]) -> dict[str, object]:
    return {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "prompt_ignore_length": 3,
        "no_repeat_ngram_size": 3,
        "min_tokens": 30,
        "end_id": plain[15],
        "temperature": 0.8,
        "top_k": 1,
        "min_p": 0.1,
        "bad_words": ((plain[3],), (plain[12], plain[13]), (PROMPT[-1], plain[0])),
        "stop_words": ((7, 7, 7), tuple(plain[40:43])),
        "embedding_bias": ((plain[2], -3.0), (plain[20], 0.7)),
    }


FEATURES["everything"] = Feature(_everything)


def generate_request(client: Client, **fields: object) -> GenerateRequest:
    """A request on a cold cache; log-probs are returned."""
    outer = ("bad_words", "stop_words", "embedding_bias", "end_id", "input_token_ids", "max_tokens")
    inner = {name: value for name, value in fields.items() if name not in outer}
    return GenerateRequest(
        request_id="r",
        arrival_time=0.0,
        output_config=OutputConfig(return_log_probs=True),
        sampling_config=SamplingConfig(**inner),
        cache_salt_id=client.new_salt(),
        **{
            "input_token_ids": PROMPT,
            "max_tokens": LENGTH,
            **{name: value for name, value in fields.items() if name in outer},
        },
    )


def unpaused(client: Client, **fields: object) -> Output:
    return run_stories(client, [Story(client, generate_request(client, **fields), ())])[0]


_PLAIN: dict[str, list[int]] = {}


def plain_output(engine: Engine, client: Client) -> list[int]:
    """What the engine says without any feature; computed once."""
    if engine.name not in _PLAIN:
        _PLAIN[engine.name] = unpaused(client).token_ids
    return _PLAIN[engine.name]


def check_bans(fields: dict[str, object], output: list[int]) -> None:
    """Nothing in an output is what bad words and n-grams forbid."""
    words = fields.get("bad_words", ())
    size = fields.get("no_repeat_ngram_size", 0)
    for end in range(len(PROMPT) + 1, len(PROMPT) + len(output) + 1):
        sequence = (*PROMPT, *output)[:end]
        assert not any(sequence[-len(word) :] == word for word in words)
        before = [sequence[i : i + size] for i in range(end - size)]
        assert not size or sequence[-size:] not in before


def check_logits(request: GenerateRequest, output: Output) -> None:
    """Each token is the one that the reference chooses, under the log-prob of the raw logits."""
    from tests.support.logits_runner import hashed_logits
    from tests.support.reference_sampling import acceptable

    enqueued = engine_request(request, (), client_id=1)
    history = PROMPT
    for step, (token, log_prob) in enumerate(zip(output.token_ids, output.log_probs, strict=True)):
        logits = hashed_logits(history, VOCAB).astype(np.float64)
        assert token in acceptable(logits.tolist(), enqueued, history, step, uniform=0.0)
        assert log_prob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-4)
        history = (*history, token)


@on_all_engines
@pytest.mark.parametrize("name", FEATURES)
def test_paused_equals_unpaused(engine, client_with, name):
    client = client_with(**WIDE)
    plain, feature = plain_output(engine, client), FEATURES[name]
    fields = feature.fields(plain)
    places = random.Random(name).sample(range(1, LENGTH), 4)
    whole, fixed, anywhere = run_stories(
        client,
        [
            Story(client, generate_request(client, **fields), pauses)
            for pauses in ((), PAUSES, places)
        ],
    )
    assert engine.same(whole, fixed)
    assert engine.same(whole, anywhere)
    assert len(whole.log_probs) == len(whole.token_ids)
    if engine.script is None or not feature.reweighs:
        assert whole.token_ids != plain, "the feature does something"
    elif engine.script is not None:
        assert whole.token_ids == plain
    check_bans(fields, whole.token_ids)
    if engine in WITH_LOGITS:
        check_logits(generate_request(client, **fields), whole)
    if feature.ends:
        assert whole.reason is FinishReason.STOP_WORDS
        assert whole.token_ids == plain[: len(whole.token_ids)]


@on_all_engines
def test_internal_pauses_change_nothing(engine, client_with):
    """A pool of 40 blocks for six requests of up to 15: the engine pauses some of them itself."""
    client = client_with(**PAUSING)
    plain = plain_output(engine, client_with(**WIDE))
    names = ("frequency", "everything", "no repeated n-gram", "bad word across a pause")
    chosen = [FEATURES[name].fields(plain) for name in names]
    chosen += [{"top_k": 5, "seed": 3}, {"top_p": 0.9, "min_p": 0.05, "seed": 4}]
    requests = [
        generate_request(
            client,
            **{**fields, "input_token_ids": (*range(60, 112), *PROMPT), "max_tokens": 60},
        )
        for fields in chosen
    ]
    alone = [run_stories(client, [Story(client, request, ())])[0] for request in requests]
    client.settle()
    enqueued = [
        engine_request(replace(request, cache_salt_id=client.new_salt()), (), client_id=1)
        for request in requests
    ]
    ids = client.enqueue_together(enqueued)
    client.wait(*ids)
    assert sum(s.inflight_batching_stats.num_paused_requests for s in client.stats) > 0
    for output, request_id in zip(alone, ids, strict=True):
        assert engine.same(output, client.outputs[request_id])


DRAWN = {
    "top_k": {"top_k": 6, "seed": 11},
    "top_p": {"top_p": 0.85, "temperature": 1.3, "seed": 12},
    "min_p": {"top_p": 1.0, "min_p": 0.1, "seed": 13},
    "no seed": {"top_k": 40, "top_p": 0.95},
    "all": {
        "top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.9, "seed": 2**63,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "prompt_ignore_length": 4, "no_repeat_ngram_size": 3, "bad_words": ((9,), (18, 27)),
        "embedding_bias": ((36, 1.0),), "min_tokens": 30, "end_id": 45,
    },
}  # fmt: skip


@on_all_engines
@pytest.mark.parametrize("name", DRAWN)
def test_each_part_of_a_drawn_request_is_that_of_its_prompt_and_seed(engine, client_with, name):
    client = client_with(**WIDE)
    request = generate_request(client, **DRAWN[name])
    whole, paused = run_stories(client, [Story(client, request, ()), Story(client, request, (13,))])
    assert paused.token_ids[:13] == whole.token_ids[:13]
    rest = engine_request(request, paused.token_ids[:13], client_id=1)
    assert rest.sampling_config.seed == derive_seed(request.sampling_config.seed, 13)
    fresh = client.run(
        rest.input_token_ids,
        rest.max_tokens,
        sampling_config=rest.sampling_config,
        bad_words=rest.bad_words,
        embedding_bias=rest.embedding_bias,
        end_id=rest.end_id,
        cache_salt_id=client.new_salt(),
    )
    assert paused.token_ids[13:] == fresh.token_ids
    assert paused.log_probs[13:] == pytest.approx(fresh.log_probs, abs=1e-3)
    if engine.script is None:
        assert whole.token_ids != plain_output(engine, client)


@on_sampling_engines
def test_streams_with_seeds_beside_one_another(engine, client_with):
    """Eight drawn streams; a greedy one joins them at token 10."""
    client = client_with(**{**WIDE, "max_batch_size": 9})
    drawn = [{"top_p": 0.95, "temperature": 1.1, "seed": seed} for seed in range(8)]
    greedy = {"temperature": 0.0, "top_p": 0.95}
    alone = [unpaused(client, **fields).token_ids for fields in (*drawn, greedy)]
    assert len({tuple(output) for output in alone}) == 9
    client.settle()
    stories = [Story(client, generate_request(client, **fields), ()) for fields in drawn]
    running = [output for output in client.outputs.values() if output.final is None]
    client.until(lambda: any(len(output.token_ids) >= 10 for output in running))
    assert any(output.final is None for output in running)
    stories.append(Story(client, generate_request(client, **greedy), ()))
    together = [output.token_ids for output in run_stories(client, stories)]
    assert together == alone


@on_sampling_engines
def test_top_p_decay_is_honoured(engine, client_with):
    """After the first token next to nothing is left of top_p: the rest is greedy."""
    client = client_with(**WIDE)
    decaying = unpaused(client, top_p=1.0, temperature=2.0, seed=9, top_p_decay=1e-6)
    steady = unpaused(client, top_p=1.0, temperature=2.0, seed=9)
    assert decaying.token_ids[0] == steady.token_ids[0]
    rest = client.run((*PROMPT, decaying.token_ids[0]), LENGTH - 1)
    assert decaying.token_ids[1:] == rest.token_ids
    assert steady.token_ids[1:] != rest.token_ids
    kept = unpaused(client, top_p=1.0, temperature=2.0, seed=9, top_p_decay=1e-6, top_p_min=1.0)
    assert kept.token_ids == steady.token_ids


@on_all_engines
def test_several_log_probs(engine, client):
    """One per token, natural, of the raw logits whatever reweighs, summed in cum_log_probs."""
    fields = {"repetition_penalty": 1.7, "embedding_bias": ((30, 2.0),), "top_k": 3, "seed": 1}
    request = engine_request(generate_request(client, **fields), (), client_id=1)
    (request_id,) = client.enqueue_together([request])
    output = client.wait(request_id)
    assert len(output.log_probs) == LENGTH
    assert all(value <= 0 for value in output.log_probs)
    assert output.final.result.cum_log_probs[0] == pytest.approx(sum(output.log_probs), abs=1e-4)
