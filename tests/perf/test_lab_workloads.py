"""Arrivals, lengths, people and conversations of the laboratory's workloads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.lab import lengths
from perf.lab.arrivals import (
    Arrivals,
    Burst,
    Delayed,
    Gamma,
    OnOff,
    Poisson,
    Superposition,
    split,
)
from perf.lab.lengths import Fixed, Lengths, Normal, Percentiles
from perf.lab.mixes import (
    MACHINE,
    PAPER_MIXED_RATES,
    READER,
    HumanReaders,
    Mix,
    MixedRates,
    OneRate,
)
from perf.lab.workloads import Conversations, Singles, streams
from perf.virtual.prompts import PromptTokens
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest
from tokenflow.policies import FcfsReservePolicy
from tokenflow.scheduler import plan

ARRIVALS: tuple[Arrivals, ...] = (
    Burst(2.0),
    Burst(0.0),
    Poisson(5.0),
    Gamma(5.0, 4.0),
    OnOff(off_rate=0.0, on_rate=10.0, off_s=3.0, on_s=1.0),
    OnOff(off_rate=1.0, on_rate=10.0, off_s=3.0, on_s=1.0),
    Delayed(Poisson(5.0), 7.0),
    Superposition(((Poisson(2.0), 2.0), (Delayed(Burst(1.0), 10.0), 1.0))),
)


def rng(seed: int = 0) -> np.random.Generator:
    return streams(seed, 1)[0]


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(ARRIVALS), num=st.integers(0, 60), seed=st.integers(0, 1 << 32))
def test_instants_are_as_many_as_asked_for_in_order_and_repeatable(
    kind: Arrivals, num: int, seed: int
) -> None:
    instants = kind.instants(rng(seed), num)
    assert len(instants) == num
    assert np.isfinite(instants).all()
    assert (np.diff(instants) >= 0).all()
    assert (instants >= 0).all()
    np.testing.assert_array_equal(instants, kind.instants(rng(seed), num))


def test_a_burst_is_over_after_its_span() -> None:
    instants = Burst(2.0).instants(rng(), 1000)
    assert 1.9 < instants[-1] <= 2.0
    assert instants.mean() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("kind", "cv"), [(Poisson(5.0), 1.0), (Gamma(5.0, 3.0), 3.0)])
def test_gaps_have_the_rate_and_the_variation_of_their_kind(kind: Arrivals, cv: float) -> None:
    gaps = np.diff(kind.instants(rng(), 50_000))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_on_and_off_times_have_their_own_rates_quiet_ones_first() -> None:
    kind = OnOff(off_rate=2.0, on_rate=30.0, off_s=3.0, on_s=1.0)
    instants = kind.instants(rng(), 36_000)
    assert instants[-1] == pytest.approx(4_000, rel=0.05)
    in_cycle = instants % 4.0
    num_cycles = instants[-1] / 4.0
    assert (in_cycle < 3.0).sum() / num_cycles == pytest.approx(6.0, rel=0.05)
    assert (in_cycle >= 3.0).sum() / num_cycles == pytest.approx(30.0, rel=0.05)
    silent = OnOff(off_rate=0.0, on_rate=30.0, off_s=3.0, on_s=1.0).instants(rng(), 1_000)
    assert (silent % 4.0 >= 3.0).all()


def test_a_superposition_keeps_the_shares_of_its_parts() -> None:
    both = Superposition(((Burst(1.0), 3.0), (Delayed(Burst(1.0), 10.0), 1.0)))
    instants = both.instants(rng(), 101)
    assert (instants < 5).sum() == 76
    assert (instants >= 10).sum() == 25


@given(num=st.integers(0, 1000), shares=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
def test_a_split_is_whole_complete_and_off_by_less_than_one(num: int, shares: list[float]) -> None:
    parts = split(num, shares)
    assert parts.sum() == num
    exact = num * np.array(shares) / sum(shares)
    assert (np.abs(parts - exact) < 1 + 1e-9).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Burst(-1.0),
        lambda: Poisson(0.0),
        lambda: Gamma(1.0, 0.0),
        lambda: OnOff(off_rate=-1.0, on_rate=1.0, off_s=1.0, on_s=1.0),
        lambda: OnOff(off_rate=1.0, on_rate=1.0, off_s=0.0, on_s=1.0),
        lambda: Delayed(Burst(1.0), -1.0),
        lambda: Superposition(()),
        lambda: Superposition(((Burst(1.0), 0.0),)),
        lambda: Fixed(0),
        lambda: Normal(mean=0.0),
        lambda: Percentiles(((0.0, 1), (0.5, 1), (1.0, 3))),
        lambda: Percentiles(((0.1, 1), (1.0, 3))),
        lambda: Percentiles(()),
        lambda: OneRate(0.0),
        lambda: OneRate(float("nan")),
        lambda: MixedRates(()),
        lambda: MixedRates(((1.0, 0.0),)),
        lambda: HumanReaders(slowest=300.0),
        lambda: Mix(readers=OneRate(1.0), machine_share=1.1),
        lambda: Mix(readers=OneRate(1.0), priorities=((1.5, 1.0),)),
        lambda: Mix(readers=OneRate(1.0), priorities=()),
    ],
)
def test_what_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must|need|no such|rise"):
        make()  # type: ignore[operator]


# What Llumnix prints: mean, P50, P80, P95, P99.
PRINTED = {
    "SHAREGPT_PROMPTS": (306, 74, 348, 1484, 3388),
    "SHAREGPT_ANSWERS": (500, 487, 781, 988, 1234),
    "BURSTGPT_PROMPTS": (830, 582, 1427, 2345, 3549),
    "BURSTGPT_ANSWERS": (271, 243, 434, 669, 964),
}


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_published_lengths_have_the_printed_mean_and_percentiles(
    name: str, printed: tuple[int, ...]
) -> None:
    distribution = getattr(lengths, name)
    assert distribution.mean == pytest.approx(printed[0], rel=0.03)
    drawn = distribution.draw(rng(), 100_000)
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(distribution.mean, rel=0.02)
    np.testing.assert_allclose(np.percentile(drawn, [50, 80, 95, 99]), printed[1:], rtol=0.04)


def test_normal_lengths_have_their_mean_and_deviation_and_are_cut_off_below() -> None:
    drawn = Normal(mean=512).draw(rng(), 20_000)
    assert drawn.mean() == pytest.approx(512, rel=0.01)
    assert drawn.std() == pytest.approx(128, rel=0.03)
    assert Normal(mean=20.0, std_share=2.0).draw(rng(), 1_000).min() == 16
    assert set(Fixed(7).draw(rng(), 5)) == {7}


def test_the_papers_readers_are_two_to_three_and_people_read_like_people() -> None:
    assert Counter(PAPER_MIXED_RATES.rates(rng(), 50)) == {15.0: 20, 20.0: 30}
    words = HumanReaders().rates(rng(), 20_000) * 60 / 1.33
    assert words.mean() == pytest.approx(238, rel=0.01)
    assert ((words > 175) & (words < 300)).mean() == pytest.approx(0.8, abs=0.01)
    assert words.min() >= 100 - 1e-9
    assert words.max() <= 400 + 1e-9
    assert HumanReaders(tokens_per_word=1.75).rates(rng(), 9_999).mean() > 6.5


def test_a_mix_meets_its_shares_and_only_readers_leave() -> None:
    mix = Mix(
        readers=OneRate(5.0),
        machine_share=0.3,
        priorities=((0.5, 8.0), (0.9, 2.0)),
        cancel_share=0.5,
    )
    work = Singles(
        num_requests=200, arrivals=Poisson(5.0), prompts=Fixed(30), answers=Fixed(100), mix=mix
    ).requests(3)
    assert Counter(r.kind for r in work) == {READER: 140, MACHINE: 60}
    assert all((r.read_rate is None) == (r.kind == MACHINE) for r in work)
    assert Counter(r.priority for r in work) == {0.5: 160, 0.9: 40}
    leaving = [r for r in work if r.cancel_after_s is not None]
    assert len(leaving) == 70
    assert all(r.kind == READER and 0 <= r.cancel_after_s <= 0.9 * 100 / 5 for r in leaving)


SINGLES = Singles(
    num_requests=50,
    arrivals=Poisson(5.0),
    prompts=Normal(mean=100),
    answers=lengths.SHAREGPT_ANSWERS,
    mix=Mix(readers=HumanReaders()),
)


def test_changing_one_thing_leaves_the_others_as_they_are() -> None:
    before = SINGLES.requests(1)
    assert before == SINGLES.requests(1)
    assert before != SINGLES.requests(2)
    readers = SINGLES.with_mix(Mix(readers=OneRate(6.0), machine_share=0.5)).requests(1)
    arrivals = dataclasses.replace(SINGLES, arrivals=Gamma(1.0, 3.0)).requests(1)
    for old, other, later in zip(before, readers, arrivals, strict=True):
        assert (other.arrival_time, other.num_prompt_tokens) == (
            old.arrival_time,
            old.num_prompt_tokens,
        )
        assert later.num_prompt_tokens == old.num_prompt_tokens
        assert (later.max_tokens, later.read_rate) == (old.max_tokens, old.read_rate)


def test_workloads_are_the_same_on_every_machine() -> None:
    """The very numbers: another numpy or Python that drew others would make tables differ."""
    first = SINGLES.requests(7)[0]
    assert (first.num_prompt_tokens, first.max_tokens) == GOLDEN_LENGTHS
    assert first.arrival_time == pytest.approx(GOLDEN_TIME, rel=1e-12)
    assert first.read_rate == pytest.approx(GOLDEN_RATE, rel=1e-12)
    assert sum(r.num_prompt_tokens + r.max_tokens for r in SINGLES.requests(7)) == GOLDEN_SUM


GOLDEN_LENGTHS = (135, 600)
GOLDEN_TIME = 0.23946820798359916
GOLDEN_RATE = 4.693469882181533
GOLDEN_SUM = 25_932

CONVERSATIONS = Conversations(
    num_conversations=12,
    arrivals=Poisson(1.0),
    first_prompts=Normal(mean=200),
    questions=Fixed(20),
    answers=Normal(mean=60),
    mix=Mix(readers=OneRate(5.0), machine_share=0.25),
    max_turns=5,
)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), questions=st.sampled_from([Fixed(1), Normal(mean=40)]))
def test_a_turn_repeats_its_conversation_and_comes_after_its_answer_was_read(
    seed: int, questions: Lengths
) -> None:
    work = dataclasses.replace(CONVERSATIONS, questions=questions).requests(seed)
    assert work == sorted(work, key=lambda r: r.arrival_time)
    turns: dict[int, list[SimRequest]] = {}
    for request in work:
        assert request.conversation is not None
        turns.setdefault(request.conversation, []).append(request)
    assert len(turns) == 12
    for said in turns.values():
        assert 1 <= len(said) <= 5
        assert said[0].num_history_tokens == 0
        for earlier, later in itertools.pairwise(said):
            assert later.num_history_tokens == earlier.num_prompt_tokens + earlier.max_tokens
            assert later.num_prompt_tokens > later.num_history_tokens
            assert (later.read_rate, later.kind) == (earlier.read_rate, earlier.kind)
            read_s = earlier.max_tokens / (earlier.read_rate or 20.0)
            assert later.arrival_time > earlier.arrival_time + read_s


def test_conversations_have_about_as_many_turns_as_said() -> None:
    many = dataclasses.replace(CONVERSATIONS, num_conversations=3_000, max_turns=100)
    assert len(many.requests(0)) / 3_000 == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"mix": Mix(readers=OneRate(5.0), cancel_share=0.1)},
        {"mean_turns": 0.5},
        {"max_turns": 0},
        {"think_s": -1.0},
    ],
)
def test_conversations_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        dataclasses.replace(CONVERSATIONS, **change)


def ask(num_prompt: int, **fields: object) -> SimRequest:
    return SimRequest(
        arrival_time=0.0,
        num_prompt_tokens=num_prompt,
        max_tokens=3,
        **fields,  # type: ignore[arg-type]
    )


def test_prompts_begin_alike_only_where_their_requests_say_so() -> None:
    prompts = PromptTokens()
    assert prompts.token_ids(1, ask(4)) == (1, 1, 1, 1)
    assert prompts.token_ids(2, ask(4, num_shared_tokens=3)) == (0, 0, 0, 2)
    first = prompts.token_ids(3, ask(2, conversation=7))
    other = prompts.token_ids(4, ask(2, conversation=8))
    second = prompts.token_ids(5, ask(7, conversation=7, num_history_tokens=5))
    third = prompts.token_ids(6, ask(11, conversation=7, num_history_tokens=10))
    assert (first, other) == ((3, 3), (4, 4))
    assert second == (*first, 0, 0, 0, 5, 5)
    assert third == (*second, 0, 0, 0, 6)


@pytest.mark.parametrize(
    "request_",
    [
        ask(4, num_shared_tokens=5),
        ask(9, num_history_tokens=1),
        ask(9, conversation=1, num_history_tokens=6),
        ask(4, conversation=1, num_history_tokens=5),
    ],
)
def test_a_prompt_repeats_no_more_than_was_said(request_: SimRequest) -> None:
    prompts = PromptTokens()
    prompts.token_ids(1, ask(2, conversation=1))
    with pytest.raises(ValueError, match="exceeds"):
        prompts.token_ids(2, request_)


def test_a_turn_finds_the_kv_of_its_conversation() -> None:
    """The second turn's prompt takes over a second to compute, but most of it is there already."""
    first = SimRequest(arrival_time=0.0, num_prompt_tokens=2600, max_tokens=64, conversation=0)
    second = dataclasses.replace(
        first, arrival_time=60.0, num_prompt_tokens=2600 + 64 + 32, num_history_tokens=2664
    )
    stranger = dataclasses.replace(second, conversation=None, num_history_tokens=0)
    waits = []
    for later in (second, stranger):
        result = Simulation(
            [first, later], lambda snap: plan(snap, FcfsReservePolicy()), SimEngine()
        ).run()
        waits.append(result.seqs[1].token_times[0] - 60.0)
        assert len(result.seqs[1].token_times) == 64
    with_history, without = waits
    assert without > 1.0
    assert with_history < 0.2
