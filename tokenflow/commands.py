"""What is asked of the engine: start, pause and end sessions; and which engine that is.

Owns the executor of the moment, whether there is one, and since when it has made no progress.
Invariant: the state of a session and what the engine was asked for change together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenflow.adapters import Adapters
from tokenflow.answers import Answers
from tokenflow.errors import EngineError, InternalError, InvalidRequestError
from tokenflow.executor.api import Executor, KvCacheRetentionConfig
from tokenflow.preemption import engine_request
from tokenflow.retention import PromptBeginnings, retention_config
from tokenflow.session import IN_ENGINE, Session
from tokenflow.session_table import SessionTable
from tokenflow.tiering_commands import TieringCommands
from tokenflow.types import Decision, SessionState
from tokenflow.whereabouts import KvWhereabouts

_S = SessionState


class EngineCommands:
    """Commands to the executor.

    beginnings: what prompts have in common; None: requests do not say what their blocks are worth.
    adapters: the LoRA adapters that the engine has.
    is_up: False between the loss of an engine and the start of the next one.
    """

    def __init__(
        self,
        executor: Executor,
        table: SessionTable,
        answers: Answers,
        whereabouts: KvWhereabouts,
        tiering: TieringCommands,
        beginnings: PromptBeginnings | None,
    ) -> None:
        self._executor = executor
        self._table = table
        self._answers = answers
        self._whereabouts = whereabouts
        self._tiering = tiering
        self._beginnings = beginnings
        self._last_progress_time = float("-inf")
        self.adapters = Adapters()
        self.is_up = True

    def takes_requests(self) -> bool:
        """False once the engine has ended, also before that was noticed everywhere."""
        return self._executor.can_enqueue_requests()

    def use(self, executor: Executor) -> None:
        """Another engine took the place of the lost one."""
        self._executor = executor
        self._tiering.use(executor)
        self.is_up = True

    def lost(self) -> None:
        """The engine is gone: nothing is asked until there is the next one."""
        self.is_up = False
        self._tiering.lost()
        self.adapters.lost()

    @property
    def has_tiering(self) -> bool:
        """True if the engine moves KV when it is told to."""
        return self._tiering.is_available

    def apply(self, decision: Decision, now: float) -> None:
        """Do what a plan decided, in the order that `Decision` states."""
        at_slot = self._table.at_slot
        for slot in decision.pause:
            self._answers.counters.num_forced_pauses += slot in decision.forced
            self.pause(at_slot(slot), now, why=decision.why.get(slot))
        self._tiering.drop_host([at_slot(slot) for slot in decision.recompute])
        starting = [at_slot(slot) for slot in (*decision.resume, *decision.admit)]
        prefetched = [at_slot(slot) for slot in decision.prefetch]
        offloaded = [(at_slot(slot), num_blocks) for slot, num_blocks in decision.offload]
        self.start(starting, decision.why, now)
        self._tiering.prefetch(prefetched, now)
        self._tiering.offload(offloaded, now)

    def progressed(self, now: float) -> None:
        """An iteration ended, or something was said."""
        self._last_progress_time = now

    def stalled_s(self, now: float) -> float:
        """How long the engine has held requests without an iteration or a response, seconds."""
        if not self.is_up or not self._table.count(*IN_ENGINE):
            return 0.0
        return now - self._last_progress_time

    def start(self, sessions: Sequence[Session], why: Mapping[int, str], now: float) -> None:
        """Enqueue sessions that wait or are paused, in order. What the engine refuses ends with its
        message; if the engine has ended, they stay what they are."""
        if not sessions:
            return
        if not self._table.count(*IN_ENGINE):
            self.progressed(now)  # it was idle
        if self._enqueue(sessions, why, now) is None:
            return
        for session in sessions:  # one of them may be the cause; it must not end the others
            error = self._enqueue([session], why, now)
            if error is None:
                continue
            if not self.takes_requests():
                return
            self._answers.failed(session, f"the engine refused the request: {error}", now)
            self._table.transition(session, _S.FINISHED, now)

    def pause(self, session: Session, now: float, *, why: str | None) -> None:
        """Cancel a running session in the engine, to be resumed later."""
        if session.state is not _S.RUNNING:
            raise InternalError(f"pause of a session that is {session.state.name}")
        self.cancel(session)
        self._table.transition(session, _S.PAUSING, now)
        self._count_pause(session, now, why=why)

    def left_paused(self, session: Session, now: float) -> None:
        """Its lease ended and it was not started again: a pause without a cancel."""
        session.renews_lease = False
        self._table.count_pause(session)
        self._count_pause(session, now, why="lease")

    def cancel(self, session: Session) -> None:
        """Ask the engine for the end of what it holds of a session."""
        self.cancel_all([session.executor_request_id])

    def cancel_all(self, executor_ids: Sequence[int | None]) -> None:
        """The same for the requests with these ids; None is nobody."""
        for executor_id in executor_ids:
            if executor_id is not None and self.is_up:
                self._executor.cancel_request(executor_id)

    def _enqueue(
        self, sessions: Sequence[Session], why: Mapping[int, str], now: float
    ) -> Exception | None:
        """All of `sessions`, or none and return why."""
        requests = [
            engine_request(
                s.request,
                s.output_token_ids,
                s.handle,
                self._table.max_tokens_to_enqueue(s),
                self._retention(s),
                self.adapters.to_enqueue(s),
            )
            for s in sessions
        ]
        try:
            ids = self._executor.enqueue_requests(requests)
        except (RuntimeError, EngineError, InvalidRequestError) as error:
            return error
        for session, executor_request_id in zip(sessions, ids, strict=True):
            resumed = session.state is _S.PREEMPTED
            self._whereabouts.started(session)
            self._table.enter_engine(session, executor_request_id, now)
            if resumed:
                self._answers.counters.num_resumes += 1
            event = "resume" if resumed else "admit"
            self._answers.trace(event, session, now, why=why.get(session.slot))
        return None

    def _retention(self, session: Session) -> KvCacheRetentionConfig | None:
        if self._beginnings is None:
            return None
        request = session.request
        if session.output_token_ids:  # who came since counts too
            num_shared = self._beginnings.num_shared(
                request.input_token_ids, request.cache_salt_id, request.lora_task_id
            )
            session.num_shared_tokens = max(session.num_shared_tokens, num_shared)
        num_left = request.max_tokens - len(session.output_token_ids)
        return retention_config(
            session.num_shared_tokens,
            num_left,
            is_pausable=self._table.unpausable_reason(request) is None,
            has_lease=self._table.max_tokens_to_enqueue(session) < num_left,
        )

    def _count_pause(self, session: Session, now: float, *, why: str | None) -> None:
        self._answers.counters.num_pauses += 1
        self._answers.trace(
            "pause",
            session,
            now,
            why=why,
            slack_s=session.reader.slack_s(now),
            num_tokens=len(session.output_token_ids),
        )
