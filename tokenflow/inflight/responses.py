"""Responses and errors of the engine, built from a sequence.

Owns what a response carries (TensorRT-LLM behaviour): streaming responses hold the tokens since the
previous one and never the prompt; others come once, with the prompt unless it is excluded; a
cancelled request's final response has no generated tokens.
"""

from __future__ import annotations

from tokenflow.executor.api import (
    FinishReason,
    Request,
    RequestPerfMetrics,
    Response,
    Result,
)
from tokenflow.inflight.sequence import SequenceState

_NOT_FINISHED = FinishReason.NOT_FINISHED
"""By a name of its own: before Python 3.12 a member is looked up by a call, and this one is asked
for with every token."""


def result_response(sequence: SequenceState) -> Response | None:
    """What is to be sent after a step: new tokens, the end, or nothing (None). Marks it as sent."""
    request, reason = sequence.request, sequence.finish_reason
    is_final = reason is not _NOT_FINISHED
    start = sequence.num_sent
    num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
    has_new = request.streaming and start < num_generated
    if not is_final and not has_new:
        return None
    sequence.num_sent = num_generated
    token_ids = sequence.token_ids[sequence.num_prompt_tokens + start :]
    if not is_final and not request.output_config.return_log_probs:
        return tokens_response(
            sequence.request_id, request.client_id, token_ids, sequence.num_sampled
        )
    if not request.streaming and not request.output_config.exclude_input_from_output:
        token_ids = list(request.input_token_ids) + token_ids
    return _response(sequence, token_ids, start, reason)


def tokens_response(
    request_id: int, client_id: int | None, token_ids: list[int], num_sampled: int
) -> Response:
    """More tokens of a streaming request that goes on, and nothing beside them; num_sampled: tokens
    sampled for it."""
    return Response(
        request_id=request_id,
        client_id=client_id,
        payload=Result(
            is_final=False,
            output_token_ids=[token_ids],
            finish_reasons=[_NOT_FINISHED],
            decoding_iter=num_sampled,
        ),
    )


def cancelled_response(sequence: SequenceState) -> Response:
    """The one final response of a cancelled request: CANCELLED and no generated tokens."""
    request = sequence.request
    keep_prompt = not request.streaming and not request.output_config.exclude_input_from_output
    token_ids = list(request.input_token_ids) if keep_prompt else []
    return _response(sequence, token_ids, len(sequence.log_probs), FinishReason.CANCELLED)


def error_response(request_id: int, request: Request, message: str) -> Response:
    """An error; always final."""
    return Response(request_id=request_id, client_id=request.client_id, error=message)


def refusal_response(request_id: int, request: Request, error: Exception) -> Response:
    """The error of a request that the engine does not take."""
    message = f"Encountered an error when fetching new request: {error}"
    return error_response(request_id, request, message)


def _response(
    sequence: SequenceState, token_ids: list[int], start: int, reason: FinishReason
) -> Response:
    """start: first generated token of which the log-prob is told; the prompt has none."""
    output = sequence.request.output_config
    is_final = reason is not _NOT_FINISHED
    metrics = None
    if is_final and output.return_perf_metrics:
        metrics = RequestPerfMetrics(
            kv_cache_metrics=sequence.kv_metrics,
            num_reused_tokens=sequence.num_reused_tokens,
            num_onboarded_blocks=sequence.num_onboarded_blocks,
            first_iter=sequence.first_iter,
            last_iter=sequence.last_iter,
        )
    return Response(
        request_id=sequence.request_id,
        client_id=sequence.request.client_id,
        payload=Result(
            is_final=is_final,
            output_token_ids=[token_ids],
            finish_reasons=[reason],
            log_probs=[sequence.log_probs[start:]] if output.return_log_probs else None,
            cum_log_probs=[sequence.cum_log_prob] if output.return_log_probs else None,
            is_sequence_final=is_final,
            decoding_iter=sequence.num_sampled,
            request_perf_metrics=metrics,
        ),
    )
