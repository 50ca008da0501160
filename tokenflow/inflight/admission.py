"""What the engine accepts: every check of its configuration and of a request.

Owns the engine's limits. A configuration that cannot be served is a ConfigError. A refused request
ends in an error response (see batcher.py), never in an exception at enqueue, as in TensorRT-LLM.
What this engine cannot do is refused by name. Accepted without effect, because it has no meaning
here: `pad_id` (no padded tensors).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from datetime import timedelta

from tokenflow.errors import CapacityError, ConfigError, InvalidRequestError
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheRetentionConfig,
    Request,
    SamplingConfig,
)

_MAX_SEED = 2**64 - 1
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_MAX_NGRAM_SIZE = 32
"""TensorRT-LLM's kernel has room for no longer ones either."""
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_TOKENS = 16384


def check_engine_limits(config: ExecutorConfig) -> None:
    """Raises ConfigError for limits under which nothing could run."""
    for name, low in (
        ("max_batch_size", 1),
        ("tokens_per_block", 1),
        ("max_seq_len", 2),
        ("iter_stats_max_iterations", 0),
        ("max_copy_bytes_in_flight", 1),
    ):
        if getattr(config, name) < low:
            raise ConfigError(name, f"must be >= {low}, got {getattr(config, name)}")


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
    _check_words("stop_words", request.stop_words, limits.vocab_size)
    _check_words("bad_words", request.bad_words, limits.vocab_size)
    _check_bad_word_limits(request.bad_words)
    _check_embedding_bias(request.embedding_bias, limits.vocab_size)
    if request.lora_config is not None:
        raise InvalidRequestError("lora_config", "this engine has no LoRA")
    if math.isnan(request.priority):
        raise InvalidRequestError("priority", "must be a number")
    _check_sampling(request.sampling_config, limits.vocab_size)
    _check_retention(request.kv_cache_retention_config)
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


def _check_sampling(sampling: SamplingConfig, vocab_size: int) -> None:
    """The only check of the ranges: runners rely on it. An unset top_p is None; 0 is refused.

    top_p_min, top_p_decay and top_p_reset_ids without top_p are refused: TensorRT-LLM takes them
    and does nothing with them.
    """

    def require(name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise InvalidRequestError(
                f"sampling_config.{name}", f"{rule}, got {getattr(sampling, name)}"
            )

    def require_share(name: str) -> None:
        value = getattr(sampling, name)
        require(name, value is None or 0 < value <= 1, "must be in (0, 1]")

    def require_natural(name: str) -> None:
        value = getattr(sampling, name)
        require(name, value is None or 0 <= value < 2**31, "must be in [0, 2^31)")

    s = sampling
    require("beam_width", s.beam_width == 1, "only 1 is supported")
    require("num_return_sequences", s.num_return_sequences in (None, 1), "only 1 is supported")
    for name in ("top_p", "top_p_min", "top_p_decay"):
        require_share(name)
    for name in ("top_k", "min_tokens", "prompt_ignore_length", "no_repeat_ngram_size"):
        require_natural(name)
    require(
        "no_repeat_ngram_size",
        (s.no_repeat_ngram_size or 0) <= _MAX_NGRAM_SIZE,
        f"must be <= {_MAX_NGRAM_SIZE}",
    )
    temperature = 0.0 if s.temperature is None else s.temperature
    require("temperature", _is_float32(temperature) and temperature >= 0, "must be finite and >= 0")
    repetition = 1.0 if s.repetition_penalty is None else s.repetition_penalty
    require(
        "repetition_penalty", _is_float32(repetition) and repetition > 0, "must be finite and > 0"
    )
    for name in ("presence_penalty", "frequency_penalty"):
        require(name, _is_float32(getattr(s, name) or 0.0), "must be finite")
    require("min_p", s.min_p is None or 0 <= s.min_p <= 1, "must be in [0, 1]")
    require("seed", s.seed is None or 0 <= s.seed <= _MAX_SEED, "must be in [0, 2^64)")
    reset_id = s.top_p_reset_ids
    require(
        "top_p_reset_ids",
        reset_id is None or 0 <= reset_id < vocab_size,
        f"must be in [0, {vocab_size})",
    )
    if s.top_p is None:
        require("top_p_decay", s.top_p_decay in (None, 1.0), "needs a top_p that decays")
        require("top_p_min", s.top_p_min is None, "needs a top_p that decays")
        require("top_p_reset_ids", s.top_p_reset_ids is None, "needs a top_p that decays")


def _check_retention(config: KvCacheRetentionConfig | None) -> None:
    """Ranges must not overlap; priorities are in [0, 100]; durations are not negative."""
    if config is None:
        return
    parts = config.token_range_retention_configs
    priorities = [config.decode_retention_priority, *(part.priority for part in parts)]
    if not all(0 <= priority <= 100 for priority in priorities):
        raise InvalidRequestError("kv_cache_retention_config", "priorities must be in [0, 100]")
    durations = [config.decode_duration_ms, *(part.duration_ms for part in parts)]
    if any(duration is not None and duration < timedelta(0) for duration in durations):
        raise InvalidRequestError("kv_cache_retention_config", "durations must be >= 0")
    end = 0
    for part in sorted(parts, key=lambda part: part.token_start):
        if part.token_start < end:
            raise InvalidRequestError(
                "kv_cache_retention_config", "token ranges must not overlap or be negative"
            )
        if part.token_end is not None and part.token_end <= part.token_start:
            raise InvalidRequestError("kv_cache_retention_config", "a token range is empty")
        end = sys.maxsize if part.token_end is None else part.token_end


def _is_float32(value: float) -> bool:
    """False for NaN, the infinities and what float32 takes for one."""
    return -_MAX_FLOAT32 <= value <= _MAX_FLOAT32


def _check_words(name: str, words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    for word in words:
        if not word:
            raise InvalidRequestError(name, "a word must have at least one token")
        _check_token_ids(name, word, vocab_size)


def _check_bad_word_limits(words: tuple[tuple[int, ...], ...]) -> None:
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidRequestError("bad_words", f"at most {_MAX_BAD_WORDS}, got {len(words)}")
    num_tokens = sum(map(len, words))
    if num_tokens > _MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            "bad_words", f"at most {_MAX_BAD_WORD_TOKENS} tokens together, got {num_tokens}"
        )


def _check_embedding_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if not bias:
        return
    token_ids = tuple(token_id for token_id, _ in bias)
    _check_token_ids("embedding_bias", token_ids, vocab_size)
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequestError("embedding_bias", "a token id must come once")
    for token_id, value in bias:
        if not _is_float32(value):
            raise InvalidRequestError(
                "embedding_bias", f"the value of token {token_id} must be finite, got {value}"
            )


def _check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(name, f"token id {bad} is not in [0, {vocab_size})")
