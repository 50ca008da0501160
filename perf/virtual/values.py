"""What a run in virtual time is given, and what it gives back.

Owns the request, the engine with its limits and true costs, and the records of a run. All but
`SimSeq` and `SimResult`, which the simulation fills, are immutable. Instants count from 0, the
start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenflow.answers import Counters
from tokenflow.config import ServingConfig
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.inflight.virtual_runner import DecodeCost, DecodeCosts, StepCost
from tokenflow.inflight.virtual_transport import CopyCosts
from tokenflow.metrics import Stream
from tokenflow.types import EndReason, Usage

_MAX_KV_EVENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SimRequest:
    """One request.

    read_rate: tokens/s; None: no reader (it counts with the default rate).
    pausable: False makes it of a kind that may never be paused (beam search).
    num_shared_tokens: leading tokens of the prompt that every request has.
    conversation: key of the conversation that it is a turn of, if any. num_history_tokens: leading
        tokens of the prompt that are the prompt and the whole answer of its previous turn (which
        begin with those of the turns before); instead of num_shared_tokens. No others are shared.
    cancel_after_s: its client leaves so long after the arrival, if it has not ended by then.
    max_tokens: of the answer. limit_tokens: what the request names as its max_tokens, if that is
        more: the answer ends by itself, and nobody knows where.

    Raises ValueError for a limit that is less than the answer has.
    """

    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    read_rate: float | None = 4.0
    priority: float = 0.5
    pausable: bool = True
    kind: str = "reader"
    num_shared_tokens: int = 0
    cancel_after_s: float | None = None
    conversation: int | None = None
    num_history_tokens: int = 0
    limit_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.limit_tokens is not None and self.limit_tokens < self.max_tokens:
            raise ValueError(
                f"limit_tokens must be >= max_tokens, got {self.limit_tokens} and {self.max_tokens}"
            )

    @property
    def ends_by_itself(self) -> bool:
        """True if its limit allows more than the answer has."""
        return self.limit_tokens is not None and self.limit_tokens > self.max_tokens


@dataclass(frozen=True, kw_only=True)
class SimEngine:
    """Limits and true costs; the defaults are the fitted CPU engine of the demo.

    response_delays_s: seconds that responses of a step are on their way, step by step, over and
        over; they never overtake each other.
    step_factors: multiples of the cost model's seconds, step by step, over and over.
    step_cost: what a step takes, instead of the linear model of the fields named step_* and
        prefill_tokens_per_s.
    num_host_blocks: size of the host tier; 0 = none. kv_tiering: it is told what to do ahead of
        need, else TensorRT-LLM's rules hold. block_bytes, copy_bytes_per_s: KV of one block, and
        how fast it is copied, in each direction. copy_duplex_share: see CopyCosts.duplex_share.
    is_warm: the server has run before: what the engine costs is known when the first request of the
        run arrives, and how long answers are, where others are given (the laboratory's policies are
        run so).
    has_kv_events: the runtime mirrors the cache, else it estimates.
    overlap_copies: copies ahead of need run beside the steps, else steps wait for them.
    has_retention: requests say what their blocks are worth; those of a stock deployment do not.
    plan_interval_s, learn_output_lengths: see ServingConfig.
    """

    max_batch_size: int = 8
    num_total_blocks: int = 128
    tokens_per_block: int = 32
    max_num_tokens: int = 512
    max_seq_len: int = 1 << 14
    enable_chunked_context: bool = True
    capacity_policy: str = "guaranteed_no_evict"
    lease_tokens: int = 0
    max_queue_size: int = 1 << 20
    step_base_s: float = 0.045
    step_per_sequence_s: float = 0.0013
    step_per_context_token_s: float = 2.6e-6
    prefill_tokens_per_s: float = 2600.0
    response_delays_s: tuple[float, ...] = (0.002,)
    step_factors: tuple[float, ...] = (1.0,)
    num_host_blocks: int = 0
    kv_tiering: bool = False
    block_bytes: int = 1 << 20
    copy_bytes_per_s: float = 4e9
    copy_duplex_share: float = 1.0
    has_kv_events: bool = True
    is_warm: bool = False
    overlap_copies: bool = True
    has_retention: bool = True
    plan_interval_s: float = ServingConfig.plan_interval_s
    learn_output_lengths: bool = ServingConfig.learn_output_lengths
    step_cost: StepCost | None = None

    @property
    def copy_costs(self) -> CopyCosts:
        """The link to the host tier."""
        return CopyCosts(
            block_bytes=self.block_bytes,
            offload_bytes_per_s=self.copy_bytes_per_s,
            onboard_bytes_per_s=self.copy_bytes_per_s,
            duplex_share=self.copy_duplex_share,
        )

    @property
    def decode_cost(self) -> DecodeCost | None:
        """`step_s` of a step that only decodes, from its sums; None where that cannot be had."""
        costs, factors = self.step_cost, self.step_factors
        if not isinstance(costs, DecodeCosts):
            return None
        return lambda num_sequences, num_context_tokens, step: (
            costs.decode_s(num_sequences, num_context_tokens) * factors[step % len(factors)]
        )

    def config(self) -> ServingConfig:
        """The product's configuration; waiting time has no bound."""
        return ServingConfig(
            # The planner is given; here it decides who sends retention priorities.
            scheduling_policy="tokenflow" if self.has_retention else "fcfs-reserve",
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            tokens_per_block=self.tokens_per_block,
            max_tokens_in_paged_kv_cache=self.num_total_blocks * self.tokens_per_block,
            enable_chunked_context=self.enable_chunked_context,
            batch_scheduler_policy=self.capacity_policy,
            lease_tokens=self.lease_tokens,
            kv_cache_host_memory_bytes=self.num_host_blocks * self.block_bytes,
            kv_tiering=self.kv_tiering,
            kv_event_buffer_max_size=_MAX_KV_EVENTS if self.has_kv_events else 0,
            max_queue_size=self.max_queue_size,
            max_queue_delay_s=86_400,
            plan_interval_s=self.plan_interval_s,
            learn_output_lengths=self.learn_output_lengths,
        )

    def step_s(self, chunks: Sequence[SequenceChunk], step: int) -> float:
        """Seconds of a step; one token behind kept KV costs what a decoded one costs."""
        factor = self.step_factors[step % len(self.step_factors)]
        if self.step_cost is not None:
            return self.step_cost(chunks, step) * factor
        seconds = self.step_base_s
        for chunk in chunks:
            num_tokens = len(chunk.token_ids)
            if num_tokens == 1:
                num_read = chunk.start + 1
                seconds += self.step_per_sequence_s + self.step_per_context_token_s * num_read
            else:
                seconds += num_tokens / self.prefill_tokens_per_s
        return seconds * factor


