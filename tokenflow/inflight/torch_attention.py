"""Attention over paged KV for transformers' decoder models.

Owns the KV pool of the torch runner, the packing of a step's chunks into one forward, and the
attention function that transformers calls in every layer. The batch travels to that function as
a keyword argument of the model's forward (`paged`), so nothing here is global.

Pool layout: one tensor [num_blocks, num_layers, tokens_per_block, 2, num_kv_heads, head_dim]; 2 =
key and value. A block is one contiguous run over all layers, so that a copy between the tiers is a
plain memory copy. A layer's part of a block is contiguous too and holds key and value, so one
`index_select` brings the history of a whole batch, token-major, ready for scaled dot-product
attention without a copy. A row is such a part: block * num_layers + layer.

Invariants: the pool is zeroed when allocated, and where a step wrote whose numbers are not finite,
so that a masked position is finite whatever block it lies in (0 times NaN would be NaN); a layer
writes the KV of its tokens before it reads; the shape that a sequence attends in follows from the
sequence alone: a prefill chunk has a call of its own, a decode row is padded to a length that
depends on its own history only (the order of summation, and so rounding, depends on that length).

Query heads that share a KV head are packed together as rows of one matrix (grouped queries),
which spares the expansion of keys and values to all query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tokenflow.inflight.runner import BlockCopy, SequenceChunk
from tokenflow.inflight.torch_memory import allocate_rows

ATTENTION_NAME = "tokenflow_paged"

_PADDING_TOKENS = 64
"""Decode histories are padded to a multiple of this, longer ones to 1/8 of the next power of 2:
few calls for a batch of mixed lengths, and little padding."""


class KvPool:
    """Device KV memory in blocks."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self._num_layers = num_layers
        shape = (num_blocks, num_layers, tokens_per_block, 2, num_kv_heads, head_dim)
        self._blocks = _zeros(shape, dtype, device)
        self._rows = self._blocks.view(-1, *shape[2:])
        self._slots = self._blocks.view(-1, *shape[3:])
        self._layers = torch.arange(num_layers, device=device)[:, None]

    @property
    def size_bytes(self) -> int:
        """Memory of the whole pool."""
        return self._blocks.numel() * self._blocks.element_size()

    def as_bytes(self) -> torch.Tensor:
        """The pool as bytes, [num_blocks, bytes of a block]; shares its memory."""
        return self._blocks.view(self.num_blocks, -1).view(torch.uint8)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Perform the copies in order, in every layer."""
        for copy in copies:
            n = copy.num_tokens
            self._blocks[copy.target, :, :n] = self._blocks[copy.source, :, :n]

    def rows_of(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per layer, where `block_ids` [n] are, for `read`."""
        return (block_ids * self._num_layers + self._layers).unbind(0)

    def slots_of(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per layer, where the tokens at `offsets` [n] of `block_ids` [n] are, for `write`."""
        rows = block_ids * self._num_layers + self._layers
        return (rows * self.tokens_per_block + offsets).unbind(0)

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_dim] at a layer's slots."""
        self._slots.index_copy_(0, slots, torch.stack((key, value), dim=1))

    def clear(self, slots: torch.Tensor) -> None:
        """Zeros at a layer's slots."""
        self._slots.index_fill_(0, slots, 0)

    def read(self, rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """History of sequences with equally many blocks, from a layer's rows.

        Returns [2, num_sequences, num_kv_heads, n * tokens_per_block, head_dim].
        """
        blocks = self._rows.index_select(0, rows)
        history = blocks.view(num_sequences, -1, *blocks.shape[2:])
        return history.permute(2, 0, 3, 1, 4)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in device memory, one block after the other. Raises RuntimeError or MemoryError."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    rows = allocate_rows(shape[0], math.prod(shape[1:]) * dtype.itemsize)
    return torch.from_numpy(rows).zero_().view(dtype).view(shape)


class _DecodeGroup:
    """One token of each of several sequences whose histories are padded to `num_blocks`."""

    def __init__(self, pool: KvPool, chunks: Sequence[SequenceChunk], num_blocks: int) -> None:
        size = pool.tokens_per_block
        self.num_tokens = len(chunks)
        table = np.zeros((len(chunks), num_blocks), dtype=np.int64)
        for row, chunk in zip(table, chunks, strict=True):
            held = chunk.start // size + 1
            row[:held] = chunk.block_ids[:held]
        positions = np.array([chunk.start for chunk in chunks])
        visible = np.arange(num_blocks * size) <= positions[:, None]
        self._pool = pool
        self._rows = pool.rows_of(torch.from_numpy(table.reshape(-1)).to(pool.device))
        self._mask = _additive_mask(visible, pool)[:, None, None, :]

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [num_sequences, num_heads, head_dim] -> the same shape."""
        keys, values = self._pool.read(self._rows[layer], self.num_tokens)
        packed = query.reshape(self.num_tokens, keys.shape[1], -1, query.shape[2])
        out = scaled_dot_product_attention(
            packed, keys, values, attn_mask=self._mask, scale=scaling
        )
        return out.reshape(query.shape)


class _PrefillChunk:
    """Several tokens of one sequence."""

    def __init__(self, pool: KvPool, chunk: SequenceChunk, group: int) -> None:
        size = pool.tokens_per_block
        self.num_tokens = len(chunk.token_ids)
        end = chunk.start + self.num_tokens
        num_blocks = -(-end // size)
        visible = np.arange(num_blocks * size) <= np.arange(chunk.start, end)[:, None]
        self._pool = pool
        self._rows = pool.rows_of(torch.tensor(chunk.block_ids[:num_blocks], device=pool.device))
        self._mask = _additive_mask(visible, pool).repeat(group, 1)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] -> the same shape."""
        keys, values = self._pool.read(self._rows[layer], 1)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        packed = query.reshape(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        packed = packed.reshape(1, num_kv_heads, group * num_tokens, head_dim)
        out = scaled_dot_product_attention(
            packed, keys, values, attn_mask=self._mask, scale=scaling
        )
        out = out.reshape(num_kv_heads, group, num_tokens, head_dim).permute(2, 0, 1, 3)
        return out.reshape(query.shape)


class PagedBatch:
    """The chunks of one step, packed as the rows of one forward.

    Rows: decode groups first, then the prefill chunks. A chunk of one token is a decode row,
    whether it generates, resumes or ends a context.

    input_ids, position_ids: [1, num_tokens].
    sample_rows: [num_samples] row of each chunk with `samples`, in chunk order.
    """

    def __init__(self, pool: KvPool, chunks: Sequence[SequenceChunk], heads_per_kv: int) -> None:
        groups = _group_decodes(chunks, pool.tokens_per_block)
        prefills = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
        order = [i for group in groups.values() for i in group] + prefills
        self._pool = pool
        self._parts: list[_DecodeGroup | _PrefillChunk] = [
            _DecodeGroup(pool, [chunks[i] for i in group], num_blocks)
            for num_blocks, group in groups.items()
        ]
        self._parts += [_PrefillChunk(pool, chunks[i], heads_per_kv) for i in prefills]

        token_ids: list[int] = []
        last_row = [0] * len(chunks)
        positions, block_ids = [], []
        for i in order:
            chunk = chunks[i]
            span = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
            assert len(chunk.block_ids) * pool.tokens_per_block > span[-1]
            token_ids += chunk.token_ids
            positions.append(span)
            block_ids.append(np.asarray(chunk.block_ids)[span // pool.tokens_per_block])
            last_row[i] = len(token_ids) - 1
        samples = [last_row[i] for i, chunk in enumerate(chunks) if chunk.samples]
        device = pool.device
        self.input_ids = torch.tensor([token_ids], device=device)
        self.position_ids = torch.from_numpy(np.concatenate(positions))[None].to(device)
        self.sample_rows = torch.tensor(samples, dtype=torch.int64, device=device)
        self._slots = pool.slots_of(
            torch.from_numpy(np.concatenate(block_ids)).to(device),
            self.position_ids[0] % pool.tokens_per_block,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Store key and value of all rows, then attend over the history of each.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads, head_dim].
        """
        self._pool.write(self._slots[layer], key, value)
        queries = torch.split(query, [part.num_tokens for part in self._parts])
        out = [
            part.attend(layer, rows, scaling)
            for part, rows in zip(self._parts, queries, strict=True)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)

    def clear(self) -> None:
        """Put zeros where `attend` stored key and value, in every layer."""
        for slots in self._slots:
            self._pool.clear(slots)


def _group_decodes(chunks: Sequence[SequenceChunk], tokens_per_block: int) -> dict[int, list[int]]:
    """Indices of the one-token chunks, by the number of blocks their history is padded to."""
    groups: dict[int, list[int]] = {}
    for i, chunk in enumerate(chunks):
        if len(chunk.token_ids) == 1:
            padded = padded_blocks(chunk.start + 1, tokens_per_block)
            groups.setdefault(padded, []).append(i)
    return groups


def padded_blocks(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that a history of `num_tokens` is padded to in decode; a function of these alone."""
    step = max(_PADDING_TOKENS, (1 << (num_tokens - 1).bit_length()) // 8)
    padded_tokens = -(-num_tokens // step) * step
    return -(-padded_tokens // tokens_per_block)


def _additive_mask(visible: np.ndarray[Any, np.dtype[np.bool_]], pool: KvPool) -> torch.Tensor:
    """0 where visible, -inf elsewhere, in the dtype that attention adds it in."""
    hidden = torch.from_numpy(~visible).to(pool.device)
    mask = torch.zeros(visible.shape, dtype=pool.dtype, device=pool.device)
    return mask.masked_fill_(hidden, float("-inf"))


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: PagedBatch,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    The mask comes from `paged`; transformers builds none for a function it knows no mask for.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    assert attention_mask is None
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    return paged.attend(layer, query, key, value, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
