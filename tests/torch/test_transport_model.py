"""Offload, loss of the device blocks and onboard into others do not show in a single bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.torch.driving import Blocks, Sequence
from tokenflow.errors import CapacityError
from tokenflow.inflight.runner import CopyDirection, SequenceChunk, TierCopy
from tokenflow.inflight.torch_runner import TorchRunner

pytestmark = pytest.mark.torch

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD
SIZE = 8
NUM_DEVICE_BLOCKS = 40
NUM_HOST_BLOCKS = 16


@contextmanager
def opened(
    path: Path, dtype: str, size: int = SIZE, num_blocks: int = NUM_DEVICE_BLOCKS
) -> Iterator[tuple[TorchRunner, Blocks]]:
    """A runner with both pools; closed at the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = TorchRunner(path, device, dtype, num_threads=1)
    blocks = Blocks(runner, num_blocks, size, NUM_HOST_BLOCKS)
    try:
        yield runner, blocks
    finally:
        runner.transport.close()
    assert "kv-copies" not in {thread.name for thread in threading.enumerate()}


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def _lengths(count: int) -> list[int]:
    """Chunks of a sequence: two prefills, then one by one."""
    return [19, 14, *[1] * (count - 33)]


def _run(runner: TorchRunner, sequence: Sequence, lengths: list[int]) -> list[torch.Tensor]:
    return [runner.logits([sequence.chunk(n)]) for n in lengths]


def _swap_out_and_in(runner: TorchRunner, blocks: Blocks, sequence: Sequence, host: int) -> None:
    """Copy to the host from block `host` on, ruin the device blocks, copy back into others."""
    old = sequence.block_ids
    out = [TierCopy(block, host + i) for i, block in enumerate(old)]
    transfer = runner.transport.start(OFFLOAD, out)
    transfer.wait()
    assert transfer.error is None
    rubbish = [3] * (len(old) * blocks.tokens_per_block)
    runner.logits([SequenceChunk(-1, rubbish, 0, old, False, 0)])
    new = blocks.take(len(old))
    transfer = runner.transport.start(
        ONBOARD, [TierCopy(block, copy.host_block) for block, copy in zip(new, out, strict=True)]
    )
    transfer.wait()
    assert transfer.error is None
    blocks.free += old
    sequence.block_ids = new


def _check_swaps(path: Path, dtype: str, size: int, num_tokens: int) -> None:
    num_blocks = 2 * -(-num_tokens // size) + 1
    with opened(path, dtype, size, num_blocks) as (runner, blocks):
        token_ids = _tokens(0, num_tokens, runner.vocab_size)
        lengths = _lengths(len(token_ids))
        sequence = Sequence(0, token_ids, blocks)
        want = _run(runner, sequence, lengths)
        blocks.free += sequence.block_ids
        sequence = Sequence(1, token_ids, blocks)
        got = []
        for step, length in enumerate(lengths):
            got.append(runner.logits([sequence.chunk(length)]))
            if step % 7 == 1:
                _swap_out_and_in(runner, blocks, sequence, host=step % 5)
        assert torch.equal(torch.cat(got), torch.cat(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_going_on_from_the_host_is_bit_equal(
    tiny_model: Callable[[str], Path], family: str, dtype: str
) -> None:
    _check_swaps(tiny_model(family), dtype, SIZE, 54)


@pytest.mark.smollm
def test_smollm_going_on_from_the_host_is_bit_equal(smollm_path: Path) -> None:
    _check_swaps(smollm_path, "bfloat16", 32, 44)


def test_transfers_beside_steps_change_nothing(tiny_model: Callable[[str], Path]) -> None:
    with opened(tiny_model("llama"), "bfloat16") as (runner, blocks):
        token_ids = _tokens(0, 90, runner.vocab_size)
        lengths = _lengths(len(token_ids))
        # Block 0 pads the histories of all others, so let it be a target too.
        blocks.free.append(blocks.free.pop(blocks.free.index(0)))
        spare = blocks.take(5)
        kept = Sequence(0, _tokens(1, 40, runner.vocab_size), blocks)
        runner.logits([kept.chunk(40)])
        sequence = Sequence(2, token_ids, blocks)
        want = _run(runner, sequence, lengths)
        blocks.free += sequence.block_ids
        sequence = Sequence(3, token_ids, blocks)
        transport = runner.transport
        transport.start(OFFLOAD, [TierCopy(b, i) for i, b in enumerate(kept.block_ids)]).wait()
        got, transfers = [], []
        for length in lengths:
            for _ in range(4):
                there = [TierCopy(block, 5 + i) for i, block in enumerate(kept.block_ids)]
                back = [TierCopy(block, i) for i, block in enumerate(spare)]
                transfers.append(transport.start(OFFLOAD, there))
                transfers.append(transport.start(ONBOARD, back))
            got.append(runner.logits([sequence.chunk(length)]))
        assert torch.equal(torch.cat(got), torch.cat(want))
        for transfer in transfers:
            transfer.wait()
        assert not any(transfer.error for transfer in transfers)
        # What came back in `spare` is what went.
        tail = _tokens(4, 3, runner.vocab_size)
        last = blocks.take(1)
        here = runner.logits([SequenceChunk(0, tail, 40, kept.block_ids + last, True, 0)])
        there = runner.logits([SequenceChunk(0, tail, 40, spare + last, True, 0)])
        assert torch.equal(here, there)


def test_block_bytes_are_those_of_the_pool(tiny_model: Callable[[str], Path]) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        with opened(tiny_model("llama"), dtype) as (runner, _):
            sizes[dtype] = runner.kv_block_bytes(SIZE)
            assert runner.kv_bytes().shape == (NUM_DEVICE_BLOCKS, sizes[dtype])
            assert runner.kv_block_bytes(2 * SIZE) == 2 * sizes[dtype]
    assert sizes["float32"] == 2 * sizes["bfloat16"]


def test_a_host_pool_that_memory_cannot_hold_is_a_capacity_error(
    tiny_model: Callable[[str], Path],
) -> None:
    runner = TorchRunner(tiny_model("llama"), num_threads=1)
    with pytest.raises(CapacityError, match="kv_cache_host_memory_bytes: no memory"):
        runner.allocate_kv(1, 32, 1 << 40)
