"""The requests that TensorRT-LLM has in hand: when each may be cancelled, and what it sends.

Owns the state per request id. Pure: no engine, no clock, no lock; its owner calls it under one.

Invariants:
- a cancel is passed on only for a request of which a token was seen since its enqueue, and since
  the engine last paused requests by itself: TensorRT-LLM 1.2 keeps the blocks of a request that is
  cancelled in the middle of its chunked prompt for reuse, computed or not. Until then the cancel
  is kept, and passed on with the next token;
- each request gets exactly one final response. One that asked for no stream gets that one alone,
  with everything; a cancelled one gets no tokens in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tokenflow.executor.api import FinishReason, Request, RequestPerfMetrics, Response, Result
from tokenflow.executor.trtllm_values import finish_reason, kv_cache_metrics


class LiveRequest:
    """One of them. num_tokens: prompt and what was generated so far."""

    __slots__ = (
        "is_cancel_kept", "is_cancel_wanted", "is_computing_context", "log_probs", "num_generated",
        "request", "token_ids",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_generated = 0
        self.is_computing_context = True
        self.is_cancel_wanted = False
        self.is_cancel_kept = False  # until the next token
        self.token_ids: list[int] = []  # of a request that does not stream
        self.log_probs: list[float] = []

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_token_ids) + self.num_generated


class LiveRequests:
    """All of them. tokens_per_block: of the engine."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._live: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def ids(self) -> list[int]:
        """Of all, oldest first."""
        return list(self._live)

    def add(self, request_id: int, request: Request) -> None:
        """It was enqueued. What only the engine needs of it, weights, is let go."""
        if request.lora_config is not None:
            request = msgspec.structs.replace(request, lora_config=None)
        self._live[request_id] = LiveRequest(request)

    def is_computing_context(self, request_id: int) -> bool:
        """True if it may be in the middle of its context."""
        return self._live[request_id].is_computing_context

    def want_cancel(self, request_id: int) -> bool:
        """Somebody cancels it; True if the engine may be told now."""
        live = self._live.get(request_id)
        if live is None or live.is_cancel_wanted:
            return False
        live.is_cancel_wanted = True
        live.is_cancel_kept = live.is_computing_context
        return not live.is_cancel_kept

    def paused_by_engine(self) -> None:
        """The engine paused some requests by itself; nobody knows which. Their context is computed
        again, so that until its next token each of them might be in the middle of it."""
        for live in self._live.values():
            live.is_computing_context = True

    def mean_context_tokens(self) -> float:
        """KV tokens that a generating request reads, on average; 0 without any."""
        generating = [r for r in self._live.values() if r.num_generated]
        return sum(r.num_tokens for r in generating) / len(generating) if generating else 0.0

    def fail(self, request_id: int, message: str) -> Response | None:
        """It ends with an error; None for one that has ended."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        return Response(request_id=request_id, client_id=live.request.client_id, error=message)

    def fail_all(self, message: str) -> list[Response]:
        """All end with an error."""
        failed = [self.fail(request_id, message) for request_id in self.ids()]
        return [response for response in failed if response is not None]

    def take(
        self, request_id: int, given: Any, *, is_stale: bool = False
    ) -> tuple[Response | None, bool]:
        """A result of the engine: what the caller gets (None: nothing yet), and whether a kept
        cancel is to be passed on now. is_stale: its tokens may be from before the engine last
        paused requests by itself, and so say nothing of what it computes now."""
        live = self._live[request_id]
        reason = finish_reason(given.finish_reasons[0])
        token_ids = list(given.output_token_ids[0]) if given.output_token_ids else []
        try:
            log_probs = _new_log_probs(live, given.log_probs, len(token_ids))
        except ValueError as error:
            return self.fail(request_id, str(error)), not is_stale
        is_past_context = bool(token_ids) and not is_stale
        is_due = is_past_context and live.is_cancel_kept
        if is_past_context:
            live.is_computing_context = live.is_cancel_kept = False
        live.num_generated += len(token_ids)
        if given.is_final:
            del self._live[request_id]
        result = self._result(live, given, reason, token_ids, log_probs)
        if result is None:
            return None, is_due
        response = Response(request_id=request_id, client_id=live.request.client_id, payload=result)
        return response, is_due and not given.is_final

    def _result(
        self,
        live: LiveRequest,
        given: Any,
        reason: FinishReason,
        token_ids: list[int],
        log_probs: list[float] | None,
    ) -> Result | None:
        request = live.request
        if not request.streaming:
            live.token_ids += token_ids
            live.log_probs += log_probs or []
            if not given.is_final:
                return None
            token_ids, log_probs = _whole(live, reason, log_probs is not None)
        elif not token_ids and not given.is_final:
            return None  # nothing new, as with a draft that was rejected
        return Result(
            is_final=given.is_final,
            output_token_ids=[token_ids],
            finish_reasons=[reason],
            log_probs=None if log_probs is None else [log_probs],
            cum_log_probs=None if given.cum_log_probs is None else list(given.cum_log_probs),
            sequence_index=given.sequence_index,
            is_sequence_final=given.is_sequence_final,
            decoding_iter=given.decoding_iter,
            request_perf_metrics=self._metrics(request, given.request_perf_metrics),
        )

    def _metrics(self, request: Request, given: Any) -> RequestPerfMetrics | None:
        """num_reused_tokens is at most this: the last block that was found may hold less than it
        could. How many of them came from the host is not told."""
        if given is None:
            return None
        metrics = kv_cache_metrics(given.kv_cache_metrics)
        num_reused = metrics.num_reused_blocks * self._tokens_per_block
        return RequestPerfMetrics(
            kv_cache_metrics=metrics,
            num_reused_tokens=min(num_reused, len(request.input_token_ids) - 1),
            first_iter=given.first_iter,
            last_iter=given.last_iter,
        )


def _whole(
    live: LiveRequest, reason: FinishReason, has_log_probs: bool
) -> tuple[list[int], list[float] | None]:
    """The one response of a request that does not stream."""
    is_cancelled = reason is FinishReason.CANCELLED
    prompt = live.request.input_token_ids
    output = live.request.output_config
    token_ids = [] if is_cancelled else live.token_ids
    if not output.exclude_input_from_output:
        token_ids = [*prompt, *token_ids]
    log_probs = [] if is_cancelled else live.log_probs
    return token_ids, log_probs if has_log_probs else None


def _new_log_probs(live: LiveRequest, given: Any, num_new: int) -> list[float] | None:
    """Those of the `num_new` tokens of a response. A streaming response may carry the log-probs of
    all tokens generated so far or of its own only; both are taken. Raises ValueError for any other
    number of them, but where no token came: a cancel takes the token of its step away, and may
    leave its log-prob."""
    if given is None:
        return None
    if not num_new:
        return []
    values = list(given[0]) if given else []
    first = live.num_generated
    if len(values) >= first + num_new:
        return values[first : first + num_new]
    if len(values) == num_new:
        return values
    raise ValueError(
        f"log_probs: TensorRT-LLM sent {len(values)} of them with {num_new} tokens after {first}"
    )


class FailedSteps:
    """Counts steps that failed for every request, one after the other.

    A step that fails ends all active requests with an error, and TensorRT-LLM goes on; what a
    sticky device error leaves fails again with the next ones. A failure counts once, however many
    requests it ends: only one of a request that came after the last failure is another one.
    """

    def __init__(self) -> None:
        self._last_ids: frozenset[int] = frozenset()
        self.num_in_a_row = 0

    def failed(self, request_id: int, live_ids: Iterable[int]) -> None:
        """A step failed `request_id`; live_ids: those in the engine now."""
        if request_id not in self._last_ids:
            self.num_in_a_row += 1
            self._last_ids = frozenset((*live_ids, request_id))

    def succeeded(self) -> None:
        """A token came: steps work."""
        if self.num_in_a_row:
            self.num_in_a_row = 0
            self._last_ids = frozenset()


def is_failed_step(message: str) -> bool:
    """True for the error that TensorRT-LLM gives every active request when a step fails."""
    return "forwardAsync" in message or "forwardSync" in message
