"""The table of policies: every row runs a small workload to its end on the product's own engine."""

from __future__ import annotations

import dataclasses
import random

import pytest

from perf.lab.disaggregated import run
from perf.lab.policies import ABLATION, HEADLINE, POLICIES, policies
from perf.virtual.values import SimEngine, SimRequest, SimResult
from tokenflow.metrics import ttft_s
from tokenflow.types import EndReason

ENGINE = SimEngine(
    max_batch_size=12,
    num_total_blocks=30,
    tokens_per_block=16,
    max_num_tokens=128,
    max_seq_len=256,
    step_base_s=0.01,
    step_per_sequence_s=0.0005,
    prefill_tokens_per_s=8000.0,
    num_host_blocks=60,
    block_bytes=1 << 20,
    copy_bytes_per_s=4e9,
)
"""A pool for about a fifth of the workload."""


def workload() -> list[SimRequest]:
    """A burst of readers, with a machine, one of a kind that is never paused, one that leaves."""
    rng = random.Random(7)
    requests = [
        SimRequest(
            arrival_time=0.01 * i,
            num_prompt_tokens=rng.randint(20, 90),
            max_tokens=rng.randint(40, 90),
            read_rate=6.0,
        )
        for i in range(20)
    ]
    requests[3] = dataclasses.replace(requests[3], read_rate=None)
    requests[5] = dataclasses.replace(requests[5], pausable=False)
    requests[8] = dataclasses.replace(requests[8], cancel_after_s=1.0)
    requests[11] = dataclasses.replace(requests[11], max_tokens=1)
    return requests


def receipts(result: SimResult) -> list[list[float]]:
    return [seq.token_times for seq in result.seqs]


@pytest.mark.parametrize("name", POLICIES)
def test_every_row_serves_everybody(name: str) -> None:
    row, requests = POLICIES[name], workload()
    result = row.run(requests, ENGINE)
    for i, seq in enumerate(result.seqs):
        assert seq.request == requests[i]
        if i == 8 and seq.end is EndReason.CANCELLED:
            continue
        assert seq.end is EndReason.LENGTH
        assert len(seq.token_times) == seq.request.max_tokens
    assert result.seqs[5].num_pauses == 0


@pytest.mark.parametrize("row", HEADLINE, ids=lambda row: row.name)
def test_rows_repeat_themselves_and_the_pool_is_too_small(row) -> None:
    """Else the rows above would say nothing of who has to wait or to yield."""
    result = row.run(workload(), ENGINE)
    assert receipts(row.run(workload(), ENGINE)) == receipts(result)
    waited = [seq for seq in result.seqs if ttft_s(seq.stream) > 0.3]
    assert waited or result.num_pauses + result.num_internal_pauses > 0


def test_who_pauses_and_who_does_not() -> None:
    results = {row.name: row.run(workload(), ENGINE) for row in HEADLINE}
    assert results["fcfs-reserve"].num_pauses == results["fcfs-reserve"].num_internal_pauses == 0
    assert results["fcfs-max-utilization"].num_pauses == 0
    assert results["fcfs-max-utilization"].num_internal_pauses > 0
    for name in ("andes", "tokenflow-paper", "tokenflow-guide"):
        assert results[name].num_pauses > 0, name


def test_settings_of_the_rows_reach_the_engine() -> None:
    engines = {name: row.engine(ENGINE) for name, row in POLICIES.items()}
    assert {e.capacity_policy for e in engines.values()} == {
        "guaranteed_no_evict",
        "max_utilization",
    }
    for name, engine in engines.items():
        engine.config()  # a combination that the product refuses would raise
        assert engine.kv_tiering == ("-tiering" in name and "-no-offload" not in name)
        assert engine.enable_chunked_context == (not name.endswith("-unchunked"))
        assert (engine.num_host_blocks > 0) == (
            name.endswith("-host") or (name.startswith("tokenflow") and "-no-offload" not in name)
        )
        assert engine.has_retention == name.startswith("tokenflow")
    assert not engines["tokenflow-tiering-no-overlap"].overlap_copies
    assert engines["sglang-like-unchunked"].max_num_tokens == ENGINE.max_seq_len
    bare = dataclasses.replace(ENGINE, num_host_blocks=0)
    assert not POLICIES["tokenflow-tiering"].engine(bare).kv_tiering


def test_rows_are_found_by_name() -> None:
    names = ["tokenflow", "fcfs-reserve"]
    assert [row.name for row in policies(names)] == names
    with pytest.raises(ValueError, match="no such policy: 'fcfs'"):
        policies(["tokenflow", "fcfs"])
    assert [row.name for row in HEADLINE] == [
        "fcfs-reserve",
        "fcfs-max-utilization",
        "sglang-like",
        "andes",
        "tokenflow-paper",
        "tokenflow-guide",
        "tokenflow",
    ]
    assert len(ABLATION) == 6


