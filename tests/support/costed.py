"""An engine for virtual time that computes nothing: it says how long each step takes.

The batcher, its policies and its KV bookkeeping are the real ones. Every token is 0, so prompts
that are not to share blocks must differ. Integrity is not checked after each step, others do that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from tests.support.stepped import SteppedExecutor
from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.runner import BlockCopy, SequenceChunk, StepOutput

_EMPTY_STEP_S = 1e-4


class CostedRunner:
    """`cost(chunks, number of the step)` gives the seconds of a step.

    step_s, num_scheduled: seconds and sequences of the step computed since `reset`.
    """

    vocab_size = 1 << 16

    def __init__(self, cost: Callable[[Sequence[SequenceChunk], int], float]) -> None:
        self._cost = cost
        self._steps = itertools.count()
        self.reset()

    def reset(self) -> None:
        """A step that computes nothing takes hardly any time, but time."""
        self.step_s, self.num_scheduled = _EMPTY_STEP_S, 0

    def allocate_kv(self, num_blocks: int, tokens_per_block: int) -> None: ...

    def add_request(self, request_id: int, request: Request) -> None: ...

    def remove_request(self, request_id: int) -> None: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepOutput:
        self.step_s = self._cost(chunks, next(self._steps))
        self.num_scheduled = len(chunks)
        num_sampled = sum(chunk.samples for chunk in chunks)
        return StepOutput([0] * num_sampled, [0.0] * num_sampled)


class CostedExecutor(SteppedExecutor):
    """Also runs beams, which the embedded engine refuses, like any other request."""

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        plain = [msgspec.structs.replace(r, sampling_config=SamplingConfig()) for r in requests]
        return super().enqueue_requests(plain)

    def end(self, now: float) -> None:
        result = self.batcher.finish_step(now)
        self._responses += result.responses
        if result.stats is not None:
            self._stats.append(result.stats)
