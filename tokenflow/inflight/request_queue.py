"""Requests that the engine has and does not work on yet, and which of all are to end.

Owns the order of waiting: descending priority, then arrival. Invariant: an id is live from
`enqueue` to `forget`; only live ones can be cancelled.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from tokenflow.executor.api import Request, Response
from tokenflow.inflight.admission import AdmissionLimits, admitted_max_tokens
from tokenflow.inflight.responses import refusal_response
from tokenflow.inflight.sequence import SequenceState


class RequestQueue:
    """Takes requests in until they become active. waiting: those admitted, in order."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._new: list[tuple[int, Request]] = []
        self._cancels: set[int] = set()
        self._live_ids: set[int] = set()
        self._num_arrivals = 0
        self.waiting: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._new) + len(self.waiting)

    def enqueue(self, request_id: int, request: Request) -> None:
        """Take a request in; ids must be unique for ever."""
        self._new.append((request_id, request))
        self._live_ids.add(request_id)

    def cancel(self, request_id: int) -> None:
        """It is to end; unknown and finished ids are ignored."""
        if request_id in self._live_ids:
            self._cancels.add(request_id)

    def forget(self, request_id: int) -> None:
        """It has ended."""
        self._live_ids.remove(request_id)
        self._cancels.discard(request_id)

    def drop(self) -> None:
        """Forget everything that is not active."""
        for request_id in [i for i, _ in self._new] + [s.request_id for s in self.waiting]:
            self.forget(request_id)
        self._new.clear()
        self.waiting.clear()

    @property
    def has_cancels(self) -> bool:
        """True if somebody is to end."""
        return bool(self._cancels)

    def is_still(self, active: Sequence[SequenceState], max_batch_size: int) -> bool:
        """True if nobody has come or is to end, and nobody may become active."""
        if self._new or self._cancels:
            return False
        return not self.waiting or not self._may_fetch(active, max_batch_size)

    def cancelled(self, active: Iterable[SequenceState]) -> list[SequenceState]:
        """Those of `active` and of the waiting ones that are to end; what was not admitted yet
        waits for that."""
        if not self._cancels:
            return []
        return [s for s in (*active, *self.waiting) if s.request_id in self._cancels]

    def admit(self) -> list[Response]:
        """Let the new ones wait; the error responses of those that are refused."""
        responses: list[Response] = []
        for request_id, request in self._new:
            try:
                max_tokens = admitted_max_tokens(request, self._limits)
            except Exception as error:  # a malformed request must not end the others
                responses.append(refusal_response(request_id, request, error))
                self.forget(request_id)
                continue
            self._num_arrivals += 1
            sequence = SequenceState(
                request_id=request_id,
                request=request,
                order=self._num_arrivals,
                max_tokens=max_tokens,
                token_ids=list(request.input_token_ids),
            )
            bisect.insort(self.waiting, sequence, key=lambda s: s.sort_key)
        self._new.clear()
        return responses

    def fetch(self, active: list[SequenceState], max_batch_size: int) -> None:
        """Move who may become active to `active`, which is sorted: while there are fewer than
        `max_batch_size`, and beyond that whose priority exceeds the lowest active one's."""
        while self.waiting and self._may_fetch(active, max_batch_size):
            bisect.insort(active, self.waiting.pop(0), key=lambda s: s.sort_key)

    def _may_fetch(self, active: Sequence[SequenceState], max_batch_size: int) -> bool:
        if len(active) < max_batch_size:
            return True
        return self.waiting[0].request.priority > active[-1].request.priority
