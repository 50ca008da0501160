"""The batched sampler against plain references, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.driving import request
from tokenflow.errors import InternalError
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.torch_draw import draw, uniforms
from tokenflow.inflight.torch_sampler import Sampler

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def _sample_one(logits: list[float], num_generated: int = 0, **sampling: object) -> int:
    sampler = Sampler(len(logits), CPU)
    sampler.add(5, request(**sampling))
    token_ids, _ = sampler.sample(torch.tensor([logits]), [5], [num_generated])
    return int(token_ids[0])


def _reference_weights(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    """Probability left to each token, by sorting and counting in plain Python."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    total = sum(weights)
    probs = [w / total for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or len(probs)]
    share = sum(probs[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += probs[i]
        if top_p < 1 and reached >= top_p * share:
            break
    return [p if i in kept else 0.0 for i, p in enumerate(probs)]


# Logits a multiple of 0.25 apart: ties are common, near ties (where float32 may decide otherwise
# than the reference) are not.
_logits = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=2, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    logits=_logits,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    # No round shares: the boundary would be a matter of rounding.
    top_p=st.sampled_from([0.1037, 0.4391, 0.7713, 0.9437, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_draw_equals_the_plain_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    weights = _reference_weights(logits, temperature, top_k, top_p)
    target = uniform * sum(weights)
    cumulative = np.cumsum(weights)
    if np.abs(cumulative - target).min() < 1e-6 * cumulative[-1] and target > 0:
        return  # float32 probabilities may fall on either side
    expected = int(np.searchsorted(cumulative, target, side="right"))
    token = draw(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([min(top_k, len(logits)) or len(logits)]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([uniform], dtype=torch.float64),
    )
    assert int(token[0]) == expected


def test_flat_tail_needs_the_full_sort() -> None:
    """The cuts lie behind the candidates that are looked at first."""
    vocab_size = 9000
    logits = torch.arange(vocab_size).float().flip(0)[None] * -1e-4
    probs = torch.softmax(logits, -1)[0]
    for top_k, top_p in (
        (1500, 1.0),
        (6000, 1.0),
        (vocab_size, 0.4),
        (vocab_size, 0.9),
        (6000, 0.5),
    ):
        best = probs.sort(descending=True).values[:top_k].double()
        wanted = int((best.cumsum(0) < top_p * best.sum()).sum()) + 1 if top_p < 1 else top_k
        # The largest draw takes the highest id that is left, the smallest draw the lowest.
        arguments = (
            torch.ones(2),
            torch.full((2,), top_k),
            torch.full((2,), top_p, dtype=torch.float64),
            torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64),
        )
        low, high = draw(logits.repeat(2, 1), *arguments).tolist()
        assert (low, high) == (vocab_size - wanted, vocab_size - 1)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 2**32),
            st.sampled_from([0, 1, 3, 20, 290, 400]),
            st.sampled_from([None, 0.3, 0.9, 0.999, 1.0]),
            st.sampled_from([None, 0.0, 0.5, 1.7]),
            st.integers(0, 2**64 - 1),
            st.integers(0, 9),
        ),
        min_size=2,
        max_size=6,
    ),
    order=st.randoms(),
)
def test_a_row_does_not_depend_on_slot_or_neighbours(rows: list[tuple], order: object) -> None:
    vocab_size = 600
    sampler = Sampler(vocab_size, CPU)
    logits = []
    for i, (noise, top_k, top_p, temperature, seed, _) in enumerate(rows):
        sampler.add(i, request(top_k=top_k, top_p=top_p, temperature=temperature, seed=seed))
        logits.append(torch.randn(vocab_size, generator=torch.Generator().manual_seed(noise)))
    alone = [sampler.sample(logits[i][None], [i], [row[-1]]) for i, row in enumerate(rows)]
    slots = list(range(len(rows)))
    order.shuffle(slots)
    token_ids, log_probs = sampler.sample(
        torch.stack([logits[i] for i in slots]), slots, [rows[i][-1] for i in slots]
    )
    for slot, i in enumerate(slots):
        assert int(token_ids[slot]) == int(alone[i][0])
        assert float(log_probs[slot]) == pytest.approx(float(alone[i][1]), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_frequencies_follow_the_distribution(
    sampling: dict[str, object], expected: list[float]
) -> None:
    count = 20_000
    sampler = Sampler(4, CPU)
    sampler.add(0, request(**{"top_p": 1.0, "seed": 11, **sampling}))
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(count, 1)
    token_ids, _ = sampler.sample(logits, [0] * count, list(range(count)))
    found = np.bincount(token_ids.numpy(), minlength=4)
    for number, share in zip(found, expected, strict=True):
        deviation = math.sqrt(count * share * (1 - share))
        assert abs(number - count * share) <= 4 * deviation


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"top_k": 0, "temperature": 5.0},
        {"top_k": 1, "temperature": 5.0, "seed": 3},
        {"top_p": 1.0, "temperature": 0.0},
        {"top_p": 1.0, "temperature": 1e-30},
        {"top_p": 1.0, "temperature": 1e-300},
        {"top_p": 1.0, "min_p": 1.0},
        {"min_p": 0.01, "temperature": 5.0},
    ],
)
def test_greedy(sampling: dict[str, object]) -> None:
    for i in range(20):
        assert _sample_one([0.1, 0.3, 0.2, 0.29], i, **sampling) == 1


