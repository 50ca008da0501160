"""Where the KV of sessions is: what a resume would find, and what it would have to do.

Owns the choice between two sources and what both say of the sessions in the table: the mirror of
the engine's KV events (kv_mirror.py) where the engine has them, the count of blocks
(cache_estimate.py) where it has none, for what a mirror missed, and once salts are used, which
events do not tell apart. Runs in the coordinator's thread and never waits.

The mirror is behind: what the engine gives up for a request that was enqueued a moment ago is told
after the step that does it. So those blocks are taken off beforehand, from those whose turn it is
by the order of release.

Invariant: after `refresh`, the columns num_resume_tokens and num_host_blocks of every paused
session, and with KvTiering num_copied_blocks of every running one, say what the source knows. That
costs what has changed since the last call and what is about to be given up, not what is paused.
"""

from __future__ import annotations

import itertools
import logging

from tokenflow.answers import Counters
from tokenflow.cache_estimate import CacheEstimate
from tokenflow.executor.api import Executor
from tokenflow.executor.kv_api import HOST_LEVEL, KvLocation
from tokenflow.kv_mirror import KvMirror
from tokenflow.session import IN_ENGINE, Session
from tokenflow.session_table import SessionTable
from tokenflow.types import SessionState

logger = logging.getLogger("tokenflow")

_STARTING = (SessionState.PREFILLING, SessionState.RESUMING)
_SPARE_ENTRIES = 256
"""What is kept of sessions that have ended is tolerated up to twice the sessions and this."""


