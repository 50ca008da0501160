"""The judges of the long runs: they must see what is wrong."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from perf.long_runs.heard import Heard, Question
from perf.long_runs.kill_plan import (
    FULL_MOMENTS,
    KillPlan,
    Moment,
    Outcome,
    Prompt,
    judge,
    longest_gaps_s,
    read_kills,
    stalls_s,
)
from perf.long_runs.known_answers import (
    NUM_NUMBERS,
    counting_log_probs,
    counting_prompt,
    counting_text,
    write_number_tokenizer,
)
from perf.long_runs.known_prompts import CountingPrompts
from perf.long_runs.soak_load import Errand, Kind
from perf.soak import Limits, Sample, find_growth, main
from tokenflow.inflight.scripts import counting, expected
from triton_backend.text import TextTokenizer

QUESTION = Question(request_id="r", prompt="4 5", max_tokens=3)
PROMPT = Prompt(
    text="4 5", max_tokens=3, is_right=lambda text, count: text == counting_text(5, count)
)


def heard_of(texts: list[str], **changes: Any) -> Heard:
    """A stream with one token per text, a second apart."""
    heard = Heard(question=QUESTION, send_time=0.0)
    for index, text in enumerate(texts):
        outputs = {"text_output": text, "num_output_tokens": 1, "token_index": index}
        if index == len(texts) - 1 and not changes:
            outputs["finish_reason"] = "length"
        heard.take(outputs, 1.0 + index, final="finish_reason" in outputs)
    for name, value in changes.items():
        getattr(heard, name)(value, 10.0)
    return heard


def test_the_known_answers_are_those_of_the_scripted_engine(tmp_path: Any) -> None:
    tokenizer = TextTokenizer.load(write_number_tokenizer(tmp_path))
    for last in (0, 41, NUM_NUMBERS - 3):
        prompt = tokenizer.encode(counting_prompt(last, 7))
        assert len(prompt) == 7
        ids, log_probs = expected(counting(NUM_NUMBERS), prompt, 9)
        assert tokenizer.decode(ids) == counting_text(last, 9)
        assert log_probs == counting_log_probs(last, 9)


def test_a_whole_stream_is_right() -> None:
    outcome, faults = judge(PROMPT, heard_of(["6", " 7", " 8"]), [], exact=True)
    assert (outcome, faults) == (Outcome.COMPLETE, [])


@pytest.mark.parametrize("texts", [["6", " 7"], ["6", " 6", " 7"], ["6", " 8", " 9"], []])
def test_a_token_lost_doubled_or_swapped_is_seen(texts: list[str]) -> None:
    outcome, faults = judge(PROMPT, heard_of(texts), [], exact=True)
    assert outcome is Outcome.WRONG
    assert faults


def test_what_follows_the_end_and_jumps_of_the_index_are_seen() -> None:
    heard = heard_of(["6", " 7", " 8"])
    heard.take({"text_output": "", "num_output_tokens": 0}, 9.0, final=False)
    assert judge(PROMPT, heard, [], exact=True)[0] is Outcome.WRONG
    heard = Heard(question=QUESTION)
    heard.take({"text_output": "6", "num_output_tokens": 1, "token_index": 1}, 1.0, final=False)
    assert heard.faults
    twice = heard_of(["6", " 7", " 8"])
    twice.fail("late", 11.0)
    assert judge(PROMPT, twice, [], exact=True)[0] is Outcome.WRONG


def test_errors_are_right_only_where_the_rule_has_them() -> None:
    second = "the engine was lost a second time while it served this request: x"
    heard = heard_of(["6", " 7"], fail=second)
    assert judge(PROMPT, heard, [2.0, 3.0], exact=True) == (Outcome.SECOND_LOSS, [])
    assert judge(PROMPT, heard, [2.0, 30.0], exact=True)[0] is Outcome.WRONG
    heard = heard_of(["6"], fail="the engine was lost, and this request cannot be continued (x)")
    assert judge(PROMPT, heard, [2.0], exact=True)[0] is Outcome.WRONG
    never = dataclasses.replace(PROMPT, is_pausable=False)
    assert judge(never, heard, [2.0], exact=True) == (Outcome.CANNOT_CONTINUE, [])
    assert judge(never, heard, [], exact=True)[0] is Outcome.WRONG
    wrong_text = heard_of(["9"], fail=second)
    assert judge(PROMPT, wrong_text, [2.0, 3.0], exact=True)[0] is Outcome.WRONG


def test_another_text_of_a_model_is_told_not_wrong() -> None:
    heard = heard_of(["6", " 7", " 9"])
    assert judge(PROMPT, heard, [], exact=False) == (Outcome.DIFFERENT_TEXT, [])


def test_kills_lie_within_the_run_and_are_the_same_for_a_seed() -> None:
    plan = KillPlan()
    offsets = plan.kill_offsets_s()
    assert len(offsets) == len(FULL_MOMENTS) - 1  # one follows another at once
    assert offsets == sorted(offsets) == plan.kill_offsets_s()
    assert offsets[0] >= 6.0
    assert offsets[-1] <= 54.0
    assert dataclasses.replace(plan, seed=1).kill_offsets_s() != offsets


def test_kills_are_read_back_with_the_first_token_of_the_next_engine() -> None:
    trace = [
        {"event": "engine_lost", "time": 1.6},
        {"event": "engine_started", "time": 2.4},
        {"event": "engine_started", "time": 99.0},
    ]
    heard = heard_of(["6", " 7", " 8"])
    first, last = read_kills([(Moment.ANY, 1.5), (Moment.IDLE, 50.0)], trace, [heard])
    assert (first.lost_time, first.started_time, first.first_token_time) == (1.6, 2.4, 3.0)
    assert (last.lost_time, last.first_token_time) == (None, None)
    assert longest_gaps_s([heard], [1.5]) == [1.0]
    assert longest_gaps_s([heard], [0.5]) == []


def test_stalls_are_what_the_reader_waits_for() -> None:
    heard = heard_of(["6", " 7", " 8"])
    heard.question = dataclasses.replace(QUESTION, inputs={"read_rate": 2.0})
    assert stalls_s([heard]) == [0.5, 0.5]


def test_prompts_are_of_all_kinds() -> None:
    rng = random.Random(3)
    prompts = [CountingPrompts()(rng, False) for _ in range(200)]
    assert 5 < sum(not prompt.is_pausable for prompt in prompts) < 40
    assert 5 < sum(prompt.max_tokens > 400 for prompt in prompts) < 40
    long = CountingPrompts()(rng, True)
    assert len(long.text.split(" ")) > 1000
    assert long.is_pausable


def test_errands_are_fixed_by_their_number_and_of_all_kinds() -> None:
    errands = [Errand.number(1, index) for index in range(1000)]
    assert [Errand.number(1, index) for index in range(1000)] == errands
    assert {errand.kind for errand in errands} == set(Kind)
    assert sum(kind.value[0] for kind in Kind) == 100
    stopped = [errand for errand in errands if errand.ends_by_stop_word]
    assert 50 < len(stopped) < 300
    assert 600 < sum("stop_words" in errand.question.inputs for errand in errands) < 900


def errand_of(kind: Kind) -> Errand:
    return Errand(
        kind=kind,
        question=QUESTION,
        last=5,
        full_text=counting_text(5, 3),
        ends_by_stop_word=False,
        after_tokens=0,
        delay_s=0.0,
    )


def test_errands_judge_their_answers() -> None:
    whole = heard_of(["6", " 7", " 8"])
    assert errand_of(Kind.PLAIN).judge(whole) == []
    assert errand_of(Kind.STOP).judge(whole) == []
    assert errand_of(Kind.BAD).judge(whole)
    assert errand_of(Kind.BAD).judge(heard_of([], fail="top_p: no")) == []
    wrong = heard_of(["6", " 8", " 9"])
    assert all(errand_of(kind).judge(wrong) for kind in Kind)
    failed = heard_of(["6"], fail="no")
    assert errand_of(Kind.PLAIN).judge(failed)
    assert errand_of(Kind.LEAVE).judge(failed) == []
    stopped = heard_of(["6"], fail="x")
    stopped.error, stopped.finish_reason = None, "cancelled"
    assert errand_of(Kind.STOP).judge(stopped) == []
    assert errand_of(Kind.TIMEOUT).judge(stopped)
    stopped.finish_reason = "length"
    assert errand_of(Kind.STOP).judge(stopped), "it is not complete"


def samples_of(**series: list[int]) -> list[Sample]:
    """Nine rounds of a thousand requests; what is not named stands still."""
    names = [f.name for f in dataclasses.fields(Sample)]
    flat: dict[str, list[int]] = {name: [100_000_000 if "rss" in name else 4] * 9 for name in names}
    flat["num_requests"] = [1000 * (index + 1) for index in range(9)]
    flat |= series
    return [Sample(**{name: flat[name][index] for name in names}) for index in range(9)]


def test_a_run_of_too_few_rounds_to_compare_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "2"])


def test_growth_is_seen_and_warming_up_is_not() -> None:
    limits = Limits()
    assert find_growth(samples_of(), limits) == []
    warm = [50_000_000, 90_000_000, 99_000_000, *[100_000_000] * 6]
    assert find_growth(samples_of(stub_rss=warm), limits) == []
    leak = [100_000_000 + 1_000_000 * index for index in range(9)]
    assert find_growth(samples_of(stub_rss=leak), limits) == ["stub_rss: 104.0 -> 107.0 MB"]
    threads = [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert find_growth(samples_of(stub_threads=threads), limits) == ["stub_threads: 9 -> 12"]
    assert find_growth(samples_of(shm_bytes=threads), limits) == ["shm_bytes: 9 -> 12"]