@dataclass(eq=False)
class SimSeq:
    """What a client saw of its request.

    end, error, retryable, end_time: of its one end; None and NaN before it.
    """

    request: SimRequest
    token_times: list[float] = field(default_factory=list)
    end: EndReason | None = None
    error: str | None = None
    retryable: bool = False
    end_time: float = float("nan")
    usage: Usage | None = None

    @property
    def num_pauses(self) -> int:
        """Pauses over its whole life."""
        return 0 if self.usage is None else self.usage.num_pauses

    @property
    def stream(self) -> Stream:
        """What is measured."""
        return Stream(
            arrival_time=self.request.arrival_time,
            token_times=np.array(self.token_times),
            read_rate=self.request.read_rate,
            output_length=self.request.max_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class SimStep:
    """One step of the engine as it begins.

    handles: the sequences that it computes, by the coordinator's handles (1, 2, … in order of
        arrival). num_waiting: requests that wait for a place, paused ones included.
    num_held_blocks: what sessions in the engine hold of its budget (reservations, where it makes
        them). num_used_blocks: blocks referenced in the pool.
    """

    start_time: float
    step_s: float
    handles: tuple[int, ...]
    num_waiting: int
    num_held_blocks: int
    num_used_blocks: int


@dataclass(kw_only=True)
class SimResult:
    """What happened.

    idle_slot_s, busy_slot_s: slot seconds that stood empty while somebody waited, and all in use.
    num_lease_ends: enqueues that ended at their lease while the request went on.
    num_thrown_away: tokens that the engine sampled and no client got.
    counters: everything that the coordinator counted. tiers: both KV tiers at the end.
    num_host_blocks_peak: most blocks that the host tier ever held or was being given.
    """

    seqs: list[SimSeq]
    num_pauses: int = 0
    num_forced: int = 0
    num_internal_pauses: int = 0
    num_lease_ends: int = 0
    num_recomputed_tokens: int = 0
    num_thrown_away: int = 0
    idle_slot_s: float = 0.0
    busy_slot_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    tiers: KvTierStats | None = None
    num_host_blocks_peak: int = 0

    def streams(self, kind: str | None = None) -> list[Stream]:
        """The measured streams, in order of arrival."""
        return [q.stream for q in self.seqs if kind is None or q.request.kind == kind]
