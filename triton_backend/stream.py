"""From a request's token events to the pieces of its answer.

Owns the text state of one client request: detokenizer, stop strings, further end tokens, counts,
log-probs. Pure; used by the sender thread only. Invariants: every token of the answer is counted in
exactly one chunk, in order; an end token that ends the answer is no part of it, whether the engine
or this layer saw it; none ends it before min_tokens, and none has text; the texts of all chunks
joined are the answer, the same for stream=true and stream=false; exactly one chunk is final, and
nothing follows it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.types import EndReason, TokenEvent
from triton_backend.codec import TextRequest
from triton_backend.stop_strings import StopStrings
from triton_backend.text import TextTokenizer


class ErrorCode(enum.Enum):
    """Kinds of error that a client can tell apart; names as in Triton."""

    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One response.

    num_output_tokens: tokens counted in this response, those without text included.
    token_index: index of the first of them in the whole output.
    cum_log_prob: sum over the output so far.
    finish_reason: set on the final response only.
    error: the request failed; the response carries nothing else and is final.
    """

    text: str = ""
    num_output_tokens: int = 0
    token_index: int = 0
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0
    finish_reason: str = ""
    final: bool = False
    error: str | None = None
    error_code: ErrorCode = ErrorCode.INTERNAL


class TextStream:
    """One request's answer in the making.

    needs_finish: the final chunk came before the runtime's end of the request (a stop string, or an
        end token that the engine does not know), so the runtime must be told.
    """

    def __init__(self, request: TextRequest, tokenizer: TextTokenizer) -> None:
        self.request = request
        self.needs_finish = False
        shown_before = request.generate.input_token_ids if request.prefix else ()
        self._detokenizer = tokenizer.detokenizer(shown_before)
        self._stops = StopStrings(request.stop_strings)
        self._min_tokens = request.generate.sampling_config.min_tokens or 0
        self._texts: list[str] = [request.prefix] if request.prefix else []
        self._log_probs: list[float] = []
        self._num_new_tokens = 0
        self._num_sent_tokens = 0
        self._cum_log_prob = 0.0

    def push(self, events: Sequence[TokenEvent]) -> list[Chunk]:
        """Take events in order (several when the sender is behind); the responses to send now.

        One, or none yet (stream=false before its end); two when an error follows tokens, since an
        error carries none. After the final chunk the stream must not be used any more.
        """
        for event in events:
            at_end_token = self._take_tokens(event)
            if at_end_token or self._stops.matched is not None:
                self.needs_finish = event.end is None
                return [self._last_chunk(EndReason.STOP)]
            if event.end is EndReason.ERROR:
                code = ErrorCode.UNAVAILABLE if event.retryable else ErrorCode.INTERNAL
                message = event.error or "the request failed"
                return [*self._gathered(), Chunk(error=message, error_code=code, final=True)]
            if event.end is not None:
                return [self._last_chunk(event.end)]
        return self._gathered()

    def _gathered(self) -> list[Chunk]:
        """What a stream's client gets of an answer that has not ended."""
        is_due = self.request.generate.streaming and self._num_new_tokens
        return [self._chunk(None)] if is_due else []

    def _take_tokens(self, event: TokenEvent) -> bool:
        """Count the event's tokens and append their text, up to an end token (True), or up to and
        including the token that completes a stop string."""
        end = self._find_end_token(event.token_ids)
        token_ids = event.token_ids[:end]
        if self.request.stop_strings:
            for count, token_id in enumerate(token_ids, start=1):
                self._texts.append(self._stops.push(self._text_of((token_id,))))
                if self._stops.matched is not None:
                    token_ids = token_ids[:count]
                    break
        else:
            self._texts.append(self._text_of(token_ids))
        self._num_new_tokens += len(token_ids)
        log_probs = event.log_probs[: len(token_ids)]
        self._cum_log_prob += sum(log_probs)
        self._log_probs.extend(log_probs)
        return end is not None

    def _find_end_token(self, token_ids: Sequence[int]) -> int | None:
        """Index of the first token that may end the answer."""
        if self.request.further_end_ids.isdisjoint(token_ids):
            return None
        first = max(0, self._min_tokens - self._num_sent_tokens - self._num_new_tokens)
        for index in range(first, len(token_ids)):
            if token_ids[index] in self.request.further_end_ids:
                return index
        return None

    def _text_of(self, token_ids: Sequence[int]) -> str:
        ends = self.request.further_end_ids
        return self._detokenizer.push([token for token in token_ids if token not in ends])

    def _last_chunk(self, end: EndReason) -> Chunk:
        self._texts.append(self._stops.push(self._detokenizer.flush()))
        self._texts.append(self._stops.flush())
        return self._chunk(end if self._stops.matched is None else EndReason.STOP)

    def _chunk(self, end: EndReason | None) -> Chunk:
        chunk = Chunk(
            text="".join(self._texts),
            num_output_tokens=self._num_new_tokens,
            token_index=self._num_sent_tokens,
            log_probs=tuple(self._log_probs),
            cum_log_prob=self._cum_log_prob,
            finish_reason="" if end is None else end.value,
            final=end is not None,
        )
        self._num_sent_tokens += self._num_new_tokens
        self._num_new_tokens = 0
        self._texts.clear()
        self._log_probs.clear()
        return chunk
