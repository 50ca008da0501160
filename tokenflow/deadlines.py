"""Requests' own time limits, earliest first.

Invariant: never more than about twice as many entries as requests with a limit are unfinished, so
that many short requests with long limits do not pile up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

_MIN_SWEEP = 64


class Deadlines:
    """Instants by handle.

    is_live(handle): False once the request has ended.
    """

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, handle: int, deadline: float) -> None:
        """Remember a request; without a limit (+inf) nothing is kept."""
        if deadline == float("inf"):
            return
        heapq.heappush(self._heap, (deadline, handle))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def next_time(self) -> float:
        """The earliest instant of a request that has not ended; +inf without one."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def pop_due(self, now: float) -> list[int]:
        """Handles of unfinished requests whose time is over, once each."""
        due: list[int] = []
        while self.next_time() <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due
