"""One request on its way through the engine: the only home of its tokens.

Owns the states and which changes of them there are; `session_table.SessionTable` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenflow.reader import Reader
from tokenflow.types import GenerateRequest, SessionState, Usage

_S = SessionState

TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.PREFILLING: frozenset({_S.RUNNING, _S.WAITING, _S.CANCELLING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PAUSING, _S.PREEMPTED, _S.CANCELLING, _S.FINISHED}),
    _S.PAUSING: frozenset({_S.PREEMPTED, _S.CANCELLING, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RESUMING, _S.FINISHED}),
    _S.RESUMING: frozenset({_S.RUNNING, _S.PREEMPTED, _S.CANCELLING, _S.FINISHED}),
    _S.CANCELLING: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}
"""PREFILLING -> WAITING and RESUMING -> PREEMPTED: the engine was lost, or does not have the LoRA
adapter any more. RUNNING -> PREEMPTED: it was lost, or a lease ended."""

IN_ENGINE = frozenset({_S.PREFILLING, _S.RUNNING, _S.PAUSING, _S.RESUMING, _S.CANCELLING})
"""States in which the engine holds the request."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One request from arrival to its end.

    output_token_ids: every token generated so far, sent to the client exactly once, in order.
    executor_request_id: the engine's id while the engine holds it (a new one at each resume).
    num_enqueued_tokens: length of the prompt at the last enqueue (client's prompt + streamed).
    num_resume_tokens, num_host_blocks: what a resume computes and brings back from the host, as far
        as is known; of the last one, while it is in the engine (no blocks once that is over).
    num_copied_blocks: leading blocks that have a copy on the host, while it runs.
    is_left_in_cache: its KV was left to the engine's cache at its pause, and neither given up by
        choice since nor lost with an engine: what a resume must compute of it was pushed out.
    num_shared_tokens: leading tokens of the prompt that other requests began with too, as of the
        last enqueue.
    num_filled_blocks: KV blocks that it has filled in the engine, 0 outside.
    stays_until: output tokens up to which what it occupies stays, see Occupancy.
    lease_end: number of output tokens at which the engine ends the present enqueue although the
        request goes on; None without a lease.
    renews_lease: its lease has just ended, and no plan has given its place to others.
    num_losses: engines that were lost while they held the request.
    held_until: the client holds its stream paused until this instant; None = it does not.
    hold_time: when the hold that is on, or the last one, began.
    held_s: length of all holds that have ended.
    answered: the client already got its end; what the engine still says is discarded.
    names_lora_only: its last enqueue named its LoRA adapter without the weights.
    """

    handle: int
    slot: int
    request: GenerateRequest
    reader: Reader
    state: SessionState = SessionState.WAITING
    executor_request_id: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    cum_log_prob: float = 0.0
    first_token_time: float | None = None
    last_transition_time: float = 0.0
    enqueue_time: float = 0.0
    num_enqueued_tokens: int = 0
    num_resume_tokens: int = 1
    num_host_blocks: int = 0
    num_copied_blocks: int = 0
    is_left_in_cache: bool = False
    num_shared_tokens: int = 0
    num_filled_blocks: int = 0
    stays_until: int = -1
    num_pauses: int = 0
    paused_s: float = 0.0
    lease_end: int | None = None
    renews_lease: bool = False
    num_losses: int = 0
    held_until: float | None = None
    hold_time: float = float("-inf")
    held_s: float = 0.0
    answered: bool = False
    names_lora_only: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence: prompt and generated."""
        return len(self.request.input_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence: prompt and generated."""
        return [*self.request.input_token_ids, *self.output_token_ids]

    @property
    def deadline(self) -> float:
        """Instant at which the request's own time limit ends it; +inf without one."""
        timeout_s = self.request.timeout_s
        return float("inf") if timeout_s is None else self.request.arrival_time + timeout_s

    @property
    def at_lease_end(self) -> bool:
        """True when the engine's LENGTH is the lease's and not the request's."""
        num_generated = len(self.output_token_ids)
        return num_generated == self.lease_end and num_generated < self.request.max_tokens

    def usage(self, now: float) -> Usage:
        """Counts over the whole life of the request, a pause that is still on included."""
        paused_s = self.paused_s
        if self.state is _S.PREEMPTED:
            paused_s += now - self.last_transition_time
        return Usage(
            num_input_tokens=len(self.request.input_token_ids),
            num_output_tokens=len(self.output_token_ids),
            cum_log_prob=self.cum_log_prob,
            num_pauses=self.num_pauses,
            paused_s=paused_s,
        )
