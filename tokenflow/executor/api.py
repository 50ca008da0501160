"""The executor surface: TensorRT-LLM's Executor, as a protocol and plain values.

Owns the names. Everything above the engine speaks only this surface; names, argument order and
meaning follow `tensorrt_llm.bindings.executor` of TensorRT-LLM 1.2.x, so that the adapter for it
stays thin. Values are msgspec structs: immutable, keyword-only, cheap to send to an engine in
another process. Where a default of the binding would only be a trap for a server that streams, ours
differs and must be passed on explicitly: `Request.streaming`, `enable_chunked_context` and
`exclude_input_from_output` are True here and False there. Responses come with every token and hold
nothing that could lead back to them: the garbage collector does not follow them (gc=False).

There is deliberately no pause call. A pause is `cancel_request` (the KV of everything already
streamed stays in the engine's reuse cache) and a resume is `enqueue_request` with prompt + streamed
tokens.

Meaning that callers rely on (TensorRT-LLM behaviour, restated):
- Streaming responses carry only the tokens since the previous response, never the prompt.
- A cancel is taken at the next iteration boundary. The request then gets exactly one final
  response with finish reason CANCELLED and no tokens: the token of the step in flight is lost. If
  the request ended by itself in that step, its natural final response is delivered instead.
- Cancelling an id that is unknown, or whose final response was handed out, does nothing.
- The end token (`end_id`) is not part of the output; the tokens of a stop word are.
- A request that the engine refuses when it fetches it (prompt too long, end_id out of range, more
  blocks than the pool) ends in an error *response*; so does every active request when a step
  fails. `prompt + max_tokens > max_seq_len` silently lowers max_tokens.
- Waiting requests are taken by descending priority, first come first served inside a priority.
- After `shutdown` every other call raises.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, runtime_checkable

import msgspec

from tokenflow.executor.kv_api import KVCacheEventManager, KvTiering, KvTierStats
from tokenflow.executor.lora import LoraConfig


class FinishReason(enum.IntEnum):
    """Why a sequence ended; values as in TensorRT-LLM."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class CapacitySchedulerPolicy(enum.IntEnum):
    """How the engine reserves KV blocks; values as in TensorRT-LLM."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1


class KvCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV pools of the engine.

    max_tokens: size of the device pool in tokens (rounded down to whole blocks).
    host_cache_size: bytes of host memory behind the device pool (rounded down to whole blocks).
    onboard_blocks: whether the host tier is used at all.
    secondary_offload_min_priority: retention priority from which a block whose device block is
        wanted is worth a host block; None = 30. Set it explicitly: TensorRT-LLM's own texts differ.
    event_buffer_max_size: KV events kept for a reader; 0 = none are made.
    """

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own capacity policy (not the slack-priority scheduler above it)."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Engine limits. `tokens_per_block` and `max_seq_len` belong to the built engine in
    TensorRT-LLM; the embedded engine has no build step, so they are given here.

    Ours: kv_tiering, the host tier is driven from above (`kv_api.KvTiering`) and keeps its copies;
    overlap_copies, those copies run beside the steps; max_copy_bytes_in_flight, their bound (but
    one block may always be on its way).
    """

    scheduler_config: SchedulerConfig = SchedulerConfig()
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    enable_chunked_context: bool = True
    iter_stats_max_iterations: int = 1000
    max_batch_size: int = 8
    max_num_tokens: int = 512
    max_queue_size: int | None = None
    tokens_per_block: int = 32
    max_seq_len: int = 2048
    kv_tiering: bool = False
    overlap_copies: bool = True
    max_copy_bytes_in_flight: int = 256 << 20

    @property
    def max_input_len(self) -> int:
        """Longest prompt, tokens: one token must fit behind it, and without chunked context one
        iteration must compute all of it."""
        limit = self.max_seq_len - 1
        return limit if self.enable_chunked_context else min(limit, self.max_num_tokens)


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. None = the engine's default (greedy when top_k and top_p are
    unset).

    seed: uint64, unset = 0; the random stream restarts at every enqueue.
    top_p_decay, top_p_min, top_p_reset_ids: top_p is multiplied by the decay after each token, not
        below the minimum, and starts anew after the token with the reset id; this restarts at
        every enqueue too.
    repetition_penalty, presence_penalty, frequency_penalty: count the whole sequence, prompt
        included; the latter two leave out its first prompt_ignore_length tokens.
    no_repeat_ngram_size: no n-gram of the whole sequence comes twice.
    min_p: tokens less likely than this share of the most likely one are left out.
    """

    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a response carries besides tokens."""

    return_log_probs: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False


class TokenRangeRetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Retention priority (0..100) of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: timedelta | None = None


class KvCacheRetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long the blocks of a request are worth keeping once unreferenced."""

    token_range_retention_configs: tuple[TokenRangeRetentionConfig, ...] = ()
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Raises ValueError for an empty prompt or max_tokens <= 0, as the binding
    does.

    priority: in [0, 1], taken at enqueue and never changed.
    bad_words: token sequences that never come; the last token of each is what is kept from coming.
    embedding_bias: (token id, value added to its logit), each id once. The binding takes a tensor
        of the vocabulary's size; few of its values are ever set.
    lora_config: its LoRA adapter (lora.py); an engine without LoRA answers with an error.
    """

    input_token_ids: tuple[int, ...]
    max_tokens: int
    streaming: bool = True
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()
    end_id: int | None = None
    pad_id: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    client_id: int | None = None
    priority: float = 0.5
    cache_salt_id: int | None = None
    lora_config: LoraConfig | None = None

    def __post_init__(self) -> None:
        if not self.input_token_ids:
            raise ValueError("input_token_ids must not be empty")
        if self.max_tokens <= 0:
            raise ValueError(f"max_tokens must be > 0, got {self.max_tokens}")


class KvCacheMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one request at its (last) start: reused from the cache, or newly computed."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0


class RequestPerfMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """On the final response when `return_perf_metrics` was asked for.

    num_reused_tokens: tokens of the prompt not recomputed (ours; exact where blocks are partial).
    num_onboarded_blocks: reused blocks that came from the host for this request (ours).
    """

    kv_cache_metrics: KvCacheMetrics = KvCacheMetrics()
    num_reused_tokens: int = 0
    num_onboarded_blocks: int = 0
    first_iter: int | None = None
    last_iter: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one response; lists are per beam, and the beam width is 1.

    output_token_ids: [[int]] the tokens since the previous response (streaming), else all.
    log_probs: [[float]] natural log-probability of each token in output_token_ids.
    """

    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    request_perf_metrics: RequestPerfMetrics | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Either a result or an error, never both; an error response is always final."""

    request_id: int
    client_id: int | None = None
    error: str | None = None
    payload: Result | None = None

    def has_error(self) -> bool:
        """True for an error response."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """The engine's message; raises RuntimeError when there is none."""
        if self.error is None:
            raise RuntimeError("response holds a result, not an error")
        return self.error

    @property
    def result(self) -> Result:
        """The result; raises RuntimeError with the engine's message for an error response."""
        if self.payload is None:
            raise RuntimeError(self.error)
        return self.payload


class KvCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Pool figures, as TensorRT-LLM counts them: max_num_blocks is both tiers together,
    free_num_blocks the unreferenced device blocks, cached ones included, and used_num_blocks the
    difference, so it always includes the whole host tier. alloc/reused/missed are cumulative."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


class InflightBatchingStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration computed. num_paused_requests: paused by the engine itself
    (MAX_UTILIZATION running out of blocks) in this iteration."""

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_ctx_tokens: int
    avg_num_decoded_tokens_per_iter: float = 1.0


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per iteration with active requests.

    end_time: instant (CLOCK_MONOTONIC, s) at which the iteration ended (ours).
    num_gen_context_tokens: KV tokens read by the generating requests (ours; 0 = unknown).
    kv_tier_stats: both KV tiers (ours; None = unknown).
    """

    iter: int
    iter_latency_ms: float
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    end_time: float = 0.0
    num_gen_context_tokens: int = 0
    kv_tier_stats: KvTierStats | None = None


@runtime_checkable
class Executor(Protocol):
    """An engine. Calls may come from different threads; `await_responses` from one only."""

    def enqueue_request(self, request: Request) -> int:
        """Queue a request; returns its id (monotonic). Raises RuntimeError when the queue holds
        `max_queue_size` requests or after shutdown."""
        ...

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Queue several in order, all or none; ids in the same order."""
        ...

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """All responses that are ready, oldest first. Blocks until there is one, until `timeout`
        (then []), or until shutdown (then raises)."""
        ...

    def get_num_responses_ready(self) -> int:
        """Responses that `await_responses` would return at once."""
        ...

    def cancel_request(self, id: int) -> None:
        """Ask for the end of a request; never blocks, unknown or finished ids are ignored."""
        ...

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Drain the statistics gathered since the last call."""
        ...

    def can_enqueue_requests(self) -> bool:
        """False after shutdown, on non-leader ranks, or when the engine is lost."""
        ...

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """The KV event source, or None where the engine has none."""
        ...

    def get_kv_tiering(self) -> KvTiering | None:
        """What moves KV between tiers on demand (ours), or None where the engine does not."""
        ...

    def shutdown(self) -> None:
        """Finish active requests, drop queued ones without responses, stop. Idempotent. Callers
        cancel and drain first."""
        ...


def num_blocks_needed(
    policy: CapacitySchedulerPolicy, tokens_per_block: int, num_input_tokens: int, max_tokens: int
) -> int:
    """Device blocks that must be free for a request to be started.

    GUARANTEED_NO_EVICT reserves prompt + max_tokens (the KV of the last generated token is never
    written, hence - 1); MAX_UTILIZATION takes the prompt and grows as it goes.
    """
    if policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
        num_tokens = num_input_tokens + max_tokens - 1
    else:
        num_tokens = num_input_tokens
    return max(1, -(-num_tokens // tokens_per_block))
