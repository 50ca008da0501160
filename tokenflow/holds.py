"""Streams that their clients hold paused.

Owns the rules; who is held is in session_groups.py. A held stream is paused as soon as it may be
(after its first token; slack and quantum do not matter, its client asked for it) and is not started
again before the hold ends: by the client, or by itself once all holds of the stream together have
lasted `max_hold_s`. It keeps its place and its tokens meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from tokenflow.answers import Answers
from tokenflow.commands import EngineCommands
from tokenflow.session import Session
from tokenflow.session_table import SessionTable


class HoldRefusal(enum.Enum):
    """Why none of some streams is held.

    ENDED: all of them have ended. USED_UP: one of them has been held for max_hold_s in all.
    TOO_MANY: more streams would be held than may be.
    """

    ENDED = enum.auto()
    USED_UP = enum.auto()
    TOO_MANY = enum.auto()


HoldReply = Callable[[HoldRefusal | None], None]
"""Is told why none of some streams is held, or None."""


class Holds:
    """`__len__` counts the holds that are on.

    max_hold_s: of one stream, all its holds together. max_holds: that may be on at a time.
    """

    def __init__(
        self,
        table: SessionTable,
        answers: Answers,
        commands: EngineCommands,
        *,
        max_hold_s: float,
        max_holds: int,
    ) -> None:
        self._table, self._groups = table, table.groups
        self._answers = answers
        self._commands = commands
        self._max_hold_s = max_hold_s
        self._max_holds = max_holds

    def __len__(self) -> int:
        return len(self._groups.hold_ends)

    def hold_all(self, sessions: Sequence[Session], now: float) -> HoldRefusal | None:
        """Begin, for all of some unfinished streams or for none; why for none, or None. Those that
        are held already take no further place; nothing happens to a kind that is never paused."""
        if not sessions:
            return HoldRefusal.ENDED
        new = [session for session in sessions if self._may_begin(session)]
        if any(session.held_s >= self._max_hold_s for session in new):
            return HoldRefusal.USED_UP
        if len(self) + len(new) > self._max_holds:
            return HoldRefusal.TOO_MANY
        for session in new:
            left_s = self._max_hold_s - session.held_s
            self._table.hold(session, now + left_s, now)
            self._answers.trace("hold", session, now)
        self.pause_running(now)
        return None

    def _may_begin(self, session: Session) -> bool:
        is_held = session.held_until is not None
        return not is_held and self._table.unpausable_reason(session.request) is None

    def release(self, session: Session, now: float) -> bool:
        """End; False for a stream that is not held."""
        if self._groups.hold_ends.get(session.handle) is None:
            return False
        self._end(session, now)
        return True

    def pause_running(self, now: float) -> None:
        """Pause those that came to run."""
        for session in list(self._groups.held_running.values()):
            self._commands.pause(session, now, why="hold")

    def expire(self, now: float) -> None:
        """End holds that lasted too long."""
        for handle in self._groups.hold_ends.pop_due(now):
            session = self._table.get(handle)
            assert session is not None
            self._end(session, now)

    def _end(self, session: Session, now: float) -> None:
        self._table.hold(session, None, now)
        self._answers.trace("release", session, now)
