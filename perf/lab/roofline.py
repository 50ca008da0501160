"""What a step, a pool and a copy cost on a GPU, from first principles.

Owns the arithmetic from (GPU, model, tensor parallelism) to the seconds of a step, and the engine
in virtual time that has these costs. All of a step's work is in six numbers (`StepTotals`), so
that the seconds are one pure function of them.

The choices:
- Linear layers take the longer of reading all weights once and their FLOPs: one kernel after the
  other overlaps loads with arithmetic, and a step of mixed decode and prefill has one GEMM for all.
- Attention comes on top of that, it overlaps with no GEMM. KV of every sequence is read once, at
  memory speed (decode attention is memory bound whatever the batch), and the pairs that the tokens
  of prefill chunks look at are computed, causal: a token sees what is before it and itself.
- Logits only for what samples; they are written and read in float32.
- Tensor parallelism divides weights, FLOPs and KV, and adds two all-reduces a layer.
- Host work is the GPU's `step_overhead_s`, the same for every step: a serving stack prepares
  sequences while the GPU computes, and nothing published would justify seconds per sequence.

What it leaves out: kernels that do not fill the GPU at small batches, GEMM sizes that tile badly,
memory traffic of activations (in the shares), clocks under a power limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from build_engines.model_shapes import ModelShape
from perf.lab.gpus import Gpu
from perf.virtual.values import SimEngine
from tokenflow.inflight.runner import SequenceChunk

_LOGIT_PASSES = 4
"""Times that a logit is written or read: the head writes it, softmax reads it twice (maximum, sum)
and the choice once."""
_LOGIT_BYTES = 4


class StepTotals(NamedTuple):
    """All the work of one step.

    num_decode: sequences with one token behind kept KV. num_context_tokens_read: positions whose
    KV is read, all chunks, own tokens included. num_prefill_tokens: tokens of longer chunks.
    attention_pairs: (token, position it sees) of those. num_sampled: tokens that get logits.
    """

    num_decode: int = 0
    num_context_tokens_read: int = 0
    num_prefill_tokens: int = 0
    attention_pairs: int = 0
    num_sampled: int = 0


def num_causal_pairs(start: int, num_tokens: int) -> int:
    """(token, position) pairs of a chunk at positions start .. start + num_tokens - 1."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def totals(chunks: Sequence[SequenceChunk]) -> StepTotals:
    """The work of a step's chunks; one token alone counts as decoded, whoever it belongs to."""
    num_decode = num_read = num_prefill = pairs = num_sampled = 0
    for chunk in chunks:
        start, num_tokens = chunk.start, len(chunk.token_ids)
        num_read += start + num_tokens
        num_sampled += chunk.samples
        if num_tokens == 1:
            num_decode += 1
        else:
            num_prefill += num_tokens
            pairs += num_causal_pairs(start, num_tokens)
    return StepTotals(num_decode, num_read, num_prefill, pairs, num_sampled)


def prefill_totals(num_tokens: int, start: int = 0, *, samples: bool = True) -> StepTotals:
    """The work of one prefill chunk alone."""
    pairs = num_causal_pairs(start, num_tokens)
    return StepTotals(0, start + num_tokens, num_tokens, pairs, int(samples))


def decode_totals(num_sequences: int, num_context_tokens: int) -> StepTotals:
    """The work of a step in which `num_sequences` generate, with so many positions in all."""
    return StepTotals(num_sequences, num_context_tokens, 0, 0, num_sequences)


