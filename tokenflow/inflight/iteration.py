"""One iteration of the batcher: what it computes and what it reports.

Owns the figures of IterationStats. Request counts are those of the time the step was chosen (so
num_active_requests - num_scheduled_requests is what waits for blocks or tokens), KV figures those
after the step, with the blocks of ended requests given back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
        if any(not 0 <= token < vocab_size for token in output.token_ids):
            raise InternalError("the runner sampled a token outside its vocabulary")
        self.output = output

    def drop(self, sequence: SequenceState) -> None:
        """Leave out the chunk of a sequence that is not computed after all."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]

    def stats(
        self,
        end_time: float,
        iteration: int,
        num_completed: int,
        max_batch_size: int,
        kv: KvCacheStats,
        tiers: KvTierStats,
    ) -> IterationStats:
        """The entry of this iteration, which ended at `end_time`."""
        context = [chunk for chunk in self.chunks if chunk.is_context]
        generating = [chunk for chunk in self.chunks if not chunk.is_context]
        return IterationStats(
            iter=iteration,
            iter_latency_ms=(end_time - self.start_time) * 1e3,
            num_active_requests=self.num_active,
            num_queued_requests=self.num_queued,
            num_completed_requests=num_completed,
            max_num_active_requests=max_batch_size,
            kv_cache_stats=kv,
            inflight_batching_stats=InflightBatchingStats(
                num_scheduled_requests=len(self.chunks),
                num_context_requests=len(context),
                num_gen_requests=len(generating),
                num_paused_requests=self.num_paused,
                num_ctx_tokens=sum(chunk.num_tokens for chunk in context),
            ),
            end_time=end_time,
            num_gen_context_tokens=sum(chunk.end for chunk in generating),
            kv_tier_stats=tiers,
        )
