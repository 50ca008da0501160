"""Requests on an engine, from one thread: sent, read, paused, resumed; and what its KV events say.

Invariants: no call waits past the deadline; a request that fails raises SuiteError with the
engine's message; after an end nothing more of that request comes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from perf.trtllm_suite.values import Deadline, SuiteError
from tokenflow.executor.api import (
    Executor,
    FinishReason,
    IterationStats,
    OutputConfig,
    Request,
    RequestPerfMetrics,
)
from tokenflow.kv_mirror import KvMirror

_WAIT = timedelta(seconds=0.2)
_SETTLE_S = 0.2
FIRST_SALT = 1 << 20


@dataclass(kw_only=True)
class Output:
    """What came of one enqueue. times: receipt instant of each token."""

    enqueue_time: float
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    end_time: float = 0.0
    metrics: RequestPerfMetrics | None = None

    @property
    def values(self) -> tuple[list[int], list[float]]:
        """For compare.py."""
        return self.token_ids, self.log_probs

    @property
    def first_token_s(self) -> float:
        """From the enqueue to the first token."""
        return self.times[0] - self.enqueue_time

    @property
    def num_reused_blocks(self) -> int:
        """Blocks of the prompt that were found. Raises SuiteError where the engine did not tell."""
        if self.metrics is None:
            raise SuiteError("the final response has no request_perf_metrics")
        return self.metrics.kv_cache_metrics.num_reused_blocks


class Streams:
    """On one executor that nobody else reads from. mirror: of its KV cache; None without events."""

    _salts = itertools.count(FIRST_SALT)

    def __init__(self, executor: Executor, tokens_per_block: int) -> None:
        self.executor = executor
        self.deadline = Deadline(60.0)
        self.stats: list[IterationStats] = []
        self._outputs: dict[int, Output] = {}
        self._events = executor.get_kv_cache_event_manager()
        self.mirror = None if self._events is None else KvMirror(tokens_per_block)

    def new_salt(self) -> int:
        """A cache_salt_id that nobody used: nothing is found under it."""
        return next(self._salts)

    # -- requests ------------------------------------------------------------------------------

    def enqueue(self, prompt: Sequence[int], max_tokens: int, salt: int | None = None) -> int:
        """Greedy, streamed, to its full length, with log-probs and metrics. Returns its id."""
        request = Request(
            input_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            cache_salt_id=salt,
            output_config=OutputConfig(return_log_probs=True, return_perf_metrics=True),
        )
        now = time.monotonic()
        request_id = self.executor.enqueue_request(request)
        self._outputs[request_id] = Output(enqueue_time=now)
        return request_id

    def output(self, request_id: int) -> Output:
        """What came so far."""
        return self._outputs[request_id]

    def run(self, prompt: Sequence[int], max_tokens: int, salt: int | None = None) -> Output:
        """To its end, which must be its full length."""
        return self.finish(self.enqueue(prompt, max_tokens, salt))

    def finish(self, request_id: int) -> Output:
        """Wait for the end. Raises SuiteError when it was cut short."""
        output = self.wait_end(request_id)
        if output.reason is not FinishReason.LENGTH:
            raise SuiteError(f"a request ended with {output.reason}, LENGTH was expected")
        return output

    def wait_end(self, request_id: int) -> Output:
        """Wait for the end, whatever it is."""
        output = self._outputs[request_id]
        self.until(lambda: output.reason is not None, "the end of a request")
        return output

    def wait_tokens(self, request_id: int, num_tokens: int) -> Output:
        """Wait until so many tokens came, or the end."""
        output = self._outputs[request_id]
        self.until(
            lambda: len(output.token_ids) >= num_tokens or output.reason is not None,
            f"{num_tokens} tokens of a request",
        )
        return output

    def pause(self, request_id: int, num_tokens: int) -> Output:
        """Cancel once so many tokens came, and take what comes until the end of that."""
        self.wait_tokens(request_id, num_tokens)
        self.executor.cancel_request(request_id)
        return self.wait_end(request_id)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Read responses until `condition` holds."""
        while not condition():
            self.deadline.check(what)
            self.read()

    # -- reading -------------------------------------------------------------------------------

    def read(self, wait: timedelta = _WAIT) -> None:
        """Take what is there."""
        responses = self.executor.await_responses(wait)
        now = time.monotonic()
        self.read_events()
        self.stats += self.executor.get_latest_iteration_stats()
        for response in responses:
            output = self._outputs[response.request_id]
            if response.has_error():
                output.reason = FinishReason.NOT_FINISHED
                raise SuiteError(f"a request failed: {response.error_msg}")
            result = response.result
            if output.reason is not None:
                raise SuiteError("a response came after the final one")
            output.token_ids += result.output_token_ids[0]
            output.log_probs += result.log_probs[0] if result.log_probs else []
            output.times += [now] * len(result.output_token_ids[0])
            if result.is_final:
                output.reason, output.end_time = result.finish_reasons[0], now
                output.metrics = result.request_perf_metrics

    def read_events(self) -> None:
        """Bring the mirror up to date."""
        if self.mirror is not None and self._events is not None:
            self.mirror.apply(self._events.get_latest_events(0))

    def end_all(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        for request_id, output in self._outputs.items():
            if output.reason is None:
                self.executor.cancel_request(request_id)
        self.until(lambda: all(o.reason is not None for o in self._outputs.values()), "an end")
        self._outputs.clear()

    def settle(self) -> None:
        """End all, and wait until statistics and events of the last iterations are in."""
        self.end_all()
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            self.read(timedelta(seconds=0.05))
        self.stats.clear()
