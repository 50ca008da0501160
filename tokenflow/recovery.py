"""What becomes of a session when the engine that held it is lost.

Owns the rule: what the client has is kept, since tokens live in the session. A request that had not
started waits again, one that can be paused goes on from its tokens on the next engine, after one
recompute of its KV. Ended with a clear, retryable error are those that cannot go on (kinds that are
never paused) and those that an engine was lost with before: they may be the cause.
"""

from __future__ import annotations

from tokenflow.answers import Answers
from tokenflow.errors import for_clients
from tokenflow.session import IN_ENGINE, Session
from tokenflow.session_table import SessionTable
from tokenflow.types import SessionState

_S = SessionState

MAX_LOSSES = 1
"""Engines that may be lost with one request before it is given up."""


class Recovery:
    """Applies the rule to the sessions of a table."""

    def __init__(self, table: SessionTable, answers: Answers) -> None:
        self._table = table
        self._answers = answers

    def lost(self, session: Session, message: str, now: float) -> None:
        """The engine ended while it held `session`, if it still does; `message` says how."""
        if session.state not in IN_ENGINE:
            return
        if session.answered:
            self._table.transition(session, _S.FINISHED, now)
            return
        self._table.lost_with_engine(session)
        reason = self._cannot_go_on(session)
        if reason is not None:
            self._answers.failed(session, f"{reason}: {for_clients(message)}", now, retryable=True)
            self._table.transition(session, _S.FINISHED, now)
            return
        started = session.first_token_time is not None
        self._table.transition(session, _S.PREEMPTED if started else _S.WAITING, now)
        self._answers.counters.num_recovered += 1
        self._answers.trace("recovered", session, now, num_tokens=len(session.output_token_ids))

    def _cannot_go_on(self, session: Session) -> str | None:
        if session.num_losses > MAX_LOSSES:
            return "the engine was lost a second time while it served this request"
        if session.first_token_time is None:
            return None
        kind = self._table.unpausable_reason(session.request)
        if kind is not None:
            return f"the engine was lost, and this request cannot be continued ({kind})"
        return None
