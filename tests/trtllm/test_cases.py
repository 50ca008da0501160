"""Faults that were reported of others, on the adapter: docs/cases.md names these tests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.contract.client import Client
from tests.contract.stories import Story, run_stories
from tests.trtllm.conftest import VOCAB, Starter
from tests.trtllm_double.folder import Behind
from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.executor.api import FinishReason, OutputConfig, SamplingConfig
from tokenflow.types import GenerateRequest

FAST = Behind(vocab_size=VOCAB, script="pseudo_random")
COUNTING = Behind(vocab_size=VOCAB)
WITH_LOG_PROBS = OutputConfig(return_log_probs=True)


def _client(start: Starter, behind: Behind = FAST, **limits: Any) -> Client:
    """On an engine that was built for `limits`; its pool holds whole batches."""
    build = ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block")
    folder = start.folder(behind, **{k: v for k, v in limits.items() if k in build})
    pool = limits.get("max_batch_size", 4) * limits.get("max_seq_len", 256)
    executor = start.executor(folder=folder, **{"max_tokens_in_paged_kv_cache": pool, **limits})
    return Client(executor)


def _reference(client: Client, prompt: Any, max_tokens: int, **fields: Any) -> list[int]:
    salt = client.new_salt()
    return client.run(prompt, max_tokens, cache_salt_id=salt, **fields).token_ids


def _is_idle(client: Client) -> bool:
    """Nothing is left of a request, and the next one is served."""
    assert client.run((9, 9), 4).reason is FinishReason.LENGTH
    client.until(lambda: client.stats and client.stats[-1].num_active_requests == 0)
    pool = client.stats[-1].kv_cache_stats
    return len(client.executor._live) == 0 and pool.free_num_blocks == pool.max_num_blocks


def test_case_032_a_prompt_over_the_budget_is_an_error_of_its_own(start: Starter) -> None:
    behind = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.002)
    client = _client(start, behind, max_batch_size=5, max_num_tokens=512, max_seq_len=1024,
                     enable_chunked_context=False)  # fmt: skip
    streams = [client.enqueue((i, 1, 2), 40) for i in range(4)]
    client.wait_tokens(streams[-1], 2)
    error = client.run([i % VOCAB for i in range(513)], 4).error
    assert "(513) exceeds maximum input length (512)" in error
    client.wait(*streams)
    for i, request_id in enumerate(streams):
        assert client.outputs[request_id].token_ids == _reference(client, (i, 1, 2), 40)


def test_case_033_after_over_long_prompts_others_are_answered(start: Starter) -> None:
    client = _client(start, max_num_tokens=512, max_seq_len=2561)
    for _ in range(3):
        assert "2715" in client.run([i % VOCAB for i in range(2715)], 4).error
    for i in range(5):
        assert client.run((i, 2), 4).reason is FinishReason.LENGTH
    assert _is_idle(client)


@pytest.mark.parametrize("streaming", [True, False])
def test_case_034_lengths_at_the_limit(start: Starter, streaming: bool) -> None:
    client = _client(start, max_seq_len=64)
    prompt = list(range(65))
    for num_prompt, num_tokens in ((62, 2), (63, 1)):
        output = client.run(prompt[:num_prompt], 4, streaming=streaming)
        assert len(output.token_ids) == num_tokens
        assert output.reason is FinishReason.LENGTH
    for num_prompt in (64, 65):
        error = client.run(prompt[:num_prompt], 4, streaming=streaming).error
        assert f"({num_prompt}) exceeds maximum input length (63)" in error


def test_case_035_more_than_the_limit_is_lowered_to_it(start: Starter) -> None:
    client = _client(start, COUNTING, max_batch_size=1, max_num_tokens=4096, max_seq_len=8192,
                     tokens_per_block=32)  # fmt: skip
    output = client.run([i % VOCAB for i in range(6973)], 4095)
    assert (len(output.token_ids), output.reason) == (1219, FinishReason.LENGTH)


def test_case_048_cancelling_streams_with_log_probs(start: Starter) -> None:
    client = _client(start, Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.001))
    for _ in range(50):
        request_id = client.enqueue((1, 2), 200, output_config=WITH_LOG_PROBS)
        client.wait_tokens(request_id, 5)
        client.executor.cancel_request(request_id)
        output = client.wait(request_id)
        assert output.reason is FinishReason.CANCELLED
        assert len(output.log_probs) == len(output.token_ids)
    assert _is_idle(client)


def test_case_049_cancels_of_unknown_finished_and_cancelled_requests(start: Starter) -> None:
    client = _client(start, Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.002))
    finished = client.enqueue((1, 2), 3)
    client.wait(finished)
    client.executor.cancel_request(10**9)
    client.executor.cancel_request(finished)
    running = client.enqueue((1, 2), 200)
    client.executor.cancel_request(running)
    client.executor.cancel_request(running)
    client.wait_tokens(running, 1)
    client.executor.cancel_request(running)
    assert client.wait(running).reason is FinishReason.CANCELLED
    assert _is_idle(client), "one final response, else the client would have complained"


def test_case_050_late_stops_leave_no_line_and_no_state(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    client = _client(start)
    with caplog.at_level(logging.INFO):
        for i in range(100):
            request_id = client.enqueue((i, 2), 2)
            client.wait(request_id)
            client.executor.cancel_request(request_id)
    assert caplog.records == []
    assert _is_idle(client)


def _story(client: Client, pauses: Any, num_tokens: int = 400, **fields: Any) -> Story:
    request = GenerateRequest(
        **{
            "request_id": "r",
            "arrival_time": 0.0,
            "input_token_ids": (1, 2, 3),
            "max_tokens": num_tokens,
            "output_config": WITH_LOG_PROBS,
            "cache_salt_id": client.new_salt(),
            **fields,
        }
    )
    return Story(client, request, pauses)


def test_case_091_two_hundred_pauses_of_one_request(start: Starter) -> None:
    client = _client(start, COUNTING, max_seq_len=512)
    whole, paused = run_stories(client, [_story(client, ()), _story(client, range(1, 400, 2))])
    assert paused.token_ids == whole.token_ids
    assert paused.log_probs == whole.log_probs
    assert len(whole.token_ids) == 400
    assert _is_idle(client)


def test_case_092_every_field_is_carried_over_a_resume(start: Starter) -> None:
    pytest.importorskip("torch")
    client = _client(start, Behind(vocab_size=VOCAB, runner="logits"))
    plain = _reference(client, (1, 2, 3), 40)
    fields = {
        "num_tokens": 40,
        "sampling_config": SamplingConfig(
            top_k=1, temperature=0.5, seed=3, min_tokens=25, repetition_penalty=1.2,
            presence_penalty=0.5, frequency_penalty=0.25, prompt_ignore_length=2,
            no_repeat_ngram_size=3, min_p=0.1,
        ),
        "end_id": plain[20],
        "stop_words": ((7, 7, 7), (8, 8, 9)),
        "bad_words": ((plain[3],), (plain[8], plain[9])),
        "embedding_bias": ((plain[5], -4.0), (11, 0.5)),
        "priority": 0.9,
    }  # fmt: skip
    whole, paused = run_stories(
        client, [_story(client, (), **fields), _story(client, (10,), **fields)]
    )
    assert (paused.token_ids, paused.log_probs) == (whole.token_ids, whole.log_probs)
    assert whole.token_ids != plain
    assert len(whole.token_ids) >= 25


def test_case_093_odd_ones_are_paused_even_ones_end_others_come(start: Starter) -> None:
    client = _client(start, max_batch_size=8)
    first = [
        _story(client, (10,) if i % 2 else (), 40 if i % 2 else 12, input_token_ids=(i + 1, 5))
        for i in range(8)
    ]
    run_stories(client, first[::2])
    others = [_story(client, (), 40, input_token_ids=(i + 100, 5)) for i in range(4)]
    outputs = [*run_stories(client, [*first[1::2], *others]), *(s.result for s in first[::2])]
    prompts = [(i + 1, 5) for i in range(1, 8, 2)] + [(i + 100, 5) for i in range(4)]
    prompts += [(i + 1, 5) for i in range(0, 8, 2)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == _reference(client, prompt, len(output.token_ids))
    assert [len(output.token_ids) for output in outputs] == [40] * 8 + [12] * 4


def test_case_107_requests_of_the_default_length_run_side_by_side(start: Starter) -> None:
    default = ServingConfig().default_max_tokens
    client = _client(start, Behind(vocab_size=VOCAB, step_s=0.001), max_batch_size=8)
    ids = [client.enqueue((i, 2), default) for i in range(8)]
    client.wait(*ids)
    num_together = [s.inflight_batching_stats.num_gen_requests for s in client.stats]
    assert max(num_together) >= 2
    assert all(len(client.outputs[i].token_ids) == default for i in ids)


def test_case_115_six_long_prompts_at_once(start: Starter) -> None:
    client = _client(start, max_batch_size=6, max_num_tokens=8192, max_seq_len=4096,
                     tokens_per_block=32)  # fmt: skip
    prompts = [[(i + 7 * k) % VOCAB for k in range(3000)] for i in range(6)]
    ids = client.enqueue_together([client.request(prompt, 4) for prompt in prompts])
    client.wait(*ids)
    assert [client.outputs[i].reason for i in ids] == [FinishReason.LENGTH] * 6


def test_case_118_the_same_requests_again_with_a_large_host(start: Starter) -> None:
    client = _client(start, tokens_per_block=32, max_tokens_in_paged_kv_cache=128,
                     kv_cache_host_memory_bytes=1 << 30)  # fmt: skip
    prompts = [[(3 * i + k) % VOCAB for k in range(60)] for i in range(8)]
    first = [client.run(prompt, 8).token_ids for prompt in prompts]
    again = [client.run(prompt, 8).token_ids for prompt in prompts]
    assert again == first
    tiers = client.stats[-1].kv_tier_stats
    assert tiers.num_onboards_completed > 0
    assert tiers.num_device_cached_blocks + tiers.num_device_used_blocks <= 4


def test_case_119_a_host_size_that_holds_no_block_is_said(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    block = 32 * 1024
    for num_bytes, num_blocks in ((block - 1, 0), (0, 0), (5 * block, 5)):
        caplog.clear()
        client = _client(start, tokens_per_block=32, kv_cache_host_memory_bytes=num_bytes)
        assert client.executor.num_host_blocks == num_blocks
        said = "kv_cache_host_memory_bytes: 32767 bytes hold no KV block" in caplog.text
        assert said == (num_bytes == block - 1)


def test_case_145_two_engines_on_one_gpu_are_refused_or_planned(start: Starter) -> None:
    behind = Behind(vocab_size=VOCAB, script="pseudo_random", free_gpu_memory_bytes=1 << 20)
    first = start.executor(behind, max_tokens_in_paged_kv_cache=0)
    for pool in (0, 320):
        with pytest.raises(ConfigError, match="gpu_device_ids: GPU 0 has an engine already"):
            start.executor(behind, max_tokens_in_paged_kv_cache=pool)
    other = start.executor(behind, max_tokens_in_paged_kv_cache=0, gpu_device_ids="1")
    for executor in (first, other):
        executor.shutdown()
    sizes = ((160, 3), (320, 7))
    pair = [
        Client(
            start.executor(
                behind,
                max_tokens_in_paged_kv_cache=num_tokens,
                kv_cache_host_memory_bytes=num_host * 8192,
            )
        )
        for num_tokens, num_host in sizes
    ]
    ids = [client.enqueue((5, 6), 20) for client in pair]
    outputs = [client.wait(i) for client, i in zip(pair, ids, strict=True)]
    assert outputs[0].token_ids == outputs[1].token_ids
    for client, (num_tokens, num_host) in zip(pair, sizes, strict=True):
        client.until(lambda client=client: client.stats)
        tiers = client.stats[-1].kv_tier_stats
        assert (tiers.num_device_blocks, tiers.num_host_blocks) == (num_tokens // 8, num_host)
