"""What the engine accepts: every check of its configuration and of a request.

Owns the engine's limits. A configuration that cannot be served is a ConfigError. A refused request
ends in an error response (see batcher.py), never in an exception at enqueue, as in TensorRT-LLM.
What this engine cannot do is refused by name. Accepted without effect, because they are hints or
have no meaning here:
`kv_cache_retention_config` (one tier, plain LRU), `pad_id` (no padded tensors),
`kv_cache_config.onboard_blocks` and `.secondary_offload_min_priority` (no second tier).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenflow.errors import CapacityError, ConfigError, InvalidRequestError
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SamplingConfig,
)

_MAX_SEED = 2**64 - 1


def check_engine_limits(config: ExecutorConfig) -> None:
    """Raises ConfigError for limits under which nothing could run."""
    for name, low in (
        ("max_batch_size", 1),
        ("tokens_per_block", 1),
        ("max_seq_len", 2),
        ("iter_stats_max_iterations", 0),
    ):
        if getattr(config, name) < low:
            raise ConfigError(name, f"must be >= {low}, got {getattr(config, name)}")


def num_pool_blocks(config: KvCacheConfig, tokens_per_block: int) -> int:
    """Blocks of the device pool; raises ConfigError for a pool that this engine cannot have."""
    if config.max_tokens is None:
        raise ConfigError("kv_cache_config.max_tokens", "the embedded engine needs its pool size")
    if config.free_gpu_memory_fraction is not None:
        raise ConfigError("kv_cache_config.free_gpu_memory_fraction", "use max_tokens instead")
    if config.host_cache_size:
        raise ConfigError("kv_cache_config.host_cache_size", "the embedded engine has one KV tier")
    if config.event_buffer_max_size:
        raise ConfigError("kv_cache_config.event_buffer_max_size", "no KV events in this engine")
    if config.max_tokens < tokens_per_block:
        raise ConfigError(
            "kv_cache_config.max_tokens", f"holds no block of {tokens_per_block} tokens"
        )
    return config.max_tokens // tokens_per_block


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of the engine. num_total_blocks: KV blocks of the pool."""

    config: ExecutorConfig
    vocab_size: int
    num_total_blocks: int


def admitted_max_tokens(request: Request, limits: AdmissionLimits) -> int:
    """The tokens the request may generate: its max_tokens, lowered to what max_seq_len leaves.

    Raises InvalidRequestError naming the field, or CapacityError for more blocks than the pool.
    """
    num_input_tokens = len(request.input_token_ids)
    if num_input_tokens > limits.config.max_input_len:
        raise InvalidRequestError(
            "input_token_ids",
            f"prompt length ({num_input_tokens}) exceeds maximum input length "
            f"({limits.config.max_input_len})",
        )
    _check_token_ids("input_token_ids", request.input_token_ids, limits.vocab_size)
    if request.end_id is not None and not -1 <= request.end_id < limits.vocab_size:
        raise InvalidRequestError(
            "end_id", f"must be in [-1, {limits.vocab_size}), got {request.end_id}"
        )
    for word in request.stop_words:
        if not word:
            raise InvalidRequestError("stop_words", "a word must have at least one token")
        _check_token_ids("stop_words", word, limits.vocab_size)
    if request.bad_words:
        raise InvalidRequestError("bad_words", "not supported by this engine")
    if math.isnan(request.priority):
        raise InvalidRequestError("priority", "must be a number")
    _check_sampling(request.sampling_config)
    max_tokens = min(request.max_tokens, limits.config.max_seq_len - num_input_tokens)
    _check_blocks(num_input_tokens, max_tokens, limits)
    return max_tokens


def _check_blocks(num_input_tokens: int, max_tokens: int, limits: AdmissionLimits) -> None:
    config = limits.config
    longest = num_input_tokens + max_tokens - 1
    num_blocks = -(-longest // config.tokens_per_block)
    if num_blocks > limits.num_total_blocks:
        raise CapacityError(
            f"max_tokens: prompt ({num_input_tokens}) and max_tokens ({max_tokens}) need "
            f"{num_blocks} KV blocks of {config.tokens_per_block} tokens, the pool has "
            f"{limits.num_total_blocks}"
        )
    policy = config.scheduler_config.capacity_scheduler_policy
    restarts = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    if restarts and not config.enable_chunked_context and longest > limits.config.max_input_len:
        raise InvalidRequestError(
            "max_tokens",
            f"prompt + max_tokens - 1 ({longest}) exceeds maximum input length "
            f"({limits.config.max_input_len}): without chunked context a request paused by the "
            "engine could not be started again",
        )


def _check_sampling(sampling: SamplingConfig) -> None:
    """The only check of the ranges: runners rely on it. An unset top_p is None; 0 is refused."""

    def require(name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise InvalidRequestError(
                f"sampling_config.{name}", f"{rule}, got {getattr(sampling, name)}"
            )

    s = sampling
    require("beam_width", s.beam_width == 1, "only 1 is supported")
    require("num_return_sequences", s.num_return_sequences in (None, 1), "only 1 is supported")
    require("repetition_penalty", s.repetition_penalty in (None, 1.0), "not supported")
    require("presence_penalty", s.presence_penalty in (None, 0.0), "not supported")
    require("frequency_penalty", s.frequency_penalty in (None, 0.0), "not supported")
    require("top_k", s.top_k is None or s.top_k >= 0, "must be >= 0")
    require("top_p", s.top_p is None or 0 < s.top_p <= 1, "must be in (0, 1]")
    finite = s.temperature is None or (math.isfinite(s.temperature) and s.temperature >= 0)
    require("temperature", finite, "must be finite and >= 0")
    require("min_tokens", s.min_tokens is None or s.min_tokens >= 0, "must be >= 0")
    require("seed", s.seed is None or 0 <= s.seed <= _MAX_SEED, "must be in [0, 2^64)")


def _check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(name, f"token id {bad} is not in [0, {vocab_size})")
