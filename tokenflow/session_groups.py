"""Groups of sessions that somebody asks for at every turn, without a walk through all of them.

Owns who is in each. Invariant: after `update`, which follows every change of a session's state, its
hold, or of whether it has its end, each group holds exactly those that `SessionGroups` says.
"""

from __future__ import annotations

from tokenflow.instants import Instants
from tokenflow.session import Session
from tokenflow.types import SessionState

_S = SessionState


class SessionGroups:
    """Unfinished sessions by handle.

    deadlines: those with a time limit of their own, and when it is over.
    waits: those that wait for their start and that their clients do not hold, and since when; who
        was held, that much later than its arrival.
    hold_ends: those that are held and have no end yet, and until when.
    held_running: those of them that run.
    """

    def __init__(self) -> None:
        self.deadlines, self.waits, self.hold_ends = Instants(), Instants(), Instants()
        self.held_running: dict[int, Session] = {}

    def add(self, session: Session) -> None:
        """A new one."""
        if session.request.timeout_s is not None:
            self.deadlines.set(session.handle, session.deadline)
        self.update(session)

    def update(self, session: Session) -> None:
        """Something about it changed."""
        handle, state, until = session.handle, session.state, session.held_until
        if state is _S.WAITING and until is None:
            self.waits.set(handle, session.request.arrival_time + session.held_s)
        else:
            self.waits.discard(handle)
        if session.answered or state is _S.FINISHED:
            until = None
        if until is None:
            self.hold_ends.discard(handle)
        else:
            self.hold_ends.set(handle, until)
        if until is not None and state is _S.RUNNING:
            self.held_running[handle] = session
        else:
            self.held_running.pop(handle, None)
        if state is _S.FINISHED:
            self.deadlines.discard(handle)
