"""What each request of a driven server must produce, and whether what happens may happen.

`Model` knows of each request what it must produce (oracle.py) and what was done to it. With that,
each event, trace line and enqueue is either right at the moment at which it comes, or an assertion
fails. The driver says what it is doing (`doing`, `about`), for some things may only come of it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from tests.core.harness import VOCAB_SIZE, Harness
from tests.core.invariants import engine_of
from tests.core.oracle import Whole, whole
from tests.support.failing import FAILURE
from tests.support.stepped import LOSS
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Request
from tokenflow.preemption import derive_seed
from tokenflow.types import (
    EndReason,
    GenerateRequest,
    SessionColumns,
    SessionState,
    TokenEvent,
)

TOTALS: Counter[str] = Counter()
"""What was met in this process: virtual steps, kinds of ends, and the coordinators' counters."""

HEARD = ("hear", "notice")
PLANNED = ("plan", "submit")  # a submission may plan


@dataclass(slots=True)
class Asked:
    """One request in the model.

    is_refused: the engine will not take it. num_tokens: that its client has. ended: it had its end.
    held_until, hold_time, held_s: its client's hold, the beginning of the last one, and how long
    those that ended were. num_kills: engines whose loss it was told of.
    state, since: of its session, as seen after the last action.
    running_since: when it came to run, a renewed lease being no interruption.
    """

    request: GenerateRequest
    whole: Whole
    is_pausable: bool
    is_refused: bool
    num_tokens: int = 0
    ended: bool = False
    held_until: float | None = None
    hold_time: float = -math.inf
    held_s: float = 0.0
    num_kills: int = 0
    num_enqueues: int = 0
    num_started: int = 0
    num_pauses: int = 0
    paused_s: float = 0.0
    state: SessionState | None = None
    since: float = 0.0
    running_since: float = 0.0
    is_interrupted: bool = True

    @property
    def waiting_since(self) -> float:
        """From then on, what it waits for its start counts; not while it is held."""
        return self.request.arrival_time + self.held_s

    @property
    def num_missing(self) -> int:
        """Tokens that did not come yet."""
        return len(self.whole.token_ids) - self.num_tokens


def is_pausable(request: GenerateRequest, config: ServingConfig) -> bool:
    num_prompt = len(request.input_token_ids)
    longest = min(num_prompt + request.max_tokens, config.max_seq_len) - 1
    fits = config.enable_chunked_context or longest <= config.max_num_tokens
    return fits and request.sampling_config.top_p_decay is None


def is_too_long(request: GenerateRequest, config: ServingConfig) -> bool:
    """The engine must be able to compute a prompt, and what it restarts by itself, at once."""
    num_prompt = len(request.input_token_ids)
    if num_prompt > config.executor_config().max_input_len:
        return True
    longest = min(num_prompt + request.max_tokens, config.max_seq_len) - 1
    restarts = config.batch_scheduler_policy == "max_utilization"
    return restarts and not config.enable_chunked_context and longest > config.max_num_tokens


