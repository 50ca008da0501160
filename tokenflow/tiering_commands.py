"""What is asked of the engine's tiers ahead of need: copies to the host, copies back, giving up.

Owns the KvTiering of the engine of the moment, if it has one; an engine without is never asked.
Everything is a hint that the engine may leave out, so a hint that nothing came of is given again
by a later plan, but not in every plan while the copies are on their way or there is no room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tokenflow.errors import EngineError
from tokenflow.executor.api import Executor
from tokenflow.executor.kv_api import KvTiering
from tokenflow.session import Session
from tokenflow.session_table import SessionTable

_REPEAT_S = 0.25
"""The same hint is not given again within this time."""


class TieringCommands:
    """Gives the hints of a Decision to the engine."""

    def __init__(self, executor: Executor, table: SessionTable, tokens_per_block: int) -> None:
        self._table = table
        self._tokens_per_block = tokens_per_block
        self._tiering: KvTiering | None
        self.use(executor)

    def use(self, executor: Executor) -> None:
        """Another engine took the place of the lost one."""
        self._executor = executor
        self._tiering = executor.get_kv_tiering()
        self._forget_time = float("-inf")
        self._hint_times: dict[tuple[int, int], float] = {}

    def lost(self) -> None:
        """The engine is gone; nothing is asked until there is the next one."""
        self._tiering = None

    @property
    def is_available(self) -> bool:
        """True if the engine moves KV when it is told to."""
        return self._tiering is not None

    def drop_host(self, sessions: Sequence[Session]) -> None:
        """Before they are resumed: computing what the host holds of them is faster. From here on
        that is what their resumes do."""
        if self._tiering is None:
            return
        for session in sessions:
            with self._unless_lost():
                self._tiering.drop_host(session.token_ids, session.request.cache_salt_id)
            num_tokens = session.num_host_blocks * self._tokens_per_block
            num_tokens = min(session.num_resume_tokens + num_tokens, session.num_tokens)
            self._table.set_kept(session, num_tokens, 0)
            session.is_left_in_cache = False

    def prefetch(self, sessions: Sequence[Session], now: float) -> None:
        """Paused sessions whose blocks on the host are wanted on the device."""
        if self._tiering is None:
            return
        for session in sessions:
            if self._is_new(session, 0, now):
                with self._unless_lost():
                    self._tiering.prefetch(session.token_ids, session.request.cache_salt_id)

    def offload(self, sessions: Sequence[tuple[Session, int]], now: float) -> None:
        """Running sessions, and how many more of their oldest blocks are to be copied. The tokens
        end where that does, so that asking twice copies once."""
        if self._tiering is None:
            return
        for session, num_blocks in sessions:
            num_tokens = (session.num_copied_blocks + num_blocks) * self._tokens_per_block
            if self._is_new(session, num_tokens, now):
                token_ids = session.token_ids[: num_tokens + 1]  # the last one is never looked up
                salt = session.request.cache_salt_id
                with self._unless_lost():
                    self._tiering.offload(token_ids, num_blocks, salt)

    def _is_new(self, session: Session, num_tokens: int, now: float) -> bool:
        """True if this was not asked a moment ago; remembers it. num_tokens: 0 for a prefetch."""
        times = self._hint_times
        if now >= self._forget_time:
            self._forget_time = now + _REPEAT_S
            self._hint_times = times = {k: t for k, t in times.items() if t > now - _REPEAT_S}
        key = (session.handle, num_tokens)
        if times.get(key, float("-inf")) > now - _REPEAT_S:
            return False
        times[key] = now
        return True

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """What is asked of an engine that has just ended is nobody's failure."""
        try:
            yield
        except (RuntimeError, EngineError):
            if self._executor.can_enqueue_requests():
                raise