class KvWhereabouts:
    """Says where KV is, for one engine after the other; counts gaps in the events."""

    def __init__(
        self,
        executor: Executor,
        table: SessionTable,
        counters: Counters,
        num_total_blocks: int,
        tokens_per_block: int,
    ) -> None:
        self._table = table
        self._counters = counters
        self._tokens_per_block = tokens_per_block
        self._estimate = CacheEstimate(num_total_blocks)
        self._num_total_blocks = num_total_blocks
        self._pending: dict[int, None] = {}
        self._starting: dict[int, int] = {}
        self._paused: dict[int, KvLocation] = {}  # as of the last look
        self._uncounted: dict[int, None] = {}  # on the device; the estimate has them elsewhere
        self._foreseen: dict[int, None] = {}
        self._mirror = KvMirror(tokens_per_block)
        self._has_salts = False
        self.use(executor)

    # -- engines -------------------------------------------------------------------------------

    def use(self, executor: Executor) -> None:
        """An engine that holds nothing of ours."""
        self._events = executor.get_kv_cache_event_manager()
        self._watches_running = self._events is not None and executor.get_kv_tiering() is not None
        self._has_warned = False
        source = "estimated: the engine gives no KV events" if self._events is None else "mirrored"
        logger.info("where KV is kept is %s", source)
        self._look_again()

    def lost(self) -> None:
        """The engine is gone, and with it all KV."""
        self._events = None
        self._watches_running = False
        self._mirror = KvMirror(self._tokens_per_block)
        self._estimate.clear()
        self._estimate.num_host_blocks = 0
        self._pending.clear()
        self._starting.clear()
        self._paused.clear()
        self._uncounted.clear()
        self._foreseen.clear()
        for session in self._table:
            if session.state is SessionState.PREEMPTED:
                self._table.set_kept(session, session.num_tokens, 0)

    @property
    def is_mirrored(self) -> bool:
        """True while the engine's events tell everything; else blocks are counted."""
        return self._events is not None and self._mirror.is_complete

    @property
    def num_host_blocks(self) -> int:
        """Size of the host tier, 0 until the engine has told."""
        return self._estimate.num_host_blocks

    def set_num_host_blocks(self, num_blocks: int) -> None:
        """The engine told how large its host tier is."""
        self._estimate.num_host_blocks = num_blocks

    # -- sessions ------------------------------------------------------------------------------

    def released(self, session: Session) -> None:
        """The engine let go of a session and keeps its KV for reuse; that of the last token does
        not exist."""
        self._estimate.released(session.handle, self._table.num_blocks(session.num_tokens - 1))

    def paused(self, session: Session) -> None:
        """The session is out of the engine and will come back. Until the next `refresh` all is
        taken to be there."""
        self._table.set_kept(session, 1, 0)
        self._pending[session.handle] = None

    def started(self, session: Session) -> None:
        """The session is enqueued: what it finds it takes."""
        if session.request.cache_salt_id is not None and not self._has_salts:
            self._has_salts = True
            self._look_again()
        self._estimate.forget(session.handle)
        self._pending.pop(session.handle, None)
        self._leave(session.handle)
        num_found = session.num_shared_tokens
        if session.output_token_ids:
            lora_id = session.request.lora_task_id
            num_found = self._mirror.locate(session.token_ids, lora_id).num_device_blocks
            num_found *= self._tokens_per_block
        self._starting[session.handle] = self._table.num_blocks(session.num_tokens - num_found)

    def running(self, session: Session) -> None:
        """The session has its first token after an enqueue."""
        self._starting.pop(session.handle, None)
        if self._watches_running:
            self._pending[session.handle] = None

    # -- what the engine says ------------------------------------------------------------------

    def hear(self) -> None:
        """Take in the events so far; often enough that none are dropped."""
        if self._events is None:
            return
        events = self._events.get_latest_events(0)
        if not events:
            return
        num_gaps = self._mirror.num_gaps
        self._mirror.apply(events)
        num_gaps = self._mirror.num_gaps - num_gaps
        self._counters.num_kv_event_gaps += num_gaps
        if len(self._mirror.num_blocks_per_level) > HOST_LEVEL:
            self.set_num_host_blocks(self._mirror.num_blocks_per_level[HOST_LEVEL])
        if num_gaps and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV events were missed: where earlier KV is kept is estimated until the engine "
                "tells it anew (kv_event_buffer_max_size bounds what it keeps)"
            )

    def refresh(self) -> None:
        """Bring the columns up to date."""
        self.hear()
        self._starting = {h: n for h, n in self._starting.items() if self._is_starting(h)}
        self._undo_foreseen()
        for handle in self._estimate.shrink(self._table.num_filled_blocks):
            if not self.is_mirrored or self._has_salts:
                self._pending[handle] = None
            elif handle in self._paused:
                self._looked_at(handle, self._paused[handle])
        self._pending.update(dict.fromkeys(self._mirror.changed()))
        for handle in self._pending:
            session = self._table.get(handle)
            if session is None:
                self._leave(handle)
            else:
                self._update(session)
        self._pending.clear()
        if self.is_mirrored and not self._has_salts:
            self._foresee()
        self._drop_old_entries()

    def _update(self, session: Session) -> None:
        if session.state is SessionState.PREEMPTED:
            location = self._locate(session)
            self._looked_at(session.handle, location)
            self._keep(session, location)
        elif session.state in IN_ENGINE and self._watches_running:
            location = self._watch(session)
            self._table.set_copied(session, location.num_copied_blocks)
        else:
            self._leave(session.handle)

    def _keep(self, session: Session, location: KvLocation) -> None:
        num_left = max(1, session.num_tokens - location.num_tokens)
        self._table.set_kept(session, num_left, location.num_host_blocks)

    def _looked_at(self, handle: int, location: KvLocation) -> None:
        """A paused session's KV is there; or the estimate has changed its mind about it."""
        self._paused[handle] = location
        if location.num_device_blocks and not self._estimate.num_blocks(handle)[0]:
            self._uncounted[handle] = None
        else:
            self._uncounted.pop(handle, None)

    def _leave(self, handle: int) -> None:
        """The session is not paused, and nothing about it is asked."""
        self._mirror.unwatch(handle)
        self._paused.pop(handle, None)
        self._uncounted.pop(handle, None)
        self._foreseen.pop(handle, None)

    def _locate(self, session: Session) -> KvLocation:
        """By the mirror; where it may have missed something, by what is more; where its tokens may
        be another salt's, by what is less."""
        num_device, num_host = self._estimate.num_blocks(session.handle)
        estimated = KvLocation(
            num_tokens=min((num_device + num_host) * self._tokens_per_block, session.num_tokens),
            num_device_blocks=num_device,
            num_host_blocks=num_host,
        )
        if self._events is None:
            return estimated
        mirrored = self._watch(session)
        if self._has_salts:
            return min(mirrored, estimated, key=lambda location: location.num_tokens)
        if self._mirror.is_complete or mirrored.num_tokens >= estimated.num_tokens:
            return mirrored
        return estimated

    def _watch(self, session: Session) -> KvLocation:
        lora_id = session.request.lora_task_id
        return self._mirror.watch(session.handle, session.token_ids, lora_id)

    def _look_again(self) -> None:
        for session in self._table:
            if session.state is SessionState.PREEMPTED:
                self._pending[session.handle] = None

    def _foresee(self) -> None:
        """Take off what the engine is about to give up for requests that have just been enqueued.
        Ended requests are in the estimate's order only; paused ones that it has lost sight of are
        the oldest. By the last look at each: nothing is looked for here."""
        num_in_engine = self._table.count(*IN_ENGINE)  # each has a block that is not stored yet
        num_free = self._num_total_blocks - self._mirror.num_device_blocks - num_in_engine
        num_wanted = sum(self._starting.values()) - max(0, num_free)
        uncounted = ((handle, 0) for handle in self._uncounted)
        for handle, num_counted in itertools.chain(uncounted, self._estimate.in_order()):
            if num_wanted <= 0:
                return
            location = self._paused.get(handle)
            if location is None:
                num_wanted -= num_counted
                continue
            num_lost = min(num_wanted, location.num_device_blocks)
            num_wanted -= num_lost
            if num_lost:
                self._take_off(handle, location, num_lost)

    def _is_starting(self, handle: int) -> bool:
        session = self._table.get(handle)
        return session is not None and session.state in _STARTING

    def _take_off(self, handle: int, location: KvLocation, num_lost: int) -> None:
        """So many of its blocks on the device go to the host, or are lost; until the next look."""
        session = self._table.get(handle)
        if session is None or session.state is not SessionState.PREEMPTED:
            return
        num_host = location.num_host_blocks + num_lost
        num_left = max(1, session.num_tokens - location.num_tokens)
        if not self.num_host_blocks:
            num_host = 0
            num_left += num_lost * self._tokens_per_block
        self._table.set_kept(session, min(num_left, session.num_tokens), num_host)
        self._foreseen[handle] = None

    def _undo_foreseen(self) -> None:
        for handle in self._foreseen:
            session, location = self._table.get(handle), self._paused.get(handle)
            if session is not None and location is not None:
                self._keep(session, location)
        self._foreseen.clear()

    def _drop_old_entries(self) -> None:
        """Sessions that ended do not say so here."""
        num_tolerated = 2 * len(self._table) + _SPARE_ENTRIES
        if max(self._mirror.num_watched, len(self._paused)) <= num_tolerated:
            return
        for handle in [*self._mirror.watched(), *self._paused]:
            if self._table.get(handle) is None:
                self._leave(handle)
