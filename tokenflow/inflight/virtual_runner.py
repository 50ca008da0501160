"""A runner for virtual time: it computes nothing and says how long each step would take.

The batcher, its capacity policies, the KV bookkeeping and the reuse tree above it are the real
ones, so a simulation on this runner takes the decisions that a server takes. What it does not do:
it has no weights and no KV memory, every token is 0 but for end tokens that are asked for, every
log-probability 0.0 (prompts that are not to share blocks must differ), it ignores sampling and stop
conditions, and it checks no block's content (`scripted_runner.ScriptedRunner` does). It never
sleeps: whoever drives the steps advances the clock by `step_s` (`stepped.SteppedExecutor`).

Where the seconds come from is the caller's: a function of the chunks of a step. Such functions are
fitted to measured steps (perf/engine_step.py measures them), as base + per sequence + per token of
context read + per token of prefill, the same form that `tokenflow.costs` learns. Copies between the
tiers take the time that virtual_transport.py gives them: beside the steps, unless a step waits.

Invariants: `step_s` and `num_scheduled` are those of the last step, `num_sampled` only grows; `now`
is the instant of the last `reset` plus what its step has taken so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import BlockCopy, SequenceChunk, StepOutput
from tokenflow.inflight.virtual_transport import CopyCosts, VirtualTransport

_EMPTY_STEP_S = 1e-4

StepCost = Callable[[Sequence[SequenceChunk], int], float]
"""(chunks of the step, number of the step from 0) -> seconds."""

DecodeCost = Callable[[int, int, int], float]
"""(sequences that decode, KV tokens that they read with their own, number of the step) -> seconds:
what the StepCost beside it says of the chunks of such a step, to the bit."""


@runtime_checkable
class DecodeCosts(Protocol):
    """A StepCost that needs no chunks where each has one token behind kept KV."""

    def decode_s(self, num_sequences: int, num_context_tokens: int) -> float:
        """Seconds of a step in which so many sequences decode and read so many KV tokens, their own
        included: to the bit what it says of the chunks."""
        ...


TOKEN_ID, LOG_PROB = 0, 0.0
"""What is sampled."""

END_ID = 1
"""What is sampled where an answer ends by itself."""


class VirtualRunner:
    """Implements `runner.Runner` without computing.

    decode_cost: the cost of a step that only decodes, without looking at its chunks; None: the
        chunks are needed.
    copy_costs: what copies between the tiers take; None: no host tier can be had.
    num_before_end: tokens that a request generates before its END_ID; None: it does not end by
        itself.
    scheduled_ids: engine ids of the sequences in the step computed since `reset`.
    wait_s: for how long that step waited for copies; `step_s` contains it.
    num_steps: steps computed. num_sampled: tokens sampled in all of them, those that a cancel then
        throws away included.
    """

    vocab_size = 1 << 16

    def __init__(
        self,
        cost: StepCost,
        copy_costs: CopyCosts | None = None,
        decode_cost: DecodeCost | None = None,
        num_before_end: Callable[[Request], int | None] = lambda request: None,
    ) -> None:
        self._cost = cost
        self._decode_cost = decode_cost
        self._copy_costs = copy_costs
        self._transport = VirtualTransport(copy_costs, self) if copy_costs is not None else None
        self._start_time = 0.0
        self.num_steps = 0
        self._compute_s: float | None = None
        self.num_sampled = 0
        self.wait_s = 0.0
        self.scheduled_ids: tuple[int, ...] = ()
        self._num_before_end = num_before_end
        self._ends_after: dict[int, int] = {}

    @property
    def step_s(self) -> float:
        """Seconds of the step computed since `reset`, next to nothing if none was."""
        return self.wait_s + (_EMPTY_STEP_S if self._compute_s is None else self._compute_s)

    @property
    def now(self) -> float:
        """Current virtual instant, s."""
        return self._start_time + self.wait_s + (self._compute_s or 0.0)

    def reset(self, now: float) -> None:
        """Call before each step, with the instant at which it begins."""
        self._start_time, self._compute_s, self.wait_s = now, None, 0.0
        self.scheduled_ids = ()

    def spend(self, seconds: float) -> None:
        """The step waits so long for a copy. Raises RuntimeError once it has computed: its length
        is known then, and it can grow no more."""
        if self._compute_s is not None:
            raise RuntimeError("a step waits for a copy after it has computed")
        self.wait_s += seconds

    def kv_block_bytes(self, tokens_per_block: int) -> int:
        """What the copy of a block moves; without copies one byte, since there is nothing to hold
        and a size has to be positive."""
        return 1 if self._copy_costs is None else self._copy_costs.block_bytes

    def allocate_kv(self, num_blocks: int, tokens_per_block: int, num_host_blocks: int = 0) -> None:
        """No memory is needed. Raises ValueError for a host tier whose copies have no costs."""
        if num_host_blocks and self._copy_costs is None:
            raise ValueError("a host tier in virtual time needs copy_costs")

    @property
    def transport(self) -> VirtualTransport:
        """See Runner."""
        assert self._transport is not None, "no host tier was asked for"
        return self._transport

    def add_request(self, request_id: int, request: Request) -> None:
        """Nothing is kept but where it ends."""
        num_tokens = self._num_before_end(request)
        if num_tokens is not None:
            self._ends_after[request_id] = num_tokens

    def remove_request(self, request_id: int) -> None:
        """Nor any longer."""
        self._ends_after.pop(request_id, None)

    def num_until_end(self, request_id: int, num_generated: int) -> float:
        """Tokens that a request which has generated so many will have before its END_ID; infinite
        if it does not end by itself."""
        return self._ends_after.get(request_id, math.inf) - num_generated

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing to copy; copies inside the device cost no time."""

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """TOKEN_ID, or END_ID, for each chunk that samples; the time of the step is in `step_s`."""
        self._compute_s = self._cost(chunks, self.num_steps)
        self.scheduled_ids = tuple(chunk.request_id for chunk in chunks)
        self.num_steps += 1
        token_ids = [self._token_id(chunk) for chunk in chunks if chunk.samples]
        self.num_sampled += len(token_ids)
        return StepOutput(token_ids, [LOG_PROB] * len(token_ids))

    def _token_id(self, chunk: SequenceChunk) -> int:
        return (
            END_ID if self.num_until_end(chunk.request_id, chunk.num_generated) <= 0 else TOKEN_ID
        )

    def decode(
        self,
        request_ids: tuple[int, ...],
        num_context_tokens: int,
        chunks: Callable[[], Sequence[SequenceChunk]],
    ) -> None:
        """As `forward` for a step that samples a TOKEN_ID of each request, behind its kept KV.

        num_context_tokens: KV tokens that they read, their own included. chunks: what `forward`
            would be given.
        """
        if self._decode_cost is None:
            self._compute_s = self._cost(chunks(), self.num_steps)
        else:
            num_sequences = len(request_ids)
            self._compute_s = self._decode_cost(num_sequences, num_context_tokens, self.num_steps)
        self.scheduled_ids = request_ids
        self.num_steps += 1
        self.num_sampled += len(request_ids)