class Model:
    """The requests of one server, by handle.

    is_failure_news: the runner failed since the engine was last listened to.
    """

    def __init__(self, harness: Harness) -> None:
        self.h = harness
        self.config = harness.config
        self.asked: dict[int, Asked] = {}
        self.doing, self.about = "", 0
        self.is_failure_news = False
        self.num_traced: Counter[str] = Counter()
        self.num_requests_seen = 0
        self._num_events = self._num_traces = 0
        self._last_time = 0.0

    def ask(self, handle: int, request: GenerateRequest, *, is_malformed: bool) -> None:
        """A request is about to be submitted."""
        self.asked[handle] = Asked(
            request,
            whole(request, self.h.script, VOCAB_SIZE, self.config.max_seq_len),
            is_pausable(request, self.config),
            is_malformed or is_too_long(request, self.config),
        )

    def pass_time(self) -> None:
        """Before anything is done: whoever is paused has been so since the last time."""
        elapsed, self._last_time = self.h.now - self._last_time, self.h.now
        if elapsed:
            for session in self.h.coordinator.table:
                if session.state is SessionState.PREEMPTED:
                    self.asked[session.handle].paused_s += elapsed

    def observe(self) -> None:
        """Take in events, trace lines and enqueues since the last time."""
        for event in self.h.events[self._num_events :]:
            self._on_event(self.asked[event.handle], event)
        self._num_events = len(self.h.events)
        for name, _, fields in self.h.tracer.events[self._num_traces :]:
            self.num_traced[name] += 1
            if "request_id" in fields:
                self._on_traced(name, self.asked[int(fields["request_id"][1:])])
        self._num_traces = len(self.h.tracer.events)
        requests = engine_of(self.h).requests
        for id in range(self.num_requests_seen + 1, len(requests) + 1):
            self._on_enqueued(requests[id])
        self.num_requests_seen = len(requests)
        for session in self.h.coordinator.table:
            asked = self.asked[session.handle]
            if asked.state is not session.state:
                asked.state, asked.since = session.state, self.h.now

    def check_times(self, columns: SessionColumns) -> None:
        """The planner is told since when they run and wait."""
        for slot, state, running_since, wait_since in zip(
            columns.slot.tolist(),
            columns.state.tolist(),
            columns.running_since_time.tolist(),
            columns.wait_since_time.tolist(),
            strict=True,
        ):
            asked = self.asked[self.h.coordinator.table.at_slot(slot).handle]
            if state == SessionState.RUNNING:
                assert running_since == asked.running_since
            elif state == SessionState.WAITING:
                assert wait_since == asked.request.arrival_time
            elif state == SessionState.PREEMPTED:
                assert wait_since == asked.since

    def check(self) -> None:
        """The sessions and counters are what the model says."""
        table, c = self.h.coordinator.table, self.h.coordinator.counters
        for handle, asked in self.asked.items():
            session = table.get(handle)
            if session is None:
                assert asked.ended
                continue
            assert session.answered is asked.ended
            assert session.num_pauses == asked.num_pauses
            if not asked.ended:
                assert len(session.output_token_ids) == asked.num_tokens
                assert session.held_until == asked.held_until
        assert c.num_received == len(self.asked)
        assert c.num_output_tokens == sum(asked.num_tokens for asked in self.asked.values())
        assert c.num_pauses == self.num_traced["pause"]
        assert c.num_resumes == self.num_traced["resume"]
        assert c.num_recovered == self.num_traced["recovered"]
        num_enqueues = sum(asked.num_enqueues for asked in self.asked.values())
        assert num_enqueues == self.num_traced["admit"] + self.num_traced["resume"]

    # -- events --------------------------------------------------------------------------------

    def _on_event(self, asked: Asked, event: TokenEvent) -> None:
        assert not asked.ended, "an event after the end"
        assert event.request_id == asked.request.request_id
        assert event.time == self.h.now
        start, end = asked.num_tokens, asked.num_tokens + len(event.token_ids)
        assert event.token_ids == asked.whole.token_ids[start:end]
        if asked.request.output_config.return_log_probs:
            assert event.log_probs == asked.whole.log_probs[start:end]
        else:
            assert event.log_probs == ()
        asked.num_tokens = end
        if event.token_ids:
            assert self.doing in HEARD
        if event.end is None:
            assert event.token_ids
            assert event.usage is None
            return
        TOTALS[f"end {event.end.value}"] += 1
        self._check_usage(asked, event)
        self._check_end(asked, event)
        asked.ended, asked.held_until = True, None

    def _check_usage(self, asked: Asked, event: TokenEvent) -> None:
        usage, request = event.usage, asked.request
        if usage is None:
            assert (self.doing, self.about) == ("submit", event.handle)  # never a session
            return
        assert usage.num_input_tokens == len(request.input_token_ids)
        assert usage.num_output_tokens == asked.num_tokens
        if request.output_config.return_log_probs:
            assert usage.cum_log_prob == sum(asked.whole.log_probs[: asked.num_tokens])
        assert usage.num_pauses == asked.num_pauses
        assert math.isclose(usage.paused_s, asked.paused_s, abs_tol=1e-6)

    def _check_end(self, asked: Asked, event: TokenEvent) -> None:
        """The end is one that this request may have at this moment."""
        assert (event.error is not None) is (event.end is EndReason.ERROR)
        if event.end in (EndReason.STOP, EndReason.LENGTH):
            assert self.doing in HEARD
            assert asked.num_missing == 0
            assert event.end is asked.whole.end
            assert not asked.is_refused
        elif event.end is EndReason.CANCELLED:
            assert (self.doing, self.about) == ("cancel", event.handle)
        elif event.end is EndReason.TIMEOUT:
            assert self.doing in PLANNED
            assert asked.request.timeout_s is not None
            assert asked.request.arrival_time + asked.request.timeout_s <= self.h.now
        elif self.doing in HEARD:
            self._check_engine_error(asked, event.error or "", event.retryable)
        else:
            self._check_refusal(asked, event)
        assert not event.token_ids or self.doing in HEARD

    def _check_refusal(self, asked: Asked, event: TokenEvent) -> None:
        """An error of the server's own."""
        coordinator, error = self.h.coordinator, event.error or ""
        if self.doing == "shutdown":
            assert (error, event.retryable) == ("shut down", True)
        elif "max_queue_delay_s" in error:
            assert self.doing in PLANNED
            assert event.retryable
            assert asked.num_tokens == 0
            assert asked.held_until is None
            assert asked.waiting_since <= self.h.now - self.config.max_queue_delay_s
        elif "max_queue_size" in error:
            assert (self.doing, self.about, event.retryable) == ("submit", event.handle, True)
            assert len(coordinator.table) >= self.config.max_queue_size
        else:
            assert "KV blocks" in error
            assert (self.doing, self.about, event.retryable) == ("submit", event.handle, False)
            num_prompt = len(asked.request.input_token_ids)
            longest = min(num_prompt + asked.request.max_tokens, self.config.max_seq_len) - 1
            assert -(-longest // self.config.tokens_per_block) > coordinator.num_total_blocks

    def _check_engine_error(self, asked: Asked, error: str, retryable: bool) -> None:
        """An error that the engine said, or its end."""
        if "the engine was lost" in error:
            assert retryable
            # What an engine said of a request before it was lost, but is heard after that, is
            # taken for the loss: the next engine will say it again.
            assert LOSS in error or asked.is_refused or self.is_failure_news
            if "a second time" in error:
                assert asked.num_kills == 2
                TOTALS["second losses"] += 1
            else:
                assert "top_p decay" in error or "longer than a prompt may be" in error
                assert not asked.is_pausable
                assert asked.num_tokens
                assert asked.num_kills == 1
                TOTALS["losses of what cannot be paused"] += 1
            return
        assert not retryable
        if FAILURE in error:
            assert self.is_failure_news
            TOTALS["failed steps"] += 1
        else:
            assert "fetching new request" in error
            assert asked.is_refused
            assert asked.num_tokens == 0
            TOTALS["refused by the engine"] += 1

    # -- trace and engine ----------------------------------------------------------------------

    def _on_traced(self, name: str, asked: Asked) -> None:
        if name in ("admit", "resume"):
            assert asked.held_until is None, "started while it is held"
            assert not asked.ended
            assert (name == "resume") is (asked.num_tokens > 0)
            asked.num_started += 1
        elif name == "release":
            assert asked.held_until is None or asked.held_until <= self.h.now
            asked.held_until = None
            asked.held_s += self.h.now - asked.hold_time
        elif name in ("first_token", "resumed"):
            if asked.is_interrupted:
                asked.running_since, asked.is_interrupted = self.h.now, False
        elif name == "recovered":
            asked.is_interrupted = True
        elif name == "pause":
            asked.is_interrupted = True
            assert asked.is_pausable
            assert asked.num_tokens
            asked.num_pauses += 1
            assert asked.num_pauses <= asked.num_started

    def _on_enqueued(self, request: Request) -> None:
        """The engine is asked for exactly what is missing."""
        assert request.client_id is not None
        asked = self.asked[request.client_id]
        asked.num_enqueues += 1
        wanted, num_tokens = asked.request, asked.num_tokens
        streamed = asked.whole.token_ids[:num_tokens]
        assert request.input_token_ids == wanted.input_token_ids + streamed
        num_left = wanted.max_tokens - num_tokens
        if asked.is_pausable and self.config.lease_tokens:
            num_left = min(num_left, self.config.lease_tokens)
        assert request.max_tokens == num_left
        for name in ("end_id", "stop_words", "bad_words", "priority", "cache_salt_id"):
            assert getattr(request, name) == getattr(wanted, name)
        old, new = wanted.sampling_config, request.sampling_config
        for name in ("top_k", "top_p", "top_p_decay", "no_repeat_ngram_size"):
            assert getattr(new, name) == getattr(old, name)
        if old.min_tokens is None:
            assert new.min_tokens is None
        else:
            assert new.min_tokens == max(0, old.min_tokens - num_tokens)
        assert new.seed == derive_seed(old.seed, num_tokens)
        assert num_tokens == 0 or new.seed != old.seed
