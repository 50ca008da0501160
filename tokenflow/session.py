"""Sessions: the only place where a request's state changes, the only home of its tokens.

`Session` is one request on its way through the engine, `SessionTable` holds all that have not
finished, finds them by handle and by executor id, and keeps one row of numpy columns per session so
that the planner's snapshot costs microseconds. Invariants: a state change that is not in
`TRANSITIONS` raises; a session's row mirrors its fields after each method of the table; a finished
session leaves the table and its row is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenflow.errors import InternalError
from tokenflow.executor.api import CapacitySchedulerPolicy, num_blocks_needed
from tokenflow.preemption import unpausable_reason
from tokenflow.reader import Reader
from tokenflow.session_rows import SessionRows
from tokenflow.types import (
    GenerateRequest,
    SessionColumns,
    SessionState,
    Usage,
)

_S = SessionState

TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.FINISHED}),
    _S.PREFILLING: frozenset({_S.RUNNING, _S.CANCELLING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PAUSING, _S.CANCELLING, _S.FINISHED}),
    _S.PAUSING: frozenset({_S.PREEMPTED, _S.CANCELLING, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RESUMING, _S.FINISHED}),
    _S.RESUMING: frozenset({_S.RUNNING, _S.CANCELLING, _S.FINISHED}),
    _S.CANCELLING: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}

IN_ENGINE = frozenset({_S.PREFILLING, _S.RUNNING, _S.PAUSING, _S.RESUMING, _S.CANCELLING})
"""States in which the engine holds the request."""

_WAITING_STATES = frozenset({_S.WAITING, _S.PREEMPTED})


@dataclass(slots=True, kw_only=True)
class Session:
    """One request from arrival to its end.

    output_token_ids: every token generated so far, sent to the client exactly once, in order.
    executor_request_id: the engine's id while the engine holds it (a new one at each resume).
    num_enqueued_tokens: length of the prompt at the last enqueue (client's prompt + streamed).
    num_resume_tokens: tokens that a resume would compute, by the last cache estimate.
    num_filled_blocks: KV blocks that it has filled in the engine, 0 outside.
    answered: the client already got its end; what the engine still says is discarded.
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
    num_filled_blocks: int = 0
    num_pauses: int = 0
    paused_s: float = 0.0
    answered: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence: prompt and generated."""
        return len(self.request.input_token_ids) + len(self.output_token_ids)

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


class SessionTable:
    """All unfinished sessions, as objects and as columns, in order of arrival."""

    def __init__(
        self,
        *,
        capacity_policy: CapacitySchedulerPolicy,
        tokens_per_block: int,
        default_read_rate: float,
        max_seq_len: int,
        max_input_len: int,
        initial_rows: int = 64,
    ) -> None:
        self._policy = capacity_policy
        self._tokens_per_block = tokens_per_block
        self._default_read_rate = default_read_rate
        self._max_seq_len = max_seq_len
        self._max_input_len = max_input_len
        self._rows = SessionRows(initial_rows)
        self._by_handle: dict[int, Session] = {}
        self._by_slot: dict[int, Session] = {}
        self._by_executor_id: dict[int, Session] = {}
        self._waiting: dict[int, Session] = {}
        self._num_filled_blocks = 0
        self._counts = dict.fromkeys(SessionState, 0)

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_handle.values()))

    def count(self, *states: SessionState) -> int:
        """Sessions that are in one of `states`."""
        return sum(self._counts[state] for state in states)

    def get(self, handle: int) -> Session | None:
        """The unfinished session with this handle."""
        return self._by_handle.get(handle)

    def at_slot(self, slot: int) -> Session:
        """The session of a row named in a Decision."""
        return self._by_slot[slot]

    def by_executor_id(self, executor_request_id: int) -> Session | None:
        """The session that the engine knows under this id."""
        return self._by_executor_id.get(executor_request_id)

    def add(self, handle: int, request: GenerateRequest, now: float) -> Session:
        """A new WAITING session; handles are unique."""
        if handle in self._by_handle:
            raise InternalError(f"handle {handle} is in use")
        slot = self._rows.take()
        reader = Reader(request.read_rate, self._default_read_rate)
        session = Session(
            handle=handle, slot=slot, request=request, reader=reader, last_transition_time=now
        )
        self._by_handle[handle] = session
        self._by_slot[slot] = session
        self._counts[session.state] += 1
        self._waiting[handle] = session
        self._fill_row(session)
        return session

    def transition(self, session: Session, state: SessionState, now: float) -> None:
        """Change a session's state; raises InternalError for a change that cannot be."""
        if state not in TRANSITIONS[session.state]:
            raise InternalError(
                f"request {session.request.request_id!r}: {session.state.name} -> {state.name}"
            )
        old = session.state
        if old is _S.PREEMPTED:
            session.paused_s += now - session.last_transition_time
        session.state = state
        session.last_transition_time = now
        self._counts[old] -= 1
        if old is _S.WAITING:
            del self._waiting[session.handle]
        if state is _S.FINISHED:
            self._remove(session)
            return
        self._counts[state] += 1
        slot, rows = session.slot, self._rows
        rows.set_int("state", slot, state)
        if state in _WAITING_STATES:
            rows.set_float("wait_since_time", slot, now)
        elif state is _S.RUNNING:
            rows.set_float("running_since_time", slot, now)
        if state not in IN_ENGINE:
            self._leave_engine(session)
        if state is _S.PAUSING:
            session.num_pauses += 1
            rows.set_int("num_pauses", slot, session.num_pauses)

    def enter_engine(self, session: Session, executor_request_id: int, now: float) -> None:
        """The session was enqueued: WAITING -> PREFILLING or PREEMPTED -> RESUMING."""
        resumed = session.state is _S.PREEMPTED
        self.transition(session, _S.RESUMING if resumed else _S.PREFILLING, now)
        session.executor_request_id = executor_request_id
        session.enqueue_time = now
        session.num_enqueued_tokens = session.num_tokens
        self._by_executor_id[executor_request_id] = session
        self._rows.set_int("num_blocks_held", session.slot, self._num_blocks_occupied(session))
        self._count_filled(session, self.num_blocks(session.num_tokens))

    def deliver(self, session: Session, token_ids: list[int], now: float) -> None:
        """Tokens came from the engine and go to the client now."""
        session.output_token_ids.extend(token_ids)
        if session.first_token_time is None:
            session.first_token_time = now
            self._rows.set_int("started", session.slot, 1)
        session.reader.deliver(len(token_ids), now)
        self._write_progress(session)

    def acknowledge(self, session: Session, num_consumed: int, now: float) -> None:
        """The client has consumed `num_consumed` tokens in all; says nothing without a reader."""
        if not session.request.has_reader:
            return
        session.reader.acknowledge(num_consumed, now)
        self._write_reader(session)

    def set_resume_tokens(self, session: Session, num_tokens: int) -> None:
        """Tokens that a resume would have to compute, by the current cache estimate."""
        session.num_resume_tokens = num_tokens
        self._rows.set_int("num_resume_tokens", session.slot, num_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._tokens_per_block)

    def num_blocks_at_full_length(self, request: GenerateRequest) -> int:
        """Blocks of prompt and max_tokens, within max_seq_len; the last token needs none."""
        num_tokens = len(request.input_token_ids) + request.max_tokens
        return max(1, self.num_blocks(min(num_tokens, self._max_seq_len) - 1))

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that sessions in the engine have filled, by our own count."""
        return self._num_filled_blocks

    def oldest_waiting(self) -> Session | None:
        """The WAITING session that came first."""
        return next(iter(self._waiting.values()), None)

    def columns(self, now: float) -> SessionColumns:
        """The planner's view; arrays are copies."""
        return self._rows.columns(now)

    def _fill_row(self, session: Session) -> None:
        request, slot = session.request, session.slot
        num_prompt = len(request.input_token_ids)
        rows = self._rows
        rows.set_float("arrival_time", slot, request.arrival_time)
        rows.set_float("wait_since_time", slot, request.arrival_time)
        rows.set_float("priority", slot, request.priority)
        rows.set_int("state", slot, session.state)
        rows.set_int("has_reader", slot, request.has_reader)
        rows.set_int("pausable", slot, self._is_pausable(request))
        rows.set_int("num_prompt_tokens", slot, num_prompt)
        rows.set_int("max_tokens", slot, request.max_tokens)
        rows.set_int("num_blocks_final", slot, self.num_blocks_at_full_length(request))
        rows.set_int("num_resume_tokens", slot, num_prompt)
        self._write_progress(session)

    def _is_pausable(self, request: GenerateRequest) -> bool:
        reason = unpausable_reason(
            request, max_seq_len=self._max_seq_len, max_input_len=self._max_input_len
        )
        return reason is None

    def _write_reader(self, session: Session) -> None:
        unread, unread_time, rate = session.reader.state
        if session.reader.started and not session.request.has_reader:
            unread = float("inf")
        slot, rows = session.slot, self._rows
        rows.set_float("unread", slot, unread)
        rows.set_float("unread_time", slot, unread_time)
        rows.set_float("read_rate", slot, rate)

    def _write_progress(self, session: Session) -> None:
        slot, rows = session.slot, self._rows
        self._write_reader(session)
        rows.set_int("num_generated", slot, len(session.output_token_ids))
        occupied = self._num_blocks_occupied(session)
        rows.set_int("num_blocks_needed", slot, occupied)
        if session.state in IN_ENGINE:
            rows.set_int("num_blocks_held", slot, occupied)
            self._count_filled(session, self.num_blocks(session.num_tokens))

    def _count_filled(self, session: Session, num_blocks: int) -> None:
        self._num_filled_blocks += num_blocks - session.num_filled_blocks
        session.num_filled_blocks = num_blocks

    def _num_blocks_occupied(self, session: Session) -> int:
        """What the engine's capacity policy counts for this session at its present length."""
        num_left = max(1, session.request.max_tokens - len(session.output_token_ids))
        num_tokens = session.num_tokens
        num_left = max(1, min(num_left, self._max_seq_len - num_tokens))
        return num_blocks_needed(self._policy, self._tokens_per_block, num_tokens, num_left)

    def _leave_engine(self, session: Session) -> None:
        if session.executor_request_id is not None:
            self._by_executor_id.pop(session.executor_request_id, None)
            session.executor_request_id = None
        self._rows.set_int("num_blocks_held", session.slot, 0)
        self._count_filled(session, 0)

    def _remove(self, session: Session) -> None:
        self._leave_engine(session)
        del self._by_handle[session.handle]
        del self._by_slot[session.slot]
        self._rows.give_back(session.slot)
