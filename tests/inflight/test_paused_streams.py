"""Exact output across offload, eviction and onboard, with copies that take many steps."""

from __future__ import annotations

import pytest

from tests.inflight.paces import Timed
from tests.support.paused_streams import (
    STEP_S,
    PausingDrive,
    assert_everything_came_back,
    tiered_config,
)
from tokenflow.clock import ManualClock
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import pseudo_random

VOCAB = 251
NUM_STREAMS, NUM_TOKENS = 8, 29


@pytest.mark.parametrize("kv_tiering", [False, True], ids=["trtllm-rules", "kv-tiering"])
@pytest.mark.parametrize("stagger", [0, 3])
@pytest.mark.parametrize("block_s", [0.0, 0.4 * STEP_S, 1.5 * STEP_S])
def test_eight_streams_paused_at_every_seventh_token(
    kv_tiering: bool, stagger: int, block_s: float
) -> None:
    script, clock = pseudo_random(VOCAB), ManualClock()
    pace = Timed(clock.now, clock.advance, block_s)
    runner = ScriptedRunner(script, VOCAB, step_s=STEP_S, sleep=clock.advance, pace=pace)
    prompts = [[(i * 31 + j * (2 * i + 1)) % VOCAB for j in range(5 + 3 * i)] for i in range(8)]
    num_blocks = NUM_STREAMS * -(-(max(map(len, prompts)) + NUM_TOKENS) // 4) + 4
    config = tiered_config(
        num_blocks=num_blocks,
        host_cache_size=3 * num_blocks * runner.kv_block_bytes(4),
        tokens_per_block=4,
        kv_tiering=kv_tiering,
    )
    drive = PausingDrive(
        runner,
        config,
        prompts,
        NUM_TOKENS,
        stagger=stagger,
        pass_time=lambda: clock.advance(STEP_S),
    )
    stats = drive.run()
    assert_everything_came_back(drive, stats)
    for stream, prompt in zip(drive.streams, prompts, strict=True):
        known, expected = list(prompt), []
        for _ in range(NUM_TOKENS):
            token_id, log_prob = script(tuple(known))
            known.append(token_id)
            expected.append((token_id, log_prob))
        assert list(zip(stream.token_ids, stream.log_probs, strict=True)) == expected
