"""A caller of an executor that checks the rules every response stream must keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from tokenflow.executor.api import (
    Executor,
    FinishReason,
    IterationStats,
    OutputConfig,
    Request,
    Response,
)
from tokenflow.inflight.scripts import Script

WAIT_S = 30.0


@dataclass
class Output:
    """Everything one request sent so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    deltas: list[list[int]] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    final: Response | None = None

    def add(self, response: Response) -> None:
        assert self.final is None, f"a response after the final one: {response}"
        if response.has_error():
            self.error, self.final = response.error_msg, response
            return
        result = response.result
        assert result.is_final == result.is_sequence_final
        assert len(result.output_token_ids) == len(result.finish_reasons) == 1
        self.deltas.append(result.output_token_ids[0])
        self.token_ids += result.output_token_ids[0]
        self.log_probs += result.log_probs[0] if result.log_probs else []
        if result.is_final:
            self.reason, self.final = result.finish_reasons[0], response
        else:
            assert result.finish_reasons == [FinishReason.NOT_FINISHED]
            assert result.output_token_ids[0], "an empty response that is not the end"

    @property
    def last_tokens(self) -> list[int]:
        """Tokens of the final response."""
        assert self.final is not None
        return self.final.result.output_token_ids[0]


class Client:
    """Enqueues, waits, and sorts responses by request; one per executor.

    script: what the engine's tokens come from, where they do.
    """

    def __init__(self, executor: Executor, script: Script | None = None) -> None:
        self.executor = executor
        self.script = script
        self.outputs: dict[int, Output] = {}
        self.order: list[int] = []  # ids in the order of their first response
        self.stats: list[IterationStats] = []
        self._next_salt = 1000

    def new_salt(self) -> int:
        """A cache_salt_id nobody used: a cold cache."""
        self._next_salt += 1
        return self._next_salt

    def request(self, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> Request:
        """A request that returns log-probs unless `fields` says otherwise."""
        fields.setdefault("output_config", OutputConfig(return_log_probs=True))
        return Request(input_token_ids=tuple(prompt), max_tokens=max_tokens, **fields)

    def enqueue(self, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> int:
        """Enqueue one; returns its id."""
        request_id = self.executor.enqueue_request(self.request(prompt, max_tokens, **fields))
        self._expect(request_id)
        return request_id

    def enqueue_together(self, requests: Sequence[Request]) -> list[int]:
        """Enqueue several in one call: however slow this process is, no step comes in between."""
        request_ids = self.executor.enqueue_requests(requests)
        for request_id in request_ids:
            self._expect(request_id)
        return request_ids

    def _expect(self, request_id: int) -> None:
        assert request_id not in self.outputs
        self.outputs[request_id] = Output()

    def pump(self, timeout_s: float = 1.0) -> None:
        for response in self.executor.await_responses(timedelta(seconds=timeout_s)):
            output = self.outputs[response.request_id]
            if output.final is None and not output.deltas:
                self.order.append(response.request_id)
            output.add(response)
        self.stats += self.executor.get_latest_iteration_stats()

    def until(self, condition: Callable[[], object]) -> None:
        """Take responses until `condition` holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.pump()

    def wait_tokens(self, request_id: int, count: int) -> Output:
        """Wait until `count` tokens came, or the end."""
        output = self.outputs[request_id]
        self.until(lambda: len(output.token_ids) >= count or output.final)
        return output

    def wait(self, *request_ids: int) -> Output:
        """Wait for the end of all; returns the output of the last one."""
        self.until(lambda: all(self.outputs[i].final for i in request_ids))
        return self.outputs[request_ids[-1]]

    def run(self, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> Output:
        return self.wait(self.enqueue(prompt, max_tokens, **fields))

    def settle(self) -> None:
        """Let the engine run empty, so that a test starts with nothing in flight."""
        for request_id, output in self.outputs.items():
            if output.final is None:
                self.executor.cancel_request(request_id)
        self.until(lambda: all(output.final for output in self.outputs.values()))
        self.stats.clear()
