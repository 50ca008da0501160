"""A runner for virtual time: it computes nothing and says how long each step would take.

The batcher, its capacity policies, the KV bookkeeping and the reuse tree above it are the real
ones, so a simulation on this runner takes the decisions that a server takes. What it does not do:
it has no weights and no KV memory, every token is 0 and every log-probability 0.0 (prompts that are
not to share blocks must differ), it ignores sampling and stop conditions, and it checks no block's
content (`scripted_runner.ScriptedRunner` does). It never sleeps: whoever drives the steps advances
the clock by `step_s` (`stepped.SteppedExecutor`).

Where the seconds come from is the caller's: a function of the chunks of a step. Such functions are
fitted to measured steps (perf/engine_step.py measures them), as base + per sequence + per token of
context read + per token of prefill, the same form that `tokenflow.costs` learns.

Invariant: `step_s` and `num_scheduled` are those of the last step, `num_sampled` only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import BlockCopy, SequenceChunk, StepOutput

_EMPTY_STEP_S = 1e-4

StepCost = Callable[[Sequence[SequenceChunk], int], float]
"""(chunks of the step, number of the step from 0) -> seconds."""


class VirtualRunner:
    """Implements `runner.Runner` without computing.

    step_s: seconds of the step computed since `reset`, next to nothing if none was.
    scheduled_ids: engine ids of the sequences in that step.
    num_sampled: tokens sampled in all steps, those that a cancel then throws away included.
    """

    vocab_size = 1 << 16

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._num_steps = 0
        self.num_sampled = 0
        self.step_s = _EMPTY_STEP_S
        self.scheduled_ids: tuple[int, ...] = ()

    def reset(self) -> None:
        """Call before each step: one that computes nothing takes hardly any time, but time."""
        self.step_s, self.scheduled_ids = _EMPTY_STEP_S, ()

    def allocate_kv(self, num_blocks: int, tokens_per_block: int) -> None:
        """No memory is needed."""

    def add_request(self, request_id: int, request: Request) -> None:
        """Nothing is kept."""

    def remove_request(self, request_id: int) -> None:
        """Nothing was kept."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing to copy; copies cost no time."""

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        """Token 0 for each chunk that samples; the time of the step is in `step_s`."""
        self.step_s = self._cost(chunks, self._num_steps)
        self.scheduled_ids = tuple(chunk.request_id for chunk in chunks)
        self._num_steps += 1
        num_sampled = sum(chunk.samples for chunk in chunks)
        self.num_sampled += num_sampled
        return StepOutput([0] * num_sampled, [0.0] * num_sampled)