def test_end_token_is_masked_until_min_tokens() -> None:
    logits = [5.0, 1.0, 2.0]
    greedy = [_sample_one(logits, i, end_id=0, min_tokens=2) for i in range(4)]
    assert greedy == [2, 2, 0, 0]
    sampled = [_sample_one(logits, i, end_id=0, min_tokens=50, top_p=1.0) for i in range(50)]
    assert set(sampled) == {1, 2}
    assert _sample_one(logits, 0, end_id=-1, min_tokens=9) == 0
    assert _sample_one(logits, 0, min_tokens=9) == 0


def test_masking_one_row_leaves_the_others_and_the_logits_alone() -> None:
    sampler = Sampler(3, CPU)
    sampler.add(0, request(end_id=0, min_tokens=3))
    sampler.add(1, request(end_id=0))
    logits = torch.tensor([[5.0, 1.0, 2.0]] * 2)
    token_ids, log_probs = sampler.sample(logits, [0, 1], [0, 0])
    assert token_ids.tolist() == [2, 0]
    raw = torch.log_softmax(torch.tensor([5.0, 1.0, 2.0]), 0)
    assert log_probs.tolist() == pytest.approx([float(raw[2]), float(raw[0])], abs=1e-5)
    assert logits.tolist() == [[5.0, 1.0, 2.0]] * 2


def test_log_prob_is_that_of_the_raw_logits_when_sampled() -> None:
    sampler = Sampler(5, CPU)
    sampler.add(0, request(top_k=2, temperature=0.2, seed=4))
    logits = torch.tensor([[0.3, 1.0, 0.9, -1.0, 0.5]])
    for i in range(10):
        token_ids, log_probs = sampler.sample(logits, [0], [i])
        raw = torch.log_softmax(logits[0], 0)[token_ids[0]]
        assert float(log_probs[0]) == pytest.approx(float(raw), abs=1e-5)


def test_the_random_stream_belongs_to_seed_and_index() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 7], dtype=np.uint64)
    table = np.array([uniforms(seeds, np.full(4, i)) for i in range(2000)])
    assert table.min() >= 0
    assert table.max() < 1
    assert len(np.unique(table)) == table.size
    assert np.array_equal(table[5], uniforms(seeds, np.full(4, 5)))
    assert np.abs(table.mean(axis=0) - 0.5).max() < 4 / math.sqrt(12 * 2000)
    correlation = np.corrcoef(np.concatenate([table[:-1], table[1:]], axis=1).T)
    assert np.abs(correlation - np.eye(8)).max() < 0.1


def test_no_seed_continues_the_stream_of_another() -> None:
    step = 0x9E3779B97F4A7C15
    seeds = np.array([5, (5 + step) % 2**64], dtype=np.uint64)
    late = uniforms(seeds[:1], np.array([1]))
    assert late != uniforms(seeds[1:], np.array([0]))


def test_unset_seed_is_zero_and_a_new_enqueue_restarts_the_stream() -> None:
    logits = [0.0] * 50
    unset = [_sample_one(logits, i, top_p=1.0) for i in range(20)]
    assert unset == [_sample_one(logits, i, top_p=1.0, seed=0) for i in range(20)]
    assert unset != [_sample_one(logits, i, top_p=1.0, seed=1) for i in range(20)]


def test_a_reused_id_gets_its_own_parameters() -> None:
    sampler = Sampler(3, CPU)
    logits = torch.tensor([[5.0, 1.0, 2.0]])
    for min_tokens, expected in ((1, 2), (0, 0)):
        sampler.add(0, request(end_id=0, min_tokens=min_tokens))
        assert sampler.sample(logits, [0], [0])[0].tolist() == [expected]
        sampler.remove(0)
    with pytest.raises(KeyError):
        sampler.sample(logits, [0], [0])


