"""The runner that computes: a Hugging Face decoder on paged KV, in PyTorch, CPU or CUDA.

Owns the model, the KV pool and the sampler; see `runner.py` for what a step is. All chunks of a
step go through the model's linear layers together, in one forward (a forward of its own for each
prefill would read all weights again), while attention keeps them apart. On CPUs whose packed
linears are exact per row (`torch_linear.py`) the numbers of a sequence are then bit for bit those
it would have alone, given the same chunks; elsewhere they may differ in rounding.

The head runs in float32 also for bfloat16 models: the logits of the best two tokens are often
equal in bfloat16, and greedy choice would then depend on rounding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tokenflow.errors import CapacityError, ConfigError, EngineError
from tokenflow.executor.api import Request
from tokenflow.inflight.runner import BlockCopy, KvTransport, SequenceChunk, StepOutput
from tokenflow.inflight.torch_attention import KvPool, PagedBatch
from tokenflow.inflight.torch_cuda import open_cuda_transport
from tokenflow.inflight.torch_linear import make_linear, pack_linears
from tokenflow.inflight.torch_loading import Decoder, LoadProgress, load_decoder
from tokenflow.inflight.torch_memory import allocate_rows
from tokenflow.inflight.torch_sampler import Sampler
from tokenflow.inflight.torch_transport import ArrayMemory, ThreadTransport

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchRunner:
    """Implements `runner.Runner`. Used from one thread only.

    model: checkpoint folder, or a decoder that is on `device` and in `dtype` already and may serve
    several runners (see `torch_loading`). device: "cpu", "cuda" or "cuda:N".
    dtype: of weights and KV. num_threads: see `set_threads`.
    progress: told the fraction of the weights that is loaded.
    Raises ConfigError naming the key when a value or the checkpoint is refused.
    """

    def __init__(
        self,
        model: str | Path | Decoder,
        device: str = "cpu",
        dtype: str = "bfloat16",
        num_threads: int = 0,
        progress: LoadProgress | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError("dtype", f"must be one of {tuple(_DTYPES)}, got {dtype!r}")
        self._dtype = _DTYPES[dtype]
        self._device = _open_device(device)
        if self._device.type == "cpu":
            set_threads(num_threads, os.environ)
        with torch.inference_mode():
            if isinstance(model, Decoder):
                decoder = model
            else:
                decoder = load_decoder(
                    Path(model),
                    device=self._device,
                    dtype=self._dtype,
                    progress=progress or (lambda fraction: None),
                )
            pack_linears(decoder.model)
            self._head = make_linear(decoder.head_weight)
        self._model = decoder.model
        self._vocab_size = decoder.vocab_size
        self._max_position_embeddings = decoder.max_position_embeddings
        self._kv_shape = (decoder.num_layers, decoder.num_kv_heads, decoder.head_dim)
        self._heads_per_kv = decoder.num_heads // decoder.num_kv_heads
        self._pool: KvPool | None = None
        self._transport: KvTransport | None = None
        self._sampler = Sampler(decoder.vocab_size, self._device)

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return self._max_position_embeddings

    def kv_block_bytes(self, tokens_per_block: int) -> int:
        """See Runner."""
        num_layers, num_kv_heads, head_dim = self._kv_shape
        return num_layers * tokens_per_block * 2 * num_kv_heads * head_dim * self._dtype.itemsize

    def allocate_kv(self, num_blocks: int, tokens_per_block: int, num_host_blocks: int) -> None:
        """See Runner. Raises CapacityError when the memory is not there."""
        num_layers, num_kv_heads, head_dim = self._kv_shape
        try:
            with torch.inference_mode():
                self._pool = KvPool(
                    num_layers,
                    num_blocks,
                    tokens_per_block,
                    num_kv_heads,
                    head_dim,
                    dtype=self._dtype,
                    device=self._device,
                )
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * tokens_per_block
            raise CapacityError(
                f"max_tokens_in_paged_kv_cache: no memory for {size} tokens: {error}"
            ) from error
        logger.info("KV pool: %d blocks, %.0f MB", num_blocks, self._pool.size_bytes / 1e6)
        if num_host_blocks:
            self._transport = _open_transport(self._pool.as_bytes(), num_host_blocks)

    @property
    def transport(self) -> KvTransport:
        """See Runner."""
        assert self._transport is not None, "there are no host blocks"
        return self._transport

    def kv_bytes(self) -> torch.Tensor:
        """The device pool as bytes, [num_blocks, bytes of a block], in its own memory; for checks
        of what copies leave there."""
        return self._allocated_pool().as_bytes()

    def add_request(self, request_id: int, request: Request) -> None:
        """See Runner. Its sampling parameters are in range (`admission`)."""
        self._sampler.add(request_id, request)

    def remove_request(self, request_id: int) -> None:
        """See Runner."""
        self._sampler.remove(request_id)

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See Runner."""
        self._allocated_pool().copy(copies)

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """See Runner. Raises EngineError when the model gives numbers that are not finite, also in
        a chunk that samples nothing. Then the step leaves zeros as its KV: attention gives what it
        must not see the weight 0, and 0 times NaN is NaN, so that whoever gets these blocks next
        would fail as well."""
        with torch.inference_mode():
            batch, hidden, logits = self._compute(chunks)
            if not bool(torch.isfinite(hidden).all() & torch.isfinite(logits).all()):
                batch.clear()
                raise EngineError("the model gave numbers that are not finite")
            sampled = [chunk for chunk in chunks if chunk.samples]
            if not sampled:
                return StepOutput(token_ids=[], log_probs=[])
            token_ids, log_probs = self._sampler.sample(
                logits,
                [chunk.request_id for chunk in sampled],
                [chunk.num_generated for chunk in sampled],
            )
        return StepOutput(token_ids=token_ids.tolist(), log_probs=log_probs.tolist())

    @torch.inference_mode()
    def logits(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Compute a step up to its logits: [num_samples, vocab_size], float32, in chunk order."""
        return self._compute(chunks)[2]

    def _compute(
        self, chunks: Sequence[SequenceChunk]
    ) -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
        """The step packed, its last hidden states [1, num_tokens, hidden_size], and its logits."""
        batch = PagedBatch(self._allocated_pool(), chunks, self._heads_per_kv)
        hidden: torch.Tensor = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            paged=batch,
        ).last_hidden_state
        rows = hidden[0].index_select(0, batch.sample_rows)
        logits: torch.Tensor = rows.new_empty((0, self._vocab_size), dtype=torch.float32)
        if len(rows):
            logits = self._head(rows.float())
        return batch, hidden, logits

    def _allocated_pool(self) -> KvPool:
        assert self._pool is not None, "allocate_kv comes first"
        return self._pool


def _open_transport(device: torch.Tensor, num_host_blocks: int) -> KvTransport:
    """The host pool beside the device pool `device` [num_blocks, block_bytes], and its copies.
    Raises CapacityError."""
    block_bytes = device.shape[1]
    try:
        host = allocate_rows(num_host_blocks, block_bytes)
    except MemoryError as error:
        size = num_host_blocks * block_bytes
        raise CapacityError(
            f"kv_cache_host_memory_bytes: no memory for {size} bytes: {error}"
        ) from error
    logger.info("host KV pool: %d blocks, %.0f MB", num_host_blocks, host.nbytes / 1e6)
    if device.is_cuda:
        return open_cuda_transport(device, host)
    return ThreadTransport(ArrayMemory(device.numpy(), host))


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"must be 'cpu' or 'cuda', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"must be 'cpu' or 'cuda', got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no CUDA device")
    return device


def set_threads(num_threads: int, environment: Mapping[str, str]) -> None:
    """Threads of this whole process on a CPU; 0 = one for each core that it may run on, which the
    cpuset of a container or `taskset` makes fewer than the machine has.
    environment: this process's, as it was when torch was loaded."""
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))
    if environment.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        # Threads that spin while they wait make a step many times slower as soon as another
        # process wants a core. OpenMP reads the variable once, when torch is loaded.
        logger.warning("OMP_WAIT_POLICY is not PASSIVE: set it before this process starts")
