"""Where the memory of a GPU goes when an engine serves, and how many readers the rest holds.

Owns the sums. Weights and KV are exact, from the shape. The rest is estimated from above: each
constant below covers what runs of TensorRT-LLM have logged ("[MemUsageChange] Allocated …"), and
what is left over is KV. A real engine logs its own figures when it is loaded; they count.

    KV pool = free_fraction * (GPU memory - weights - activations - buffers - reserve)

as the runtime does it: the fraction is of what is free once the engine is loaded (source: the
documentation of `free_gpu_memory_fraction`). All figures are of one GPU of the group unless they
say otherwise. Invariant: a pool never holds less than one sequence of full length; that is refused.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from build_engines.model_shapes import ModelShape
from build_engines.recipes import OTHER_BYTES, NumberType
from tokenflow.errors import ConfigError

ACTIVATION_FACTOR = 3
"""Times the tensors that live at once in the widest layer. Logs: 37,812 MiB for 128,000 tokens of
an 8B Llama (2.5 times), 929 MiB for 8,192 of Llama-2-7B (1.03 times), 774 MiB for 8,192 of a 0.5B
Qwen2.5 (2.7 times)."""
VOCAB_BUFFER_BYTES = 48
"""Per slot of the batch and entry of the vocabulary: logits in float32, the sampler's copies and
workspaces. Logs: 45 bytes (4,096 slots, 32,000 entries), 29 (2,048 slots, 151,936 entries)."""
SEQUENCE_BUFFER_BYTES = 32
"""Per slot and token of the longest sequence: output ids, block tables and their copies."""
RESERVE_BYTES = 2 * 1024**3
"""CUDA context, libraries, fragments. Logs: 0.8 GiB with small buffers, 3.1 GiB with very large
ones."""
GROUP_RESERVE_BYTES = 512 * 1024**2
"""More for a group of GPUs: NCCL and the workspaces of all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine is built for. max_seq_len: prompt and output of one request, tokens."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one GPU, and what they hold. host_bytes: pinned memory behind this GPU's pool.

    context_tokens: length of a reader's stream that the counts of readers are for.
    """

    gpu_bytes: int
    weight_bytes: int
    activation_bytes: int
    buffer_bytes: int
    reserve_bytes: int
    free_fraction: float
    host_bytes: int
    kv_bytes_per_token: int
    tokens_per_block: int
    context_tokens: int
    max_batch_size: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but KV."""
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes + self.reserve_bytes

    @property
    def pool_bytes(self) -> int:
        """Room of the KV pool."""
        return int(self.free_fraction * max(0, self.gpu_bytes - self.fixed_bytes))

    @property
    def block_bytes(self) -> int:
        """Of one KV block on this GPU."""
        return self.kv_bytes_per_token * self.tokens_per_block

    @property
    def num_blocks(self) -> int:
        """KV blocks of the device pool."""
        return self.pool_bytes // self.block_bytes

    @property
    def num_host_blocks(self) -> int:
        """KV blocks of the host pool."""
        return self.host_bytes // self.block_bytes

    @property
    def blocks_per_reader(self) -> int:
        """Of a stream of context_tokens."""
        return math.ceil(self.context_tokens / self.tokens_per_block)

    @property
    def num_device_readers(self) -> int:
        """Streams of that length whose KV the device pool holds, running and paused together."""
        return self.num_blocks // self.blocks_per_reader

    @property
    def num_running_readers(self) -> int:
        """Of them, those that can be in one step."""
        return min(self.num_device_readers, self.max_batch_size)

    @property
    def num_host_readers(self) -> int:
        """Further paused streams of that length whose KV the host pool holds."""
        return self.num_host_blocks // self.blocks_per_reader

    def to_record(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        derived = (
            "fixed_bytes", "pool_bytes", "block_bytes", "num_blocks", "num_host_blocks",
            "blocks_per_reader", "num_device_readers", "num_running_readers", "num_host_readers",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def weight_bytes_per_gpu(shape: ModelShape, kind: NumberType, tp: int) -> int:
    """Weights of one GPU of the group.

    The layers' matrices and the head are divided; the embedding and the vectors are whole on each
    (the converters' default). The head is a matrix of its own even where it is tied. The scales of
    FP8, a few bytes a matrix, are left out.
    """
    matrices = shape.num_layer_matrix_params // tp * kind.matrix_bytes
    head = shape.num_head_params // tp * OTHER_BYTES
    embedding = shape.num_head_params * OTHER_BYTES
    num_tables = 1 if shape.tied_embeddings else 2
    vectors = (
        shape.num_params
        - shape.num_layer_matrix_params
        - num_tables * shape.num_head_params
    )  # fmt: skip
    return matrices + head + embedding + vectors * OTHER_BYTES


def kv_bytes_per_token_and_gpu(shape: ModelShape, kind: NumberType, tp: int) -> int:
    """Keys and values of one token on one GPU; with more GPUs than KV heads, heads are doubled."""
    num_heads = math.ceil(shape.num_kv_heads / tp)
    return 2 * shape.num_layers * num_heads * shape.head_dim * kind.kv_bytes


def activation_bytes(shape: ModelShape, max_num_tokens: int, tp: int) -> int:
    """What TensorRT sets aside for the tensors of a step of so many tokens, from above.

    It grows with max_num_tokens alone and is reused from layer to layer (source: TensorRT-LLM's
    documentation of its memory usage). In the widest layer live the residual, its norm and the
    attention's output, Q, K and V, and the MLP's gate, its other half and their product.
    """
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    values = 3 * shape.hidden_size + math.ceil((heads + 3 * shape.intermediate_size) / tp)
    return ACTIVATION_FACTOR * values * OTHER_BYTES * max_num_tokens


def buffer_bytes(shape: ModelShape, limits: EngineLimits) -> int:
    """The runtime's and the sampler's buffers, from above."""
    per_slot = VOCAB_BUFFER_BYTES * shape.vocab_size + SEQUENCE_BUFFER_BYTES * limits.max_seq_len
    return per_slot * limits.max_batch_size


def make_budget(
    shape: ModelShape,
    kind: NumberType,
    limits: EngineLimits,
    *,
    tp: int,
    gpu_bytes: int,
    free_fraction: float,
    host_bytes: int,
    context_tokens: int,
) -> Budget:
    """The budget of one GPU. Raises ConfigError when the model, or one sequence of full length,
    does not fit."""
    budget = Budget(
        gpu_bytes=gpu_bytes,
        weight_bytes=weight_bytes_per_gpu(shape, kind, tp),
        activation_bytes=activation_bytes(shape, limits.max_num_tokens, tp),
        buffer_bytes=buffer_bytes(shape, limits),
        reserve_bytes=RESERVE_BYTES + (GROUP_RESERVE_BYTES if tp > 1 else 0),
        free_fraction=free_fraction,
        host_bytes=host_bytes,
        kv_bytes_per_token=kv_bytes_per_token_and_gpu(shape, kind, tp),
        tokens_per_block=limits.tokens_per_block,
        context_tokens=context_tokens,
        max_batch_size=limits.max_batch_size,
    )
    _require_room(budget, limits.max_seq_len)
    return budget


def _require_room(budget: Budget, max_seq_len: int) -> None:
    if budget.fixed_bytes >= budget.gpu_bytes:
        raise ConfigError(
            "gpu",
            f"{gb(budget.fixed_bytes)} are needed before any KV ({gb(budget.weight_bytes)} of "
            f"them weights), the GPU has {gb(budget.gpu_bytes)}; take more GPUs (--tp), fp8, or "
            "lower --max-num-tokens and --max-batch-size",
        )
    pool_tokens = budget.num_blocks * budget.tokens_per_block
    if pool_tokens < max_seq_len:
        raise ConfigError(
            "max_seq_len",
            f"the KV pool holds {pool_tokens:,} tokens, less than one sequence of "
            f"{max_seq_len:,}; lower --max-seq-len, --max-num-tokens or --max-batch-size",
        )
    if 0 < budget.host_bytes < budget.block_bytes:
        raise ConfigError(
            "host_gb", f"{budget.host_bytes} bytes hold no KV block ({budget.block_bytes} bytes)"
        )


def gb(num_bytes: float) -> str:
    """`16.06 GB`, decimal."""
    return f"{num_bytes / 1e9:.2f} GB"