def _with(prompt: tuple[int, ...], **fields: object) -> Request:
    """A request with a prompt; fields of the request and of its sampling."""
    outer = {k: fields.pop(k) for k in ("bad_words", "embedding_bias", "end_id") if k in fields}
    sampling = SamplingConfig(**fields)
    return Request(input_token_ids=prompt, max_tokens=9, sampling_config=sampling, **outer)


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_a_row_of_which_every_token_is_banned_takes_the_best_raw_logit(top_p: float | None) -> None:
    sampler = Sampler(3, CPU)
    words = ((0,), (1,), (2,))
    sampler.add(0, _with((1,), bad_words=words, embedding_bias=((2, 9.0),), top_p=top_p))
    sampler.add(1, _with((1,), bad_words=((0,),), top_p=top_p, min_p=1.0))
    logits = torch.tensor([[0.5, 3.0, 2.0], [0.5, -3.0, -2.0]])
    token_ids, log_probs = sampler.sample(logits, [0, 1], [0, 0])
    assert token_ids.tolist() == [1, 2]
    assert torch.isfinite(log_probs).all()


def test_extreme_parameters_give_no_nan() -> None:
    huge = 3e38
    extremes = [
        {"repetition_penalty": 1e-320, "frequency_penalty": huge, "temperature": huge},
        {"repetition_penalty": huge, "presence_penalty": huge},
        {"frequency_penalty": -huge, "temperature": huge, "top_k": 3},
        {"embedding_bias": ((0, huge), (1, -huge)), "presence_penalty": huge, "top_p": 1.0},
    ]
    sampler = Sampler(4, CPU)
    for i, fields in enumerate(extremes):
        sampler.add(i, _with((0, 1, 0, 3), **fields))
    logits = torch.tensor([[2.0, -1.0, 0.0, 0.5]]).repeat(4, 1)
    rows = list(range(4))
    steps = [sampler.sample(logits, rows, [step] * 4)[0].tolist() for step in range(3)]
    assert [step[0] for step in steps] == [0, 0, 0], "divided by next to nothing"
    assert steps[0][1] == 2, "the only one that has not come"
    assert all(step[2] != 2 for step in steps), "far more wanted than what has not come"
    assert all(0 <= token < 4 for step in steps for token in step)


def test_penalties_act_in_units_of_the_scaled_logits_also_when_greedy() -> None:
    logits = torch.tensor([[2.0, 1.2, 0.0]])
    for temperature, expected in ((None, 1), (0.0, 1), (1.0, 1), (0.5, 0), (2.0, 1)):
        sampler = Sampler(3, CPU)
        sampler.add(0, _with((0,), top_k=1, presence_penalty=1.0, temperature=temperature))
        assert sampler.sample(logits, [0], [0])[0].tolist() == [expected], temperature


def test_top_p_decays_and_starts_anew() -> None:
    """A top_p of next to nothing leaves the most likely token; with all of it the draw decides."""
    sampler = Sampler(50, CPU)
    fields = {"top_p": 1.0, "top_p_decay": 1e-6, "top_p_reset_ids": 7, "seed": 3}
    sampler.add(0, _with((7,), **fields))
    sampler.add(1, _with((1,), top_p=1.0, seed=3))
    flat = torch.zeros(50)
    flat[0] = 1e-3
    only_7 = torch.zeros(50)
    only_7[7] = 1e4
    drawn = [int(sampler.sample(flat[None], [1], [i])[0]) for i in range(4)]
    rows = [flat, flat, only_7, flat, flat]
    got = [int(sampler.sample(row[None], [0], [i])[0]) for i, row in enumerate(rows)]
    assert 0 not in (drawn[0], drawn[3])
    assert got == [drawn[0], 0, 7, drawn[3], 0]


def test_a_request_that_generated_what_its_sampler_did_not_choose() -> None:
    sampler = Sampler(3, CPU)
    sampler.add(0, _with((1,), presence_penalty=1.0))
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    sampler.sample(logits, [0], [0])
    with pytest.raises(InternalError):
        sampler.sample(logits, [0], [2])


def test_logits_are_copied_only_where_a_feature_asks_for_it() -> None:
    """What a batch without features costs is a softmax and an argmax."""
    for fields, copies in (({}, False), ({"min_tokens": 2, "end_id": 0}, True)):
        sampler = Sampler(3, CPU)
        sampler.add(0, _with((1,), **fields))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sampler.sample(torch.tensor([[2.0, 1.0, 0.0]]), [0], [0])
        assert any(event.name == "aten::clone" for event in profile.events()) == copies
