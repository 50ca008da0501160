"""Reported faults of content at a pause: tokens twice, tokens lost, counts that are off."""

from __future__ import annotations

import dataclasses

import pytest

from tests.core.harness import CONFIG, VOCAB_SIZE, Harness
from tokenflow.inflight.scripts import counting


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_token_in_flight_at_a_pause_comes_once(in_flight: bool) -> None:
    """Reported: the token in flight at preemption comes out twice after the resume.

    A script that counts 1 2 3 … 60, paused after every seventh token, between steps or while the
    next token is computed: each number once, in order.
    """
    h = Harness(dataclasses.replace(CONFIG, max_seq_len=128), script=counting(VOCAB_SIZE))
    handle = h.submit((9, 0), 60)
    paused_at: set[int] = set()
    while h.end_of(handle) is None:
        num_tokens = len(h.tokens_of(handle))
        if num_tokens and num_tokens % 7 == 0 and num_tokens not in paused_at:
            paused_at.add(num_tokens)
            h.pause(handle)
            if in_flight:
                h.begin()
                h.plan()
                h.end()
        h.step()
    assert paused_at == set(range(7, 60, 7))
    assert h.tokens_of(handle) == list(range(1, 61))
    assert h.coordinator.counters.num_resumes == len(paused_at)
    h.expect_nothing_left()


def test_the_prompt_stays_what_it_was_at_a_pause_far_behind_it() -> None:
    """Reported: generated tokens counted twice; after the resume the boundary between prompt and
    output is wrong.

    A prompt of 3 tokens, paused after 50: exactly 10 more tokens, and a usage of 3 and 60.
    """
    h = Harness(dataclasses.replace(CONFIG, max_seq_len=128))
    handle = h.submit((1, 2, 3), 60)
    while len(h.tokens_of(handle)) < 50:
        h.step()
    h.pause(handle)
    h.plan()
    h.step()
    before = h.tokens_of(handle)
    assert len(before) == 50
    h.run_to_empty()
    assert len(h.tokens_of(handle)) - len(before) == 10
    h.expect_whole(handle, (1, 2, 3), 60)
    request = h.executor.requests[max(h.executor.requests)]
    assert (len(request.input_token_ids), request.max_tokens) == (53, 10)