# -- two pools -------------------------------------------------------------------------------------


def alone(num_prompt_tokens: int = 64, max_tokens: int = 10) -> SimRequest:
    return SimRequest(
        arrival_time=0.5, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, read_rate=6.0
    )


def test_disaggregated_one_request_by_hand() -> None:
    """Prefill, first token, 4 blocks over the link, then decode steps without a prefill."""
    engine = dataclasses.replace(ENGINE, response_delays_s=(0.0,), step_per_context_token_s=0.0)
    seq = run([alone()], engine, link_bytes_per_s=8e6).seqs[0]
    prefill_s = engine.step_base_s + 64 / engine.prefill_tokens_per_s
    step_s = engine.step_base_s + engine.step_per_sequence_s
    link_s = 4 * engine.block_bytes / 8e6
    first = 0.5 + prefill_s
    assert seq.token_times == pytest.approx(
        [first, *(first + link_s + step_s * i for i in range(1, 10))]
    )


def test_disaggregated_the_link_takes_one_after_the_other() -> None:
    engine = dataclasses.replace(ENGINE, response_delays_s=(0.0,))
    requests = [alone(), alone()]
    seconds = sorted(s.token_times[1] for s in run(requests, engine, link_bytes_per_s=8e6).seqs)
    assert seconds[1] - seconds[0] >= 0.9 * 4 * engine.block_bytes / 8e6


def test_disaggregated_prefills_are_not_held_up_by_a_full_decode_pool() -> None:
    """Time to the first token is the prefill machine's, whatever waits on the other."""
    result = run(workload(), ENGINE)
    assert result.num_internal_pauses > 0
    num_tokens = sum(request.num_prompt_tokens for request in workload())
    # As many steps of prefill as 128 tokens a step make, and one arrival after the other.
    bound_s = num_tokens / ENGINE.prefill_tokens_per_s + ENGINE.step_base_s * 20 + 0.01 * 20
    assert max(ttft_s(stream) for stream in result.streams()) <= bound_s


def test_a_client_that_leaves_during_the_hand_over_is_cancelled() -> None:
    request = dataclasses.replace(alone(), cancel_after_s=0.2)
    seq = run([request], ENGINE, link_bytes_per_s=8e6).seqs[0]
    assert (seq.end, len(seq.token_times), seq.end_time) == (EndReason.CANCELLED, 1, 0.7)


def turns(*answers: int, **first: float) -> list[SimRequest]:
    """One conversation, 5 s from turn to turn: everything said so far and 31 tokens more. first:
    other values of its first turn."""
    found, num_said = [], 0
    for i, num_answer in enumerate(answers):
        request = SimRequest(
            arrival_time=5.0 * i,
            num_prompt_tokens=num_said + 31,
            max_tokens=num_answer,
            read_rate=20.0,
            conversation=1,
            num_history_tokens=num_said,
        )
        num_said = request.num_prompt_tokens + num_answer
        found.append(request)
    return [dataclasses.replace(found[0], **first), *found[1:]]


@pytest.mark.parametrize(
    "requests",
    [turns(20, 33, 40), turns(1, 20, 1, 9), turns(40, 20, cancel_after_s=0.05)],
    ids=["long-answers", "answers-of-one-token", "the-first-client-leaves"],
)
def test_disaggregated_answers_every_turn_of_a_conversation(requests: list[SimRequest]) -> None:
    seqs = run(requests, ENGINE).seqs
    assert [seq.request for seq in seqs] == requests
    assert {seq.end for seq in seqs[1:]} == {EndReason.LENGTH}
    assert [len(seq.token_times) for seq in seqs[1:]] == [r.max_tokens for r in requests[1:]]


def test_disaggregated_the_prefill_machine_knows_prompts_but_no_answers() -> None:
    """Of the 32 tokens of the first prompt it has two blocks, of the answer nothing."""
    engine = dataclasses.replace(ENGINE, response_delays_s=(0.0,))
    first = SimRequest(arrival_time=0.0, num_prompt_tokens=32, max_tokens=20, conversation=1)
    second = dataclasses.replace(
        first, arrival_time=5.0, num_prompt_tokens=83, num_history_tokens=52
    )
    later = run([first, second], engine).seqs[1]
    prefill_s = engine.step_base_s + (83 - 32) / engine.prefill_tokens_per_s
    assert ttft_s(later.stream) == pytest.approx(prefill_s)
