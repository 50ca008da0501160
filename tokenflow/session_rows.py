"""One row of numbers per session, column by column, for the planner.

Owns the storage: two two-dimensional arrays, one per dtype, so that a snapshot is one
fancy-indexing call each instead of one per column. A row belongs to a session from `take` to
`give_back`; rows are listed in the order in which they were taken, which is the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.reader import slack_s
from tokenflow.types import IntArray, SessionColumns

_FLOATS = (
    "arrival_time",
    "wait_since_time",
    "running_since_time",
    "unread",
    "unread_time",
    "read_rate",
    "priority",
)
_INTS = (
    "slot",
    "state",
    "has_reader",
    "started",
    "pausable",
    "held",
    "num_prompt_tokens",
    "num_generated",
    "max_tokens",
    "num_blocks_held",
    "num_blocks_needed",
    "num_blocks_final",
    "num_resume_tokens",
    "num_pauses",
    "num_host_blocks",
    "num_copied_blocks",
)
_F = {name: row for row, name in enumerate(_FLOATS)}
_I = {name: row for row, name in enumerate(_INTS)}


class SessionRows:
    """Rows by slot. unread, unread_time and read_rate are a `reader.ReaderState`."""

    def __init__(self, num_rows: int) -> None:
        self._floats = np.zeros((len(_FLOATS), num_rows))
        self._ints = np.zeros((len(_INTS), num_rows), dtype=np.int64)
        self._free_slots = list(range(num_rows - 1, -1, -1))
        self._taken: dict[int, None] = {}
        self._order: IntArray | None = None

    def take(self) -> int:
        """The slot of a fresh row, all zero but its slot."""
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._floats[:, slot] = 0.0
        self._ints[:, slot] = 0
        self._ints[_I["slot"], slot] = slot
        self._taken[slot] = None
        self._order = None
        return slot

    def give_back(self, slot: int) -> None:
        """The row is not used any more."""
        del self._taken[slot]
        self._free_slots.append(slot)
        self._order = None

    def set_float(self, name: str, slot: int, value: float) -> None:
        """Write one number."""
        self._floats[_F[name], slot] = value

    def set_int(self, name: str, slot: int, value: int) -> None:
        """Write one whole number, or a truth value."""
        self._ints[_I[name], slot] = value

    def set_floats(self, name: str, slots: Sequence[int], values: Sequence[float]) -> None:
        """Write one number of each of several rows."""
        self._floats[_F[name], slots] = values

    def set_ints(self, name: str, slots: Sequence[int], values: Sequence[int]) -> None:
        """Write one whole number of each of several rows."""
        self._ints[_I[name], slots] = values

    def columns(self, now: float) -> SessionColumns:
        """All taken rows in order; arrays are copies."""
        if self._order is None:
            self._order = np.fromiter(self._taken, dtype=np.int64, count=len(self._taken))
        f, i = self._floats[:, self._order], self._ints[:, self._order]
        rate = f[_F["read_rate"]]
        return SessionColumns(
            slot=i[_I["slot"]],
            state=i[_I["state"]],
            arrival_time=f[_F["arrival_time"]],
            wait_since_time=f[_F["wait_since_time"]],
            running_since_time=f[_F["running_since_time"]],
            slack_s=slack_s(f[_F["unread"]], f[_F["unread_time"]], rate, now),
            read_rate=rate,
            has_reader=i[_I["has_reader"]].astype(np.bool_),
            started=i[_I["started"]].astype(np.bool_),
            pausable=i[_I["pausable"]].astype(np.bool_),
            held=i[_I["held"]].astype(np.bool_),
            priority=f[_F["priority"]],
            num_prompt_tokens=i[_I["num_prompt_tokens"]],
            num_generated=i[_I["num_generated"]],
            max_tokens=i[_I["max_tokens"]],
            num_blocks_held=i[_I["num_blocks_held"]],
            num_blocks_needed=i[_I["num_blocks_needed"]],
            num_blocks_final=i[_I["num_blocks_final"]],
            num_resume_tokens=i[_I["num_resume_tokens"]],
            num_pauses=i[_I["num_pauses"]],
            num_host_blocks=i[_I["num_host_blocks"]],
            num_copied_blocks=i[_I["num_copied_blocks"]],
        )

    def _grow(self) -> None:
        old = self._floats.shape[1]
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
        self._free_slots.extend(range(2 * old - 1, old - 1, -1))
