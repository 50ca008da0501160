"""All sessions: the only place where a request's state changes.

`SessionTable` holds the sessions that have not finished, finds them by handle and by executor id,
and keeps one row of numpy columns per session so that the planner's snapshot costs microseconds.
Invariants: a state change that is not in `TRANSITIONS` raises; a session's row mirrors its fields
whenever somebody looks at it; a finished session leaves the table and its row is reused.

Tokens come far more often than somebody looks, so what they change is written when that happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenflow.errors import InternalError
from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.occupancy import Occupancy
from tokenflow.reader import Reader, ReaderState
from tokenflow.session import IN_ENGINE, TRANSITIONS, Session
from tokenflow.session_groups import SessionGroups
from tokenflow.session_rows import SessionRows
from tokenflow.types import GenerateRequest, SessionColumns, SessionState

_S = SessionState


class SessionTable:
    """All unfinished sessions, as objects and as columns, in order of arrival.

    groups: those that are asked for at every turn.
    """

    def __init__(
        self,
        *,
        capacity_policy: CapacitySchedulerPolicy,
        tokens_per_block: int,
        default_read_rate: float,
        max_seq_len: int,
        max_input_len: int,
        lease_tokens: int = 0,
        initial_rows: int = 64,
    ) -> None:
        self._occupancy = Occupancy(
            policy=capacity_policy,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            max_input_len=max_input_len,
            lease_tokens=lease_tokens,
        )
        self._default_read_rate = default_read_rate
        self._rows = SessionRows(initial_rows)
        self._by_handle: dict[int, Session] = {}
        self._by_slot: dict[int, Session] = {}
        self._by_executor_id: dict[int, Session] = {}
        self._progressed: dict[int, Session] = {}
        self._num_filled_blocks = 0
        self._counts = dict.fromkeys(SessionState, 0)
        self.groups = SessionGroups()

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_handle.values()))

    def count(self, *states: SessionState) -> int:
        """Sessions that are in one of `states`."""
        return sum(map(self._counts.__getitem__, states))

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
        self.groups.add(session)
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
        elif old is _S.RESUMING:  # what it had on the host it has now, or lost
            self.set_kept(session, session.num_resume_tokens, 0)
        session.state = state
        session.last_transition_time = now
        self._counts[old] -= 1
        self.groups.update(session)
        if state is _S.FINISHED:
            self._remove(session)
            return
        self._counts[state] += 1
        slot, rows = session.slot, self._rows
        rows.set_int("state", slot, state)
        if state is _S.WAITING:  # again, with its place by arrival
            rows.set_float("wait_since_time", slot, session.request.arrival_time)
        elif state is _S.PREEMPTED:
            rows.set_float("wait_since_time", slot, now)
        elif state is _S.RUNNING:
            if not session.renews_lease:  # to its reader, a renewal is no interruption
                rows.set_float("running_since_time", slot, now)
            session.renews_lease = False
        if state not in IN_ENGINE:
            self._leave_engine(session)
        if state is _S.PAUSING:
            self.count_pause(session)

    def count_pause(self, session: Session) -> None:
        """The session is being paused, or was left paused at the end of a lease."""
        session.num_pauses += 1
        self._rows.set_int("num_pauses", session.slot, session.num_pauses)

    def enter_engine(self, session: Session, executor_request_id: int, now: float) -> None:
        """The session was enqueued: WAITING -> PREFILLING or PREEMPTED -> RESUMING."""
        resumed = session.state is _S.PREEMPTED
        self.transition(session, _S.RESUMING if resumed else _S.PREFILLING, now)
        session.executor_request_id = executor_request_id
        session.enqueue_time = now
        self._rows.set_float("wait_since_time", session.slot, now)
        session.num_enqueued_tokens = session.num_tokens
        session.lease_end = self._occupancy.lease_end(session)
        self._by_executor_id[executor_request_id] = session
        occupied = self._occupancy.num_blocks_occupied(session)
        self._rows.set_int("num_blocks_held", session.slot, occupied)
        self._rows.set_int("num_blocks_needed", session.slot, occupied)
        self._count_filled(session, self.num_blocks(session.num_tokens))

    def deliver(self, session: Session, token_ids: list[int], now: float) -> None:
        """Tokens came from the engine and go to the client now."""
        session.output_token_ids.extend(token_ids)
        if session.first_token_time is None:
            session.first_token_time = now
            self._rows.set_int("started", session.slot, 1)
        session.reader.deliver(len(token_ids), now)
        self._progressed[session.slot] = session

    def deliver_each(
        self, session: Session, token_ids: Sequence[int], times: Sequence[float]
    ) -> None:
        """More tokens of a session that has its first one, each at its own instant."""
        session.output_token_ids += token_ids
        session.reader.deliver_each(times)
        self._progressed[session.slot] = session

    def acknowledge(self, session: Session, num_consumed: int, now: float) -> None:
        """The client has consumed `num_consumed` tokens in all; says nothing without a reader."""
        if not session.request.has_reader:
            return
        session.reader.acknowledge(num_consumed, now)
        self._progressed[session.slot] = session

    def hold(self, session: Session, until: float | None, now: float) -> None:
        """The client holds the stream until then; None: not any more."""
        if until is None:
            session.held_s += now - session.hold_time
        else:
            session.hold_time = now
        session.held_until = until
        self.groups.update(session)
        self._rows.set_int("held", session.slot, until is not None)

    def answered(self, session: Session) -> None:
        """The session has its end, although the engine may have it still: it needs no hold."""
        self.groups.update(session)

    def lost_with_engine(self, session: Session) -> None:
        """The engine that held the session is gone; its next start is an interruption."""
        session.num_losses += 1
        session.renews_lease = False

    def unpausable_reason(self, request: GenerateRequest) -> str | None:
        """Why the request can never be paused, or None."""
        return self._occupancy.unpausable_reason(request)

    def max_tokens_to_enqueue(self, session: Session) -> int:
        """Tokens that its next enqueue may generate: what is left, at most a lease."""
        return self._occupancy.max_tokens_to_enqueue(session)

    def set_kept(self, session: Session, num_resume_tokens: int, num_host_blocks: int) -> None:
        """What a resume would have to compute, and to bring back from the host; while it is
        RESUMING, what it does."""
        session.num_resume_tokens = num_resume_tokens
        session.num_host_blocks = num_host_blocks
        self._rows.set_int("num_resume_tokens", session.slot, num_resume_tokens)
        self._rows.set_int("num_host_blocks", session.slot, num_host_blocks)

    def set_copied(self, session: Session, num_blocks: int) -> None:
        """Leading blocks of a running session that have a copy on the host."""
        session.num_copied_blocks = num_blocks
        self._rows.set_int("num_copied_blocks", session.slot, num_blocks)

    def num_blocks_to_start(self, session: Session) -> int:
        """Blocks that the engine must have obtainable for its next enqueue."""
        return self._occupancy.num_blocks_occupied(session)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return self._occupancy.num_blocks(num_tokens)

    def num_blocks_at_full_length(self, request: GenerateRequest) -> int:
        """Blocks of prompt and max_tokens, within max_seq_len; the last token needs none."""
        return self._occupancy.num_blocks_at_full_length(request)

    @property
    def num_filled_blocks(self) -> int:
        """Blocks that sessions in the engine have filled, by our own count."""
        self._write_progress()
        return self._num_filled_blocks

    def columns(self, now: float) -> SessionColumns:
        """The planner's view; arrays are copies."""
        self._write_progress()
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
        rows.set_int("pausable", slot, self.unpausable_reason(request) is None)
        rows.set_int("num_prompt_tokens", slot, num_prompt)
        rows.set_int("max_tokens", slot, request.max_tokens)
        rows.set_int("num_blocks_final", slot, self.num_blocks_at_full_length(request))
        rows.set_int("num_resume_tokens", slot, num_prompt)
        self._progressed[slot] = session

    def _write_progress(self) -> None:
        """Bring the rows of those that got tokens, or have just come, up to date."""
        if not self._progressed:
            return
        sessions = list(self._progressed.values())
        self._progressed.clear()
        for session in sessions:
            if len(session.output_token_ids) > session.stays_until:
                self._write_blocks(session)
        self._rows.set_progress(
            [s.slot for s in sessions],
            [len(s.output_token_ids) for s in sessions],
            map(_reader_state, sessions),
        )

    def _write_blocks(self, session: Session) -> None:
        occupied = self._occupancy.num_blocks_occupied(session)
        self._rows.set_int("num_blocks_needed", session.slot, occupied)
        if session.state in IN_ENGINE:
            self._rows.set_int("num_blocks_held", session.slot, occupied)
            self._count_filled(session, self.num_blocks(session.num_tokens))

    def _count_filled(self, session: Session, num_blocks: int) -> None:
        self._num_filled_blocks += num_blocks - session.num_filled_blocks
        session.num_filled_blocks = num_blocks
        session.stays_until = self._occupancy.stays_until(session)

    def _leave_engine(self, session: Session) -> None:
        if session.executor_request_id is not None:
            self._by_executor_id.pop(session.executor_request_id, None)
            session.executor_request_id = None
        session.lease_end = None
        self._rows.set_int("num_blocks_held", session.slot, 0)
        self._rows.set_int(
            "num_blocks_needed", session.slot, self._occupancy.num_blocks_occupied(session)
        )
        self.set_copied(session, 0)
        self._count_filled(session, 0)

    def _remove(self, session: Session) -> None:
        self._leave_engine(session)
        del self._by_handle[session.handle]
        del self._by_slot[session.slot]
        self._progressed.pop(session.slot, None)
        self._rows.give_back(session.slot)


def _reader_state(session: Session) -> ReaderState:
    """Of a session without a reader, infinitely much is unread."""
    reader = session.reader
    if session.request.has_reader or not reader.started:
        return reader.state
    return reader.state._replace(unread=float("inf"))
