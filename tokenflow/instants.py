"""Instants by handle, earliest first.

Invariant: never more than twice as many entries as instants are kept, or a few dozen, so that many
short requests with long limits do not pile up.
"""

from __future__ import annotations

import heapq

_MIN_SWEEP = 64


class Instants:
    """One instant at most for each handle; `__len__` counts them."""

    def __init__(self) -> None:
        self._time_of: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # entries that `_time_of` does not have are over

    def __len__(self) -> int:
        return len(self._time_of)

    def get(self, handle: int) -> float | None:
        """The instant of a handle."""
        return self._time_of.get(handle)

    def set(self, handle: int, time: float) -> None:
        """Remember it, in the place of an earlier one of the same handle."""
        if self._time_of.get(handle) == time:
            return
        self._time_of[handle] = time
        heapq.heappush(self._heap, (time, handle))
        self._sweep()

    def discard(self, handle: int) -> None:
        """Forget it; nothing happens if there is none."""
        if self._time_of.pop(handle, None) is not None:
            self._sweep()

    def next_time(self) -> float:
        """The earliest instant; +inf without one."""
        heap, time_of = self._heap, self._time_of
        while heap and time_of.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def pop_due(self, now: float) -> list[int]:
        """Handles whose instant has come, in order, each once; they are forgotten."""
        due: list[int] = []
        while self._time_of and self.next_time() <= now:
            handle = heapq.heappop(self._heap)[1]
            self.discard(handle)
            due.append(handle)
        return due

    def _sweep(self) -> None:
        if len(self._heap) > max(_MIN_SWEEP, 2 * len(self._time_of)):
            self._heap = [(time, handle) for handle, time in self._time_of.items()]
            heapq.heapify(self._heap)