class RooflineCosts:
    """Implements virtual_runner.StepCost and DecodeCosts for `model` on `tp` GPUs.

    Raises ValueError for a tp that does not divide the query heads, or by which the KV heads cannot
    be divided or repeated.
    """

    def __init__(self, gpu: Gpu, model: ModelShape, tp: int = 1) -> None:
        _check_tp(model, tp)
        self.gpu, self.model, self.tp = gpu, model, tp
        bandwidth = gpu.memory_bytes_per_s * gpu.bandwidth_share
        gemm_flops = gpu.tensor_flops * gpu.gemm_share * tp
        self._weights_s = model.read_weight_bytes / tp / bandwidth
        self._token_s = model.linear_flops_per_token / gemm_flops
        self._decode_share = 1 if gpu.decode_computes else 0
        self._head_s = self._decode_share * model.head_flops_per_token / gemm_flops
        self._kv_s = kv_bytes_per_token_and_gpu(model, tp) / bandwidth
        self._pair_s = model.attention_flops_per_pair / (
            gpu.tensor_flops * gpu.attention_share * tp
        )
        logits_s = _LOGIT_PASSES * _LOGIT_BYTES * model.vocab_size / tp / bandwidth
        reduced_s = 2 * (tp - 1) / tp * model.hidden_size * model.dtype_bytes / gpu.link_bytes_per_s
        num_reduces = 2 * model.num_layers if tp > 1 else 0
        self._reduce_token_s = num_reduces * reduced_s
        self._sampled_s = logits_s
        self._fixed_s = gpu.step_overhead_s + num_reduces * gpu.link_latency_s

    def __call__(self, chunks: Sequence[SequenceChunk], step: int) -> float:
        """Seconds of a step; see StepCost."""
        return self.step_s(totals(chunks))

    def decode_s(self, num_sequences: int, num_context_tokens: int) -> float:
        """See DecodeCosts: the same sums, so the same seconds."""
        return self.step_s(decode_totals(num_sequences, num_context_tokens))

    def step_s(self, work: StepTotals) -> float:
        """Seconds of a step with this work: linear in it but for the one maximum."""
        return self.least_s(work, 1.0)

    def least_s(self, work: StepTotals, num_steps: float) -> float:
        """Seconds that steps which do this work together take at least, if there are `num_steps` or
        more of them. Exact for one."""
        num_decode, num_read, num_prefill, pairs, num_sampled = work
        num_tokens = num_decode + num_prefill
        num_computed = num_prefill + self._decode_share * num_decode
        linear_s = num_computed * self._token_s + num_sampled * self._head_s
        return (
            num_steps * self._fixed_s
            + max(num_steps * self._weights_s, linear_s)
            + num_read * self._kv_s
            + pairs * self._pair_s
            + num_sampled * self._sampled_s
            + num_tokens * self._reduce_token_s
        )


def kv_bytes_per_token_and_gpu(model: ModelShape, tp: int) -> float:
    """KV of one token on one of `tp` GPUs; heads are repeated where there are more GPUs."""
    return model.kv_bytes_per_token / min(tp, model.num_kv_heads)


def kv_pool_tokens(gpu: Gpu, model: ModelShape, tp: int = 1, memory_fraction: float = 0.9) -> int:
    """Tokens of KV that fit beside the weights in `memory_fraction` of each GPU's memory; the rest
    is for activations, graphs and the context of the driver.

    Raises ValueError when the weights alone do not fit, or for a fraction outside (0, 1].
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction must be in (0, 1], got {memory_fraction}")
    _check_tp(model, tp)
    room = gpu.memory_bytes * memory_fraction - model.weight_bytes / tp
    if room <= 0:
        raise ValueError(f"{model.name} does not fit in {memory_fraction} of {tp} {gpu.name}")
    return int(room / kv_bytes_per_token_and_gpu(model, tp))


def sim_engine(
    gpu: Gpu,
    model: ModelShape,
    *,
    tp: int = 1,
    memory_fraction: float = 0.9,
    host_bytes: float = 0,
    kv_tiering: bool = False,
    max_batch_size: int = 256,
    max_num_tokens: int = 8192,
    max_seq_len: int = 1 << 14,
    tokens_per_block: int = 32,
    capacity_policy: str = "guaranteed_no_evict",
    enable_chunked_context: bool = True,
    lease_tokens: int = 0,
) -> SimEngine:
    """The engine in virtual time with these costs.

    host_bytes: memory of the host tier for all GPUs together; a block is on all of them, each
    copies its part over its own link. Raises ValueError as `kv_pool_tokens`.
    """
    num_tokens = kv_pool_tokens(gpu, model, tp, memory_fraction)
    block_bytes = round(kv_bytes_per_token_and_gpu(model, tp) * tp * tokens_per_block)
    return SimEngine(
        step_cost=RooflineCosts(gpu, model, tp),
        num_total_blocks=num_tokens // tokens_per_block,
        tokens_per_block=tokens_per_block,
        block_bytes=block_bytes,
        num_host_blocks=int(host_bytes // block_bytes),
        copy_bytes_per_s=gpu.pcie_bytes_per_s * tp,
        copy_duplex_share=gpu.duplex_share,
        kv_tiering=kv_tiering,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        capacity_policy=capacity_policy,
        enable_chunked_context=enable_chunked_context,
        lease_tokens=lease_tokens,
    )


def _check_tp(model: ModelShape, tp: int) -> None:
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    fits = tp >= 1 and num_heads % tp == 0
    if not fits or (num_kv_heads % tp and tp % num_kv_heads):
        raise ValueError(f"{model.name} cannot be split over {tp} GPUs")
