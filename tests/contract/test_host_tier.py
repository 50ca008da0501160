"""KV that left the device for the host and came back gives the same output, on every engine."""

from __future__ import annotations

import time

import pytest

from tests.contract.client import WAIT_S
from tests.contract.conftest import skip_without_tiering
from tests.contract.engines import Engine
from tokenflow.executor.api import (
    FinishReason,
    KvCacheRetentionConfig,
    OutputConfig,
    TokenRangeRetentionConfig,
)

# 40 blocks of 8 on the device; the host holds several times that of either engine's.
TIERS = {
    "batch_scheduler_policy": "max_utilization",
    "kv_cache_host_memory_bytes": 2 << 20,
}
PAUSE_EVERY, NUM_PARTS = 7, 4
# Each part ends like a lease: its KV is worth more than what a request that ended left. So is that
# of the traffic, or it would make room for itself alone.
KEPT = KvCacheRetentionConfig(
    token_range_retention_configs=(
        TokenRangeRetentionConfig(token_start=0, token_end=None, priority=36),
    ),
    decode_retention_priority=36,
)
BOTH = OutputConfig(return_log_probs=True, return_perf_metrics=True)


def _prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 37 + i * (2 * seed + 1)) % 200 + 3 for i in range(num_tokens)]


def _drive_out(client, salt: int, tiering) -> None:
    """Other traffic: twice what the pool holds, one request after the other."""
    for i in range(4):
        prompt = _prompt(100 * salt + i, 160)
        client.run(prompt, 1, kv_cache_retention_config=KEPT)
    if tiering is None:
        return
    tiering.offload([*prompt, 0], 1000)  # a prefetch takes only room that costs no copy
    deadline = time.monotonic() + WAIT_S
    while True:
        location = tiering.locate([*prompt, 0])
        if location.num_copied_blocks == location.num_device_blocks:
            return
        assert time.monotonic() < deadline, "the copies do not end"
        time.sleep(0.001)


@pytest.mark.parametrize("kv_tiering", [False, True], ids=["trtllm-rules", "kv-tiering"])
def test_streams_that_were_on_the_host_go_on_as_if_they_had_stayed(
    engine: Engine, client_with, kv_tiering: bool
) -> None:
    skip_without_tiering(engine, kv_tiering)
    client = client_with(**TIERS, kv_tiering=kv_tiering)
    tiering = client.executor.get_kv_tiering()
    assert (tiering is not None) == kv_tiering
    prompts = [_prompt(seed, 9 + 8 * seed) for seed in range(4)]
    num_tokens = PAUSE_EVERY * NUM_PARTS
    references = [client.run(p, num_tokens, cache_salt_id=client.new_salt()) for p in prompts]
    salt = client.new_salt()
    known = [list(prompt) for prompt in prompts]
    parts: list[list] = [[] for _ in prompts]
    for part in range(NUM_PARTS):
        if part:
            _drive_out(client, part, tiering)
        if part and tiering is not None:
            tiering.prefetch(known[1], salt)
        ids = [
            client.enqueue(
                tokens,
                PAUSE_EVERY,
                cache_salt_id=salt,
                output_config=BOTH,
                kv_cache_retention_config=KEPT,
            )
            for tokens in known
        ]
        client.wait(*ids)
        for i, request_id in enumerate(ids):
            output = client.outputs[request_id]
            assert output.reason is FinishReason.LENGTH, output.error
            metrics = output.final.result.request_perf_metrics
            if part:
                assert metrics.num_reused_tokens == len(known[i]) - 1
                if not engine.tells_partial_blocks:
                    assert metrics.kv_cache_metrics.num_reused_blocks == -(
                        -(len(known[i]) - 1) // 8
                    )
                elif kv_tiering and i == 1:
                    assert metrics.num_onboarded_blocks == 0, "the prefetch did not bring it back"
                else:
                    num_blocks = -(-(len(known[i]) - 1) // 8)
                    assert metrics.num_onboarded_blocks == num_blocks
            known[i] += output.token_ids
            parts[i].append(output)
    for reference, mine in zip(references, parts, strict=True):
        whole = mine[-1]
        whole.token_ids = [t for part in mine for t in part.token_ids]
        whole.log_probs = [p for part in mine for p in part.log_probs]
        assert engine.same(reference, whole)
