"""Requests that are paused and resumed at exact places, several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tests.contract.client import Client, Output
from tokenflow.executor.api import FinishReason
from tokenflow.preemption import engine_request
from tokenflow.types import GenerateRequest


class Story:
    """One request, cancelled after the given numbers of tokens and enqueued again with what was
    streamed up to there; tokens that came while the cancel was on its way are thrown away, so that
    a pause at 13 is one at 13 whatever the engine does meanwhile. One that ended there is over."""

    def __init__(self, client: Client, request: GenerateRequest, pauses: Sequence[int]) -> None:
        self._client = client
        self._request = request
        self._pauses = sorted(pauses)
        self.result = Output()
        self._cancelled = False
        self._current = self._enqueue()

    @property
    def is_over(self) -> bool:
        return self.result.reason is not None

    def _enqueue(self) -> int:
        request = engine_request(self._request, self.result.token_ids, client_id=1)
        (request_id,) = self._client.enqueue_together([request])
        return request_id

    def go_on(self) -> None:
        """Do what the responses so far ask for."""
        output = self._client.outputs[self._current]
        assert output.error is None, output.error
        num_tokens = len(self.result.token_ids) + len(output.token_ids)
        if self._pauses and num_tokens >= self._pauses[0] and not self._cancelled:
            self._cancelled = True
            self._client.executor.cancel_request(self._current)
        if output.final is None or self.is_over:
            return
        kept = len(output.token_ids)
        if self._cancelled:
            kept = self._pauses.pop(0) - len(self.result.token_ids)
        self.result.token_ids += output.token_ids[:kept]
        self.result.log_probs += output.log_probs[:kept]
        ended = output.reason is not FinishReason.CANCELLED and kept == len(output.token_ids)
        if ended:
            self.result.reason = output.reason
        else:
            self._cancelled = False
            self._current = self._enqueue()


def run_stories(client: Client, stories: Sequence[Story]) -> list[Output]:
    """All of them to their ends; what each client got, pauses or not."""

    def over() -> bool:
        for story in stories:
            story.go_on()
        return all(story.is_over for story in stories)

    client.until(over)
    return [story.result for story in stories]
