"""Tokens of many steps on their way to the coordinator, written down at once.

Owns the tokens that have arrived and that no session has yet. While a token changes nothing but the
count of what a client has, nobody looks at it; whoever is about to look calls `settle` before.
Invariant: after `settle` coordinator and clients are as if each token had been told when it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenflow.coordinator import Coordinator
from tokenflow.inflight.decode_run import DecodeBatch, DecodedStep
from tokenflow.inflight.virtual_runner import TOKEN_ID
from tokenflow.session import Session


class DecodedTokens:
    """tell(handle, times): the client of that handle got a token at each of these instants."""

    def __init__(
        self, coordinator: Coordinator, tell: Callable[[int, Sequence[float]], None]
    ) -> None:
        self._coordinator = coordinator
        self._tell = tell
        self._batch: DecodeBatch | None = None
        self._sessions: list[Session] = []
        self._num_left = 0
        self._num_ended = 0
        self._times: list[float] = []

    def arrive(self, step: DecodedStep, now: float) -> None:
        """What a step made reaches the coordinator at `now`."""
        if step.batch is not self._batch:
            self.settle()
            self._look(step.batch)
        if self._num_left:
            self._num_left -= 1
            self._times.append(now)
            return
        self.settle()
        self._coordinator.on_responses(step.responses(), now)
        self._batch = None

    def settle(self) -> None:
        """Write down what has arrived."""
        times, self._times = self._times, []
        if not times:
            return
        self._coordinator.on_decoded(self._sessions, [TOKEN_ID] * len(times), times)
        for session in self._sessions:
            self._tell(session.handle, times)

    def look_again(self) -> None:
        """Something else happened: sessions may have been answered. Settles."""
        self.settle()
        self._batch = None

    def planned(self) -> None:
        """The coordinator has planned; call `settle` before. A plan may end requests out of time;
        whoever it pauses gets what is on its way like any other."""
        counters = self._coordinator.counters
        num_ended = counters.num_timed_out + counters.num_failed
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            self._batch = None

    def _look(self, batch: DecodeBatch) -> None:
        coordinator = self._coordinator
        found = [coordinator.table.by_executor_id(i) for i in batch.request_ids]
        self._batch = batch
        self._sessions = [session for session in found if session is not None]
        self._num_left = min(map(coordinator.num_tokens_to_change, found))
