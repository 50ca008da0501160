"""The runner protocol: what the in-flight batcher asks of a model.

A runner owns the device KV memory and the sampling state of requests; it decides nothing. The
batcher owns which tokens are computed, in which blocks, and what happens with the sampled tokens.
Implementations: `torch_runner.TorchRunner` (a Hugging Face decoder) and
`scripted_runner.ScriptedRunner` (tests).

Invariants: block ids are in [0, num_blocks); a chunk's `block_ids` cover positions
[0, start + len(token_ids)) in order; positions [0, start) hold valid KV when `forward` is called;
`forward` writes the KV of every token of every chunk before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenflow.executor.api import Request


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """One sequence's part of a step.

    request_id: key given to `add_request`.
    token_ids: tokens to compute, at positions start .. start + len(token_ids) - 1.
    block_ids: device blocks of positions 0 .. start + len(token_ids) - 1, in order.
    samples: True if the token after the last one is to be sampled (the context ends here, or the
        sequence is generating).
    num_generated: tokens this request has generated since its enqueue, i.e. the index of the token
        to be sampled (drives min_tokens and the random stream).
    """

    request_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    num_generated: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the KV of the first `num_tokens` positions of block `source` into block `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens, one entry per chunk with `samples`, in chunk order.

    log_probs: natural log-probability of each sampled token under the model's distribution
    (before temperature and truncation).
    """

    token_ids: list[int]
    log_probs: list[float]


class Runner(Protocol):
    """A model with paged KV memory. Used from one thread only."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    def allocate_kv(self, num_blocks: int, tokens_per_block: int) -> None:
        """Allocate the device pool; called once, before the first `forward`."""
        ...

    def add_request(self, request_id: int, request: Request) -> None:
        """Prepare the sampling state of a request; called when it is first scheduled."""
        ...

    def remove_request(self, request_id: int) -> None:
        """Drop the sampling state; called once for every `add_request`."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Perform block copies in order; complete when it returns."""
        ...

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """Compute one step. Raises on failure; the batcher turns that into error responses."""
        ...
