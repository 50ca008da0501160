"""Streams that their clients hold paused.

Owns the holds. A held stream is paused as soon as it may be (after its first token; slack and
quantum do not matter, its client asked for it) and is not started again before the hold ends: by
the client, or by itself once all holds of the stream together have lasted `max_hold_s`. It keeps
its place and its tokens meanwhile.
"""

from __future__ import annotations

from tokenflow.answers import Answers
from tokenflow.commands import EngineCommands
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.types import SessionState


class Holds:
    """Holds by handle; `__len__` counts those that are on.

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
        self._table = table
        self._answers = answers
        self._commands = commands
        self._max_hold_s = max_hold_s
        self._max_holds = max_holds
        self._held: dict[int, Session] = {}

    def __len__(self) -> int:
        return sum(not session.answered for session in self._held.values())

    @property
    def num_waiting(self) -> int:
        """Held streams that have not started."""
        return sum(s.state is SessionState.WAITING for s in self._held.values())

    def hold(self, session: Session, now: float) -> None:
        """Begin; nothing happens to a stream that is held, that has used up its time, or of a kind
        that is never paused, nor while too many are held."""
        left_s = self._max_hold_s - session.held_s
        if session.held_until is not None or left_s <= 0 or len(self) >= self._max_holds:
            return
        if self._table.unpausable_reason(session.request) is not None:
            return
        self._table.hold(session, now + left_s, now)
        self._held[session.handle] = session
        self._answers.trace("hold", session, now)
        self.pause_running(now)

    def release(self, session: Session, now: float) -> bool:
        """End; False for a stream that is not held."""
        if self._held.pop(session.handle, None) is None:
            return False
        self._table.hold(session, None, now)
        self._answers.trace("release", session, now)
        return True

    def pause_running(self, now: float) -> None:
        """Pause those that came to run."""
        self._drop_answered()
        for session in self._held.values():
            if session.state is SessionState.RUNNING:
                self._commands.pause(session, now, why="hold")

    def expire(self, now: float) -> None:
        """End holds that lasted too long."""
        self._drop_answered()
        for session in list(self._held.values()):
            if session.held_until is not None and session.held_until <= now:
                self.release(session, now)

    def _drop_answered(self) -> None:
        """Whoever has its end needs no hold."""
        for handle in [h for h, session in self._held.items() if session.answered]:
            del self._held[handle]
