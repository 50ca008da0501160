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

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tokenflow.executor.api import Request


class SequenceChunk(msgspec.Struct, frozen=True, gc=False):
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


class CopyDirection(enum.Enum):
    """Which way a block goes."""

    OFFLOAD = "device to host"
    ONBOARD = "host to device"


@dataclass(frozen=True, slots=True)
class TierCopy:
    """Copy a whole block between the tiers; the direction is that of the transfer."""

    device_block: int
    host_block: int


class Transfer(Protocol):
    """Copies under way. Until it is done nobody may write a source, or read or write a target."""

    def is_done(self) -> bool:
        """True once every copy is complete, or one has failed; never blocks."""
        ...

    def wait(self) -> None:
        """Return when it is done. Does not raise for a failed copy."""
        ...

    @property
    def error(self) -> str | None:
        """Why it failed, once it is done: then no target holds anything. None = all are made."""
        ...

    @property
    def seconds(self) -> float:
        """How long the copies themselves took, once it is done."""
        ...

    @property
    def waited_s(self) -> float:
        """For how long `wait` has blocked, all calls together."""
        ...


class KvTransport(Protocol):
    """Copies blocks between the tiers beside the steps. Used from the runner's thread only.

    A transfer sees what every `forward` and `copy_blocks` before its start wrote, and what every
    earlier transfer that shares a block with it left there. Sources and targets of one transfer are
    all different.
    """

    def start(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> Transfer:
        """Begin to copy; returns at once."""
        ...

    def close(self) -> None:
        """Finish what is under way and let threads and memory go. Idempotent."""
        ...


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

    def kv_block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of KV that one block of all layers holds."""
        ...

    def allocate_kv(self, num_blocks: int, tokens_per_block: int, num_host_blocks: int) -> None:
        """Allocate the pools; called once, before the first `forward`."""
        ...

    @property
    def transport(self) -> KvTransport:
        """Copies between the tiers; only where `num_host_blocks` > 0."""
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
