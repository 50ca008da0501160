"""Every sampling feature, and all together, against a reference that takes one row at a time.

Half of the logits are multiples of 0.25, with penalties that are mostly binary fractions: ties are
common there, near ties are not. The other half are normal.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference_sampling import acceptable
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.torch_draw import uniforms
from tokenflow.inflight.torch_sampler import Sampler, is_greedy

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
VOCAB = 11
NUM_STEPS = 7

_tokens = st.integers(0, VOCAB - 1)
# Each feature is left out half of the time, or the bans would drown everything else.
FEATURES = {
    "temperature": st.sampled_from([0.0, 0.5, 2.0]),
    "min_tokens": st.integers(0, NUM_STEPS),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    "presence_penalty": st.sampled_from([-0.5, 0.0, 0.75, 2.0]),
    "frequency_penalty": st.sampled_from([-0.25, 0.0, 0.5, 1.25]),
    "prompt_ignore_length": st.integers(0, 9),
    "no_repeat_ngram_size": st.integers(0, 4),
    "top_k": st.sampled_from([0, 1, 3, 20]),
    # No round shares: the boundary would be a matter of rounding.
    "top_p": st.sampled_from([0.1037, 0.4391, 0.7713, 0.9437, 1.0]),
    "min_p": st.sampled_from([0.0, 0.0313, 0.21, 0.57, 1.0]),
    "top_p_decay": st.sampled_from([0.317, 0.81, 1.0]),
    "top_p_min": st.sampled_from([0.0513, 0.3371]),
    "top_p_reset_ids": _tokens,
}
REQUEST_FEATURES = {
    "bad_words": st.lists(st.lists(_tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(
        tuple
    ),
    "embedding_bias": st.dictionaries(_tokens, st.integers(-12, 12).map(lambda x: x / 4)).map(
        lambda bias: tuple(bias.items())
    ),
    "end_id": st.integers(-1, VOCAB - 1),
}

PENALTIES = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
DECAY = ["top_p", "top_p_decay", "top_p_min", "top_p_reset_ids"]


def make(prompt: list[int], fields: dict[str, object], seed: int) -> Request:
    if "top_p" not in fields:  # admission refuses a decay of nothing
        fields = {name: value for name, value in fields.items() if name not in DECAY}
    outer = {name: fields[name] for name in REQUEST_FEATURES if name in fields}
    inner = {name: value for name, value in fields.items() if name in FEATURES}
    return Request(
        input_token_ids=tuple(prompt),
        max_tokens=100,
        sampling_config=SamplingConfig(seed=seed, **inner),
        **outer,
    )


def requests(names: list[str]) -> st.SearchStrategy[Request]:
    """Requests in which each of `names` may be set; some that draw, some greedy."""
    features = {**FEATURES, **REQUEST_FEATURES}
    return st.builds(
        make,
        st.lists(_tokens, min_size=1, max_size=6),
        st.fixed_dictionaries({}, optional={name: features[name] for name in names}),
        st.integers(0, 2**64 - 1),
    )


def logits_of(noise: int, num_rows: int) -> np.ndarray:
    rng = np.random.default_rng(noise)
    shape = (num_rows, NUM_STEPS, VOCAB)
    coarse = rng.integers(-12, 13, size=shape) / 4
    return (coarse if noise % 2 else 1.5 * rng.standard_normal(shape)).astype(np.float32)


def check_batch(rows: list[Request], noise: int, order: object) -> list[list[int]]:
    """Run all rows through one sampler, in batches that change from step to step."""
    logits = logits_of(noise, len(rows))
    sampler = Sampler(VOCAB, CPU)
    for i, request in enumerate(rows):
        sampler.add(i, request)
    outputs: list[list[int]] = [[] for _ in rows]
    while unfinished := [i for i, output in enumerate(outputs) if len(output) < NUM_STEPS]:
        order.shuffle(unfinished)
        batch = unfinished[: order.randint(1, len(unfinished))]
        steps = [len(outputs[i]) for i in batch]
        given_logits = torch.from_numpy(
            np.stack([logits[i, s] for i, s in zip(batch, steps, strict=True)])
        )
        before = given_logits.clone()
        token_ids, log_probs = sampler.sample(given_logits, batch, steps)
        assert torch.equal(given_logits, before)
        assert torch.isfinite(log_probs).all()
        for i, step, token in zip(batch, steps, token_ids.tolist(), strict=True):
            seed = np.array([rows[i].sampling_config.seed], dtype=np.uint64)
            uniform = float(uniforms(seed, np.array([step]))[0])
            sequence = [*rows[i].input_token_ids, *outputs[i]]
            expected = acceptable(logits[i, step].tolist(), rows[i], sequence, step, uniform)
            assert token in expected, (i, step, rows[i], sequence)
            outputs[i].append(token)
    return outputs


def check_resumed(request: Request, logits: np.ndarray, output: list[int], after: int) -> None:
    """A new request whose prompt holds the first `after` tokens goes on with the same ones."""
    sampling = request.sampling_config
    ignored = min(sampling.prompt_ignore_length or 0, len(request.input_token_ids))
    resumed = msgspec.structs.replace(
        request,
        input_token_ids=(*request.input_token_ids, *output[:after]),
        sampling_config=msgspec.structs.replace(
            sampling,
            min_tokens=max(0, (sampling.min_tokens or 0) - after),
            prompt_ignore_length=ignored,
        ),
    )
    sampler = Sampler(VOCAB, CPU)
    sampler.add(9, resumed)
    for step in range(after, NUM_STEPS):
        row = torch.from_numpy(logits[step][None])
        assert sampler.sample(row, [9], [step - after])[0].tolist() == [output[step]]


@pytest.mark.parametrize(
    "names",
    [
        ["repetition_penalty", "temperature"],
        ["presence_penalty", "prompt_ignore_length"],
        ["frequency_penalty", "prompt_ignore_length", "top_k"],
        [*PENALTIES, "temperature", "embedding_bias"],
        ["bad_words"],
        ["no_repeat_ngram_size"],
        ["min_tokens", "end_id"],
        ["min_p", "top_k", "top_p", "temperature"],
        DECAY,
        ["embedding_bias", "top_p"],
    ],
    ids=lambda names: "-".join(names),
)
def test_each_feature_equals_the_reference(names: list[str]) -> None:
    @settings(max_examples=40, deadline=None)
    @given(
        rows=st.lists(requests(names), min_size=1, max_size=4),
        noise=st.integers(0, 2**32),
        order=st.randoms(use_true_random=False),
    )
    def run(rows: list[Request], noise: int, order: object) -> None:
        check_batch(rows, noise, order)

    run()


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(requests([*FEATURES, *REQUEST_FEATURES]), min_size=1, max_size=5),
    noise=st.integers(0, 2**32),
    order=st.randoms(use_true_random=False),
    after=st.integers(1, NUM_STEPS - 1),
)
def test_all_features_together_and_resumed(
    rows: list[Request], noise: int, order: object, after: int
) -> None:
    outputs = check_batch(rows, noise, order)
    logits = logits_of(noise, len(rows))
    for i, request in enumerate(rows):
        if is_greedy(request.sampling_config):
            check_resumed(request, logits[i], outputs[i], after)
