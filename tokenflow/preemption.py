"""Pause and resume on an executor that has neither.

Owns what a (re)start looks like to the engine, and what may never be paused.

A pause cancels the request, or comes at the end of a lease: an enqueue that asked for fewer tokens
than the request wants. The engine keeps the KV of prompt + streamed tokens in its reuse cache. A
resume enqueues prompt + streamed tokens, with the limits that remain. Penalties, n-grams, stop
words and bad words look at the whole sequence in the engine, so they carry over unchanged, with the
prompt_ignore_length of the client's prompt; log-probs and counts restart in the engine and are
accumulated by the session.

Sampled requests: the engine restarts its random stream at every enqueue, so each resume gets a seed
derived from (seed, tokens generated so far). A paused sampled request is therefore another sample
than an uninterrupted one; a greedy one continues with the same tokens. The token of the step in
flight is lost with a cancel and drawn again at the resume, unless it ended the request: the chance
to end at the position of a pause is 1 - (1 - p)² instead of p. The end of a lease loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tokenflow.executor.api import KvCacheRetentionConfig, OutputConfig, Request
from tokenflow.executor.lora import LoraConfig
from tokenflow.types import GenerateRequest

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class UnpausableKind:
    """A kind of request that runs to completion once it started.

    name: what an error tells the client. why: for the documentation.
    applies(request, max_seq_len, max_input_len): whether the request is one.
    """

    name: str
    why: str
    applies: Callable[[GenerateRequest, int, int], bool]


UNPAUSABLE_KINDS = (
    UnpausableKind(
        "beam search",
        "the engine keeps the beams, and a resume has one prompt",
        lambda request, *_: request.sampling_config.beam_width > 1,
    ),
    UnpausableKind(
        "several return sequences",
        "the engine keeps the siblings, and a resume has one prompt",
        lambda request, *_: (request.sampling_config.num_return_sequences or 1) > 1,
    ),
    UnpausableKind(
        "top_p decay",
        "the decayed top_p is kept in the engine and starts anew at every enqueue",
        lambda request, *_: (
            request.sampling_config.top_p_decay not in (None, 1.0)
            or request.sampling_config.top_p_min is not None  # acts from the second token on
        ),
    ),
    UnpausableKind(
        "longer than a prompt may be",
        "a resume's prompt holds the output so far; without chunked context a prompt is limited to "
        "max_num_tokens",
        lambda request, max_seq_len, max_input_len: (
            min(len(request.input_token_ids) + request.max_tokens, max_seq_len) - 1 > max_input_len
        ),
    ),
)
"""The one table of what may never be paused: kinds that keep state in the engine which a new
request with a longer prompt does not rebuild, or whose resume the engine would refuse. What this
server refuses anyway (guided decoding, logits outputs, prompt tuning, speculative modes) is not
here."""


def unpausable_reason(
    request: GenerateRequest, *, max_seq_len: int, max_input_len: int
) -> str | None:
    """Why a request can never be paused (a name of UNPAUSABLE_KINDS), or None.

    max_input_len: longest prompt that the engine takes, tokens.
    """
    for kind in UNPAUSABLE_KINDS:
        if kind.applies(request, max_seq_len, max_input_len):
            return kind.name
    return None


def lease_of(request: GenerateRequest, num_generated: int, lease_tokens: int) -> int:
    """Tokens that the next enqueue may generate after `num_generated`: at least 1.

    lease_tokens: at most so many; 0 = all that is left.
    """
    rest = max(1, request.max_tokens - num_generated)
    return min(rest, lease_tokens) if lease_tokens else rest


def derive_seed(seed: int | None, num_generated: int) -> int | None:
    """uint64 seed of the part of a request that starts after `num_generated` tokens.

    The first part keeps the client's seed; unset stays unset, which the engine takes as 0. Mixing
    is splitmix64's finaliser, so that parts of one request and requests with neighbouring seeds
    get unrelated streams.
    """
    if num_generated == 0:
        return seed
    z = ((seed or 0) + num_generated * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def engine_request(
    request: GenerateRequest,
    output_token_ids: Sequence[int],
    client_id: int,
    max_tokens: int | None = None,
    retention: KvCacheRetentionConfig | None = None,
    lora_config: LoraConfig | None = None,
) -> Request:
    """What to enqueue so that the request goes on after `output_token_ids` (empty at its start).

    max_tokens: of this enqueue (a lease); None = all that is left.
    retention: what its blocks are worth (retention.py); None = the engine's default.
    lora_config: how its LoRA adapter is named (adapters.py); None = as in `request`.

    Always streaming: a cancelled non-streaming request would lose every token (executor surface).
    Perf metrics are always asked for; they say how much of a resume was reused.
    """
    num_generated = len(output_token_ids)
    sampling = request.sampling_config
    if num_generated:
        min_tokens, ignored = sampling.min_tokens, sampling.prompt_ignore_length
        sampling = msgspec.structs.replace(
            sampling,
            seed=derive_seed(sampling.seed, num_generated),
            min_tokens=None if min_tokens is None else max(0, min_tokens - num_generated),
            # The output is a part of this prompt, and is not to be ignored.
            prompt_ignore_length=(
                None if ignored is None else min(ignored, len(request.input_token_ids))
            ),
        )
    return Request(
        input_token_ids=(*request.input_token_ids, *output_token_ids),
        max_tokens=request.max_tokens - num_generated if max_tokens is None else max_tokens,
        streaming=True,
        sampling_config=sampling,
        output_config=OutputConfig(
            return_log_probs=request.output_config.return_log_probs,
            exclude_input_from_output=True,
            return_perf_metrics=True,
        ),
        end_id=request.end_id,
        stop_words=request.stop_words,
        bad_words=request.bad_words,
        embedding_bias=request.embedding_bias,
        kv_cache_retention_config=retention,
        client_id=client_id,
        priority=request.priority,
        cache_salt_id=request.cache_salt_id,
        lora_config=request.lora_config if lora_config is None else lora_config,
    )
