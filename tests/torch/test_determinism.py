"""What may be promised of generated tokens when batches, pauses and recomputation differ.

float32: ids equal up to the first near tie of the reference (top-2 margin < 1e-3), log-probs
within 1e-3. bfloat16: equal ids when KV is kept and the chunks of the sequence are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.torch.driving import Blocks, Generated, Sequence, assert_same_generation, generate
from tests.torch.driving import request as make_request
from tokenflow.inflight.torch_runner import TorchRunner

pytestmark = pytest.mark.torch


@functools.cache
def _runner(path: Path, dtype: str) -> TorchRunner:
    return TorchRunner(path, dtype=dtype, num_threads=1)


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, vocab_size, (5 + 7 * i,), generator=generator).tolist()
        for i in range(count)
    ]


def _alone(
    runner: TorchRunner, blocks: Blocks, prompts: list[list[int]], count: int
) -> list[Generated]:
    return [generate(runner, blocks, [prompt], count, with_margins=True)[0] for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_run_is_bit_equal(tiny_model: Callable[[str], Path], dtype: str) -> None:
    runner = _runner(tiny_model("llama"), dtype)
    blocks = Blocks(runner, 64, 16)
    prompts = _prompts(4, runner.vocab_size)
    assert generate(runner, blocks, prompts, 12) == generate(runner, blocks, prompts, 12)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_float32_alone_in_a_batch_and_recomputed(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    runner = _runner(tiny_model(family), "float32")
    blocks = Blocks(runner, 96, 16)
    prompts = _prompts(8, runner.vocab_size)
    alone = _alone(runner, blocks, prompts, 24)
    together = generate(runner, blocks, prompts, 24)
    recomputed = generate(runner, blocks, prompts, 24, recompute_every=7)
    assert sum(map(assert_same_generation, alone, together)) > 96
    assert sum(map(assert_same_generation, alone, recomputed)) > 96


@pytest.mark.smollm
def test_smollm_float32_in_a_batch_and_recomputed(smollm_path: Path) -> None:
    runner = _runner(smollm_path, "float32")
    blocks = Blocks(runner, 32, 32)
    prompts = [[1, 4093, 198, 9531 + i, 2, 198, 1, 520, 9531, 198] for i in range(3)]
    alone = _alone(runner, blocks, prompts[:1], 12)
    recomputed = generate(runner, blocks, prompts, 12, recompute_every=7)
    assert assert_same_generation(alone[0], recomputed[0]) > 7


def _paused_beside_others(
    runner: TorchRunner, blocks: Blocks, prompt: list[int], count: int, pauses: set[int]
) -> list[int]:
    """Greedy ids of `prompt` while newcomers prefill and decode beside it and, before the token
    indices in `pauses`, it sits out a step with its KV kept."""
    runner.add_request(0, make_request())
    runner.add_request(1, make_request())
    ours = Sequence(0, list(prompt), blocks)
    ids: list[int] = []
    for index in range(count):
        other = Sequence(1, [(7 * index + j) % 300 + 3 for j in range(20 + 5 * index)], blocks)
        if index in pauses:
            runner.forward([other.chunk(5)])
        beside = other.chunk(len(other.token_ids) - other.num_computed)
        mine = ours.chunk(len(ours.token_ids) - ours.num_computed, True, index)
        token_id = runner.forward([beside, mine]).token_ids[1]
        ours.token_ids.append(token_id)
        ids.append(token_id)
        blocks.free += other.block_ids
    runner.remove_request(0)
    runner.remove_request(1)
    blocks.free += ours.block_ids
    return ids


def test_bfloat16_resume_with_kept_kv_beside_others(tiny_model: Callable[[str], Path]) -> None:
    runner = _runner(tiny_model("llama"), "bfloat16")
    blocks = Blocks(runner, 64, 16)
    for prompt in _prompts(4, runner.vocab_size):
        (alone,) = generate(runner, blocks, [prompt], 20)
        beside = _paused_beside_others(runner, blocks, prompt, 20, {3, 8, 9, 15})
        assert beside == alone.token_ids


@pytest.mark.smollm
def test_smollm_bfloat16_resume_with_kept_kv_beside_others(smollm_path: Path) -> None:
    runner = _runner(smollm_path, "bfloat16")
    blocks = Blocks(runner, 32, 32)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    (alone,) = generate(runner, blocks, [prompt], 10)
    assert _paused_beside_others(runner, blocks, prompt, 10, {2, 7}) == alone.token_ids
