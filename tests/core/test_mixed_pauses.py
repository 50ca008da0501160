"""Pauses among starts and ends of others, at the awkward places of a request's life."""

from __future__ import annotations

from dataclasses import replace

from tests.core.harness import CONFIG, ChosenPlanner, Harness
from tokenflow.executor.api import OutputConfig, SamplingConfig
from tokenflow.inflight.scripts import expected, fixed
from tokenflow.types import EndReason, SessionState

S = SessionState
ROOMY = replace(CONFIG, max_batch_size=8, max_tokens_in_paged_kv_cache=512, max_num_tokens=64)


def planner_of(h: Harness) -> ChosenPlanner:
    assert isinstance(h.planner, ChosenPlanner)
    return h.planner


def test_odd_ones_are_paused_even_ones_end_others_come() -> None:
    """No index of a batch survives a change of the batch."""
    h = Harness(ROOMY)
    lengths = {n: 30 if n % 2 else 12 for n in range(8)}
    first = {n: h.submit((n, n + 1, n + 2), lengths[n]) for n in lengths}
    while len(h.tokens_of(first[7])) < 8:
        h.step()
    planner_of(h).hold_paused = True
    for n in (1, 3, 5, 7):
        h.pause(first[n])
    while any(h.state(first[n]) for n in (0, 2, 4, 6)):
        h.step()
    others = {n: h.submit((n, n, n), 25) for n in (20, 30, 40, 50)}
    h.step()
    h.step()
    planner_of(h).hold_paused = False
    h.run_to_empty()
    for n, handle in first.items():
        h.expect_whole(handle, (n, n + 1, n + 2), lengths[n])
    for n, handle in others.items():
        h.expect_whole(handle, (n, n, n), 25)
    h.expect_nothing_left()


def test_a_resume_that_yields_no_token_is_a_stop() -> None:
    """Paused exactly after the last token before the end token."""
    end_id, prompt = 96, (1, 2, 3)
    script = fixed(range(10, 20), len(prompt), then=end_id)
    h = Harness(script=script)
    handle = h.submit(prompt, 30, end_id=end_id)
    other = h.submit((4, 5, 6), 20)
    while len(h.tokens_of(handle)) < 10:
        h.step()
    h.begin()
    h.pause(handle)
    h.plan()
    h.end()
    if h.state(handle) is None:  # the end token was in the step in flight
        handle = h.submit(prompt, 30, end_id=end_id)
        while len(h.tokens_of(handle)) < 10:
            h.step()
        h.pause(handle)
    h.run_to_empty()
    assert h.end_of(handle) is EndReason.STOP
    assert h.tokens_of(handle) == list(range(10, 20))
    assert h.tokens_of(other) == expected(script, (4, 5, 6), 20)[0]
    h.expect_nothing_left()


def test_a_pause_of_a_short_prompt_after_many_tokens_keeps_the_count() -> None:
    h = Harness(replace(CONFIG, max_seq_len=128))
    handle = h.submit((1, 2, 3), 60)
    while len(h.tokens_of(handle)) < 50:
        h.step()
    h.pause(handle)
    h.run_to_empty()
    h.expect_whole(handle, (1, 2, 3), 60)
    assert h.executor.requests[2].max_tokens == 10


def test_a_hold_before_the_first_token_keeps_every_log_prob() -> None:
    h = Harness(replace(CONFIG, max_num_tokens=16))
    prompt = tuple(range(1, 31))
    handle = h.submit(prompt, 30)
    h.step()
    assert h.state(handle) is S.PREFILLING
    h.coordinator.hold(handle, h.now)
    while h.state(handle) is not S.PREEMPTED:
        h.step()
    assert len(h.tokens_of(handle)) == 1
    h.coordinator.release(handle, h.now)
    h.run_to_empty()
    h.expect_whole(handle, prompt, 30)


def test_every_optional_field_is_there_after_a_pause() -> None:
    h = Harness(replace(CONFIG, max_seq_len=128))
    fields: dict[str, object] = {
        "sampling_config": SamplingConfig(
            temperature=0.5, top_k=3, top_p=0.9, seed=4, min_tokens=8, min_p=0.1,
            repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1,
            prompt_ignore_length=2,
        ),
        "end_id": 95, "stop_words": ((1, 2, 3, 4),), "bad_words": ((94,), (5, 6)),
        "embedding_bias": ((3, 0.5),), "priority": 0.9, "read_rate": 4.0, "cache_salt_id": 7,
        "timeout_s": 1000.0,
    }  # fmt: skip
    alone = h.submit((1, 2, 3), 40, **fields)
    h.run_to_empty()
    paused = h.submit((1, 2, 3), 40, **fields)
    while len(h.tokens_of(paused)) < 10:
        h.step()
    h.pause(paused)
    h.run_to_empty()
    assert h.tokens_of(paused) == h.tokens_of(alone)
    assert h.end_of(paused) is h.end_of(alone)
    assert h.executor.requests[3].output_config == OutputConfig(
        return_log_probs=True, return_perf_metrics=True
    )
    h.expect_nothing_left()
