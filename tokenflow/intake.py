"""Who is let in, and for how long they may wait: the bounds on queue, wait and size.

Owns the refusals that need the state of the server; what can be said from a request alone is the
codec's. Each is one clear error at once; `overloaded` ones may be tried again later.
"""

from __future__ import annotations

from tokenflow.answers import Answers
from tokenflow.config import ServingConfig
from tokenflow.feedback import EngineFeedback
from tokenflow.session_table import SessionTable
from tokenflow.types import GenerateRequest, SessionState

_S = SessionState


class Intake:
    """The bounds, applied to the requests that come and those that wait."""

    def __init__(
        self,
        table: SessionTable,
        answers: Answers,
        feedback: EngineFeedback,
        config: ServingConfig,
        num_total_blocks: int,
    ) -> None:
        self._table = table
        self._answers = answers
        self._feedback = feedback
        self._config = config
        self._num_total_blocks = num_total_blocks

    def is_full(self) -> bool:
        """True while no further request may wait (max_queue_size)."""
        return self._num_unstarted() >= self._config.max_queue_size

    @property
    def num_queued_in_engine(self) -> int:
        """Enqueued requests that the engine holds in its own queue, as of its last iteration."""
        return min(self._feedback.num_queued, self._table.count(_S.PREFILLING))

    def lets_in(self, handle: int, request: GenerateRequest, now: float) -> bool:
        """True for a request that may wait for its start; the others are answered here."""
        limit = self._config.max_queue_size
        if self.is_full():
            message = f"overloaded: {limit} requests are waiting (max_queue_size); try again later"
            self._answers.refused(handle, request, message, now, retryable=True, overloaded=True)
            return False
        num_blocks = self._table.num_blocks_at_full_length(request)
        if num_blocks > self._num_total_blocks:
            message = (
                f"max_tokens: prompt of {len(request.input_token_ids)} and {request.max_tokens}"
                f" tokens need {num_blocks} KV blocks, the pool has {self._num_total_blocks}"
            )
            self._answers.refused(handle, request, message, now)
            return False
        return True

    def expire(self, now: float) -> None:
        """End those that waited too long for their start; the time of a hold does not count."""
        limit = self._config.max_queue_delay_s
        for handle in self._table.groups.waits.pop_due(now - limit):
            session = self._table.get(handle)
            assert session is not None
            self._answers.counters.num_overloaded += 1
            message = f"overloaded: not started within {limit} s (max_queue_delay_s)"
            self._answers.failed(session, message, now, retryable=True)
            self._table.transition(session, _S.FINISHED, now)

    def _num_unstarted(self) -> int:
        """Requests that wait for a place: ours that their clients do not hold, and those in the
        engine beyond its batch or, as of its last iteration, in its queue."""
        beyond = self._table.count(_S.PREFILLING, _S.RUNNING, _S.RESUMING)
        beyond -= self._config.max_batch_size
        return len(self._table.groups.waits) + max(beyond, self.num_queued_in_engine)
