"""Output across offload, eviction and onboard against the uninterrupted output, on real models.

The promise is that of test_determinism.py: float32 equal up to near ties, bfloat16 with KV kept and
the same chunks equal. Eight streams at once, each paused at every seventh token and driven off the
device in between; nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paused_streams import (
    PausingDrive,
    assert_everything_came_back,
    tiered_config,
)
from tests.torch.driving import Blocks, Generated, assert_same_generation, generate
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.torch_runner import TorchRunner

pytestmark = pytest.mark.torch
NUM_STREAMS = 8
TOKENS_PER_BLOCK = 16
MODES = pytest.mark.parametrize("kv_tiering", [False, True], ids=["trtllm-rules", "kv-tiering"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def _prompts(vocab_size: int, step: int) -> list[list[int]]:
    """Different lengths, so that pauses come at every place of a block; no beginning shared."""
    return [
        [3 + (i * 131 + j * (7 + i)) % (vocab_size - 3) for j in range(9 + step * i)]
        for i in range(NUM_STREAMS)
    ]


def _uninterrupted(
    runner: TorchRunner, prompts: list[list[int]], num_tokens: int, dtype: str
) -> list[Generated]:
    blocks = Blocks(runner, NUM_STREAMS * 5, TOKENS_PER_BLOCK)
    return generate(runner, blocks, prompts, num_tokens, with_margins=dtype == "float32")


def _paused(
    runner: TorchRunner,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    kv_tiering: bool,
    stagger: int,
) -> tuple[PausingDrive, KvTierStats]:
    per_stream = -(-(max(map(len, prompts)) + num_tokens) // TOKENS_PER_BLOCK)
    num_blocks = NUM_STREAMS * per_stream + 4
    config = tiered_config(
        num_blocks=num_blocks,
        host_cache_size=3 * num_blocks * runner.kv_block_bytes(TOKENS_PER_BLOCK),
        tokens_per_block=TOKENS_PER_BLOCK,
        kv_tiering=kv_tiering,
    )
    drive = PausingDrive(runner, config, prompts, num_tokens, stagger=stagger)
    try:
        return drive, drive.run()
    finally:
        runner.transport.close()


def _check(
    runner: TorchRunner, prompts: list[list[int]], num_tokens: int, dtype: str, **how: object
) -> None:
    references = _uninterrupted(runner, prompts, num_tokens, dtype)
    drive, stats = _paused(runner, prompts, num_tokens, **how)
    assert_everything_came_back(drive, stats)
    results = [Generated(s.token_ids, s.log_probs) for s in drive.streams]
    if dtype == "bfloat16":
        assert [r.token_ids for r in results] == [r.token_ids for r in references]
    else:
        num_compared = sum(map(assert_same_generation, references, results))
        assert num_compared > NUM_STREAMS * num_tokens * 3 // 4


@MODES
@DTYPES
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "one-by-one"])
def test_tiny_model(
    tiny_model: Callable[[str], Path], kv_tiering: bool, dtype: str, stagger: int
) -> None:
    runner = TorchRunner(tiny_model("llama"), dtype=dtype, num_threads=1)
    prompts = _prompts(runner.vocab_size, 6)
    _check(runner, prompts, 26, dtype, kv_tiering=kv_tiering, stagger=stagger)


@pytest.mark.smollm
@MODES
@DTYPES
def test_smollm(smollm_path: Path, kv_tiering: bool, dtype: str) -> None:
    runner = TorchRunner(smollm_path, dtype=dtype, num_threads=1)
    prompts = _prompts(runner.vocab_size, 3)
    _check(runner, prompts, 15, dtype, kv_tiering=kv_tiering, stagger=0)
