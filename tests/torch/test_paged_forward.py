"""The paged forward gives what transformers' dense forward gives, whatever the paging."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.driving import Blocks, Dense, Sequence, assert_rows_close
from tokenflow.inflight.runner import BlockCopy, SequenceChunk
from tokenflow.inflight.torch_attention import padded_blocks
from tokenflow.inflight.torch_runner import TorchRunner

pytestmark = pytest.mark.torch


@functools.cache
def _runner(path: Path) -> TorchRunner:
    return TorchRunner(path, dtype="float32", num_threads=1)


@functools.cache
def _dense(path: Path) -> Dense:
    return Dense(path)


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def _check_side_by_side(
    path: Path, lengths: list[int], chunk_lengths: list[int], prompt_shares: list[float], size: int
) -> None:
    """Run sequences side by side, each in chunks of its own up to its prompt's end, then token by
    token; every chunk's last row is compared."""
    runner, dense = _runner(path), _dense(path)
    blocks = Blocks(runner, sum(-(-n // size) for n in lengths), size)
    sequences = [
        Sequence(i, _tokens(i, n, runner.vocab_size), blocks) for i, n in enumerate(lengths)
    ]
    got: list[list[tuple[int, torch.Tensor]]] = [[] for _ in sequences]
    while any(s.num_computed < len(s.token_ids) for s in sequences):
        running = [s for s in sequences if s.num_computed < len(s.token_ids)]
        chunks = []
        for s in running:
            left = int(len(s.token_ids) * prompt_shares[s.request_id]) - s.num_computed
            chunks.append(s.chunk(max(1, min(left, chunk_lengths[s.request_id]))))
        for s, row in zip(running, runner.logits(chunks), strict=True):
            got[s.request_id].append((s.num_computed - 1, row))
    for s in sequences:
        reference = dense.logits(s.token_ids)
        positions = [position for position, _ in got[s.request_id]]
        assert_rows_close(torch.stack([r for _, r in got[s.request_id]]), reference[positions])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@settings(max_examples=15, deadline=None)
@given(
    data=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 48), st.floats(0, 1)), min_size=1, max_size=5
    ),
    size=st.sampled_from([1, 3, 8, 32]),
)
def test_any_mix_of_chunks_equals_dense(
    tiny_model: Callable[[str], Path], family: str, data: list[tuple[int, int, float]], size: int
) -> None:
    lengths, chunk_lengths, shares = (list(column) for column in zip(*data, strict=True))
    _check_side_by_side(tiny_model(family), lengths, chunk_lengths, shares, size)


@pytest.mark.smollm
def test_smollm_mixed_prefill_and_decode_equals_dense(smollm_path: Path) -> None:
    _check_side_by_side(smollm_path, [130, 50, 90, 16], [48, 50, 20, 1], [0.9, 0.8, 0.9, 0.5], 32)


def _check_reuse(path: Path) -> None:
    """B shares A's full blocks and a copy of half of A's next block, then goes its own way."""
    size = 8
    runner, dense = _runner(path), _dense(path)
    blocks = Blocks(runner, 12, size)
    a = Sequence(0, _tokens(0, 30, runner.vocab_size), blocks)
    runner.logits([a.chunk(30)])
    b = Sequence(1, a.token_ids[:20] + _tokens(9, 14, runner.vocab_size), blocks)
    (copied,) = blocks.take(1)
    runner.copy_blocks([BlockCopy(source=a.block_ids[2], target=copied, num_tokens=4)])
    b.block_ids, b.num_computed = [*a.block_ids[:2], copied], 20
    a.token_ids += _tokens(11, 2, runner.vocab_size)
    # A decodes in the blocks that B shares a prefix of, while B prefills in chunks.
    first = runner.logits([a.chunk(1), b.chunk(9)])
    second = runner.logits([b.chunk(5), a.chunk(1)])
    reference_a, reference_b = dense.logits(a.token_ids), dense.logits(b.token_ids)
    assert_rows_close(first, torch.stack([reference_a[30], reference_b[28]]))
    assert_rows_close(second, torch.stack([reference_b[33], reference_a[31]]))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shared_blocks_and_a_copied_partial_block_equal_dense(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    _check_reuse(tiny_model(family))


@pytest.mark.smollm
def test_smollm_shared_and_copied_blocks_equal_dense(smollm_path: Path) -> None:
    _check_reuse(smollm_path)


def test_a_fresh_pool_pads_with_finite_values(tiny_model: Callable[[str], Path]) -> None:
    runner, dense = _runner(tiny_model("llama")), _dense(tiny_model("llama"))
    runner.allocate_kv(4, 8, 0)
    token_ids = _tokens(0, 4, runner.vocab_size)
    prefill = runner.logits([SequenceChunk(0, token_ids[:3], 0, [2], True, 0)])
    decode = runner.logits([SequenceChunk(0, token_ids[3:], 3, [2], True, 1)])
    assert_rows_close(torch.cat([prefill, decode]), dense.logits(token_ids)[2:])


def test_block_copies_are_made_in_order(tiny_model: Callable[[str], Path]) -> None:
    runner = _runner(tiny_model("llama"))
    Blocks(runner, 4, 4)
    token_ids = _tokens(0, 5, runner.vocab_size)
    runner.logits([SequenceChunk(0, token_ids[:4], 0, [0], False, 0)])
    runner.copy_blocks([BlockCopy(0, 1, 4), BlockCopy(1, 2, 4)])
    here = runner.logits([SequenceChunk(0, token_ids[4:], 4, [0, 3], True, 0)])
    there = runner.logits([SequenceChunk(0, token_ids[4:], 4, [2, 3], True, 0)])
    assert torch.equal(here, there)


def test_rows_come_in_chunk_order_and_only_where_sampled(
    tiny_model: Callable[[str], Path],
) -> None:
    runner, dense = _runner(tiny_model("llama")), _dense(tiny_model("llama"))
    blocks = Blocks(runner, 8, 8)
    sequences = [Sequence(i, _tokens(i, 12, runner.vocab_size), blocks) for i in range(3)]
    runner.logits([sequences[1].chunk(11, samples=False)])
    rows = runner.logits(
        [sequences[0].chunk(12), sequences[1].chunk(1), sequences[2].chunk(12, samples=False)]
    )
    assert_rows_close(rows, torch.stack([dense.logits(s.token_ids)[11] for s in sequences[:2]]))
    silent = SequenceChunk(2, sequences[2].token_ids, 0, sequences[2].block_ids, False, 0)
    assert runner.logits([silent]).shape == (0, runner.vocab_size)
    assert runner.forward([silent]).token_ids == []


@given(num_tokens=st.integers(1, 100_000), size=st.sampled_from([1, 16, 32, 100, 128]))
def test_padding_covers_the_history_and_stays_small(num_tokens: int, size: int) -> None:
    padded = padded_blocks(num_tokens, size) * size
    assert num_tokens <= padded < num_tokens + max(64, num_tokens / 4) + size
