"""One iteration of the batcher: what it computes and what it reports.

Owns the figures of IterationStats. Request counts are those of the time the step was chosen (so
num_active_requests - num_scheduled_requests is what waits for blocks or tokens), KV figures those
after the step, with the blocks of ended requests given back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tokenflow.errors import InternalError
from tokenflow.executor.api import InflightBatchingStats, IterationStats, KvCacheStats, Response
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.runner import StepOutput
from tokenflow.inflight.sequence import SequenceState
from tokenflow.inflight.token_budget import PlannedChunk


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. There are `stats` for each step with active requests, for the one after
    the last of them, and for one that carried out KV commands; request counts are those during the
    step, KV figures those at its end.
    """

    responses: list[Response]
    stats: IterationStats | None


class StepWork(msgspec.Struct, frozen=True):
    """How much a step computes.

    num_ctx_tokens: tokens of the context chunks. num_gen_context_tokens: KV tokens that the
        generating sequences read.
    """

    num_context: int
    num_ctx_tokens: int
    num_gen: int
    num_gen_context_tokens: int


@dataclass(slots=True)
class Iteration:
    """The iteration under way.

    has_commands: KV commands were carried out at its beginning.
    failure: the message for every active request, if it failed.
    """

    start_time: float
    num_active: int = 0
    num_queued: int = 0
    num_paused: int = 0
    has_commands: bool = False
    chunks: list[PlannedChunk] = field(default_factory=list)
    output: StepOutput | None = None
    failure: str | None = None

    def set_output(self, output: StepOutput, vocab_size: int) -> None:
        """Take what the runner returned; raises InternalError if it is not one token per sampling
        chunk, each inside the vocabulary."""
        num_sampled = sum(chunk.samples for chunk in self.chunks)
        if not len(output.token_ids) == len(output.log_probs) == num_sampled:
            raise InternalError(
                f"the runner sampled {len(output.token_ids)} tokens and {len(output.log_probs)} "
                f"log-probs for {num_sampled} sequences"
            )
        if num_sampled and not 0 <= min(output.token_ids) <= max(output.token_ids) < vocab_size:
            raise InternalError("the runner sampled a token outside its vocabulary")
        self.output = output

    def drop(self, sequence: SequenceState) -> None:
        """Leave out the chunk of a sequence that is not computed after all."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]

    def work(self) -> StepWork:
        """How much it computes."""
        num_context = num_ctx_tokens = num_gen_context_tokens = 0
        for chunk in self.chunks:
            if chunk.is_context:
                num_context += 1
                num_ctx_tokens += chunk.num_tokens
            else:
                num_gen_context_tokens += chunk.end
        num_gen = len(self.chunks) - num_context
        return StepWork(num_context, num_ctx_tokens, num_gen, num_gen_context_tokens)


class IterationLog:
    """Numbers the iterations and makes their statistics.

    number: of the iteration under way. num_completed: requests that ended since the last entry.
    last_num_active: num_active of the last iteration that ended.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self.number = 0
        self.num_completed = 0
        self.last_num_active = 0

    def entry(
        self,
        iteration: Iteration,
        work: StepWork,
        end_time: float,
        kv: KvCacheStats,
        tiers: KvTierStats,
    ) -> IterationStats:
        """The entry of an iteration with that work, which ended at `end_time`."""
        stats = IterationStats(
            iter=self.number,
            iter_latency_ms=(end_time - iteration.start_time) * 1e3,
            num_active_requests=iteration.num_active,
            num_queued_requests=iteration.num_queued,
            num_completed_requests=self.num_completed,
            max_num_active_requests=self._max_batch_size,
            kv_cache_stats=kv,
            inflight_batching_stats=InflightBatchingStats(
                num_scheduled_requests=work.num_context + work.num_gen,
                num_context_requests=work.num_context,
                num_gen_requests=work.num_gen,
                num_paused_requests=iteration.num_paused,
                num_ctx_tokens=work.num_ctx_tokens,
            ),
            end_time=end_time,
            num_gen_context_tokens=work.num_gen_context_tokens,
            kv_tier_stats=tiers,
        )
        self.number += 1
        self.num_completed = 0
        return stats
