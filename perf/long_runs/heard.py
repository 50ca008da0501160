"""A request, and what one client heard of its answer.

Invariants: every response is checked as it comes (tokens continue where the last response ended,
nothing follows the end) and what is wrong is noted in `Heard.faults`, never raised; all instants
are CLOCK_MONOTONIC at receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request. inputs: all beside text_input and max_tokens; timeout_us: 0 for none."""

    request_id: str
    prompt: str
    max_tokens: int
    inputs: Mapping[str, object] = field(default_factory=dict)
    timeout_us: int = 0

    def values(self) -> dict[str, object]:
        """All inputs, as HTTP generate takes them: of fixed length unless `end_id` says else."""
        return {
            "text_input": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "end_id": -1,
            "return_num_output_tokens": True,
            **self.inputs,
        }


@dataclass(kw_only=True)
class Heard:
    """What a client got. arrivals: (receipt time, tokens) of each response with tokens.

    error: the message that ended the request. num_ends: final responses and errors.
    """

    question: Question
    send_time: float = 0.0
    end_time: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    error: str | None = None
    num_ends: int = 0
    faults: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, outputs: Mapping[str, Any], now: float, *, final: bool) -> None:
        """One response: text_output, num_output_tokens, token_index, finish_reason, log-probs."""
        if self.num_ends:
            self.faults.append(f"a response after the end: {dict(outputs)}")
        num_tokens = int(outputs.get("num_output_tokens", 0))
        if num_tokens:
            index = outputs.get("token_index")
            if index != self.num_tokens:
                self.faults.append(f"token_index {index} instead of {self.num_tokens}")
            self.num_tokens += num_tokens
            self.arrivals.append((now, num_tokens))
        self.text += outputs.get("text_output", "")
        log_probs = outputs.get("output_log_probs", ())
        self.log_probs += [log_probs] if isinstance(log_probs, float) else log_probs
        self.finish_reason = outputs.get("finish_reason", "") or self.finish_reason
        if final:
            if not self.finish_reason:
                self.faults.append("the answer ended without a finish reason")
            self._end(now)
        self._changed.set()

    def fail(self, message: str, now: float) -> None:
        """An error, which ends the request."""
        if self.num_ends:
            self.faults.append(f"an error after the end: {message}")
        self.error = message
        self._end(now)
        self._changed.set()

    def _end(self, now: float) -> None:
        self.num_ends += 1
        self.end_time = now

    async def wait_tokens(self, num_tokens: int) -> bool:
        """Wait for so many tokens; False when the request ends before. One waiter at a time."""
        while self.num_tokens < num_tokens and not self.num_ends:
            self._changed.clear()
            await self._changed.wait()
        return self.num_tokens >= num_tokens

    async def wait_end(self) -> None:
        """Wait for the end."""
        while not self.num_ends:
            self._changed.clear()
            await self._changed.wait()
