"""One row of numbers per session, column by column, for the planner.

Owns the storage: two two-dimensional arrays, one per dtype, so that a snapshot is one copy of each
instead of one per column. A row belongs to a session from `take` to `give_back`; rows are listed in
the order in which they were taken, which is the order of arrival.

A session keeps its slot, the number by which decisions name it, but not its place in the arrays.
Places are handed out from front to back, so the arrays are in order by themselves; those given back
stay empty until they are many, and then the others move up.

Invariants: places rise in the order in which the rows were taken; every place before the next one
to be handed out is empty or some slot's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tokenflow.reader import ReaderState, slack_s
from tokenflow.types import FloatArray, IntArray, SessionColumns

_READER_STATE = ("unread", "unread_time", "read_rate")
_FLOATS = ("arrival_time", "wait_since_time", "running_since_time", *_READER_STATE, "priority")
_FLAGS = ("has_reader", "started", "pausable", "held")
_INTS = (
    *_FLAGS,
    "slot",
    "state",
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

_MAX_EMPTY_SHARE = 0.125
"""Of the places in use. What is empty is left out with each snapshot, which costs more than copying
it; moving up costs about as much as some snapshots."""


class SessionRows:
    """Rows by slot. unread, unread_time and read_rate are a `reader.ReaderState`."""

    def __init__(self, num_rows: int) -> None:
        self._floats = np.zeros((len(_FLOATS), num_rows))
        self._ints = np.zeros((len(_INTS), num_rows), dtype=np.int64)
        self._is_taken = np.zeros(num_rows, dtype=np.bool_)
        self._free_slots = list(range(num_rows - 1, -1, -1))
        self._places = [0] * num_rows  # by slot
        self._num_places = self._num_empty = 0

    def take(self) -> int:
        """The slot of a fresh row, all zero but its slot."""
        if self._num_places == len(self._is_taken):
            self._make_room()
        if not self._free_slots:
            num = len(self._places)
            self._free_slots.extend(range(2 * num - 1, num - 1, -1))
            self._places.extend([0] * num)
        slot, place = self._free_slots.pop(), self._num_places
        self._num_places += 1
        self._places[slot] = place
        self._floats[:, place] = 0.0
        self._ints[:, place] = 0
        self._ints[_I["slot"], place] = slot
        self._is_taken[place] = True
        return slot

    def give_back(self, slot: int) -> None:
        """The row is not used any more."""
        self._is_taken[self._places[slot]] = False
        self._num_empty += 1
        self._free_slots.append(slot)

    def set_float(self, name: str, slot: int, value: float) -> None:
        """Write one number."""
        self._floats[_F[name], self._places[slot]] = value

    def set_int(self, name: str, slot: int, value: int) -> None:
        """Write one whole number, or a truth value."""
        self._ints[_I[name], self._places[slot]] = value

    def set_progress(
        self,
        slots: Sequence[int],
        num_generated: Sequence[int],
        reader_states: Iterable[ReaderState],
    ) -> None:
        """Write what tokens change, of several rows."""
        places = np.array([self._places[slot] for slot in slots])
        self._ints[_I["num_generated"], places] = num_generated
        columns = zip(*reader_states, strict=True)
        for name, values in zip(_READER_STATE, columns, strict=True):
            self._floats[_F[name], places] = values

    def columns(self, now: float) -> SessionColumns:
        """All taken rows in order; arrays are copies."""
        floats, ints = self._taken()
        arrival_time, wait_since_time, running_since_time, *reader, priority = floats
        unread, unread_time, read_rate = reader
        flags = ints[: len(_FLAGS)].astype(np.bool_)
        has_reader, started, pausable, held = flags
        slot, state, prompt, generated, limit, *blocks = ints[len(_FLAGS) :]
        held_blocks, needed, final, to_compute, num_pauses, on_host, copied = blocks
        return SessionColumns(
            slot=slot,
            state=state,
            arrival_time=arrival_time,
            wait_since_time=wait_since_time,
            running_since_time=running_since_time,
            slack_s=slack_s(unread, unread_time, read_rate, now),
            read_rate=read_rate,
            has_reader=has_reader,
            started=started,
            pausable=pausable,
            held=held,
            priority=priority,
            num_prompt_tokens=prompt,
            num_generated=generated,
            max_tokens=limit,
            num_blocks_held=held_blocks,
            num_blocks_needed=needed,
            num_blocks_final=final,
            num_resume_tokens=to_compute,
            num_pauses=num_pauses,
            num_host_blocks=on_host,
            num_copied_blocks=copied,
        )

    def _taken(self) -> tuple[FloatArray, IntArray]:
        """Copies of both arrays without what is empty."""
        if self._num_empty > _MAX_EMPTY_SHARE * self._num_places:
            self._move_up()
        num = self._num_places
        if not self._num_empty:
            return self._floats[:, :num].copy(), self._ints[:, :num].copy()
        places = self._is_taken[:num].nonzero()[0]
        return self._floats.take(places, axis=1), self._ints.take(places, axis=1)

    def _make_room(self) -> None:
        """More places at the end: twice as many, unless a quarter or more of them is empty."""
        num = len(self._is_taken)
        if 4 * self._num_empty >= num:
            self._move_up()
            return
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
        self._is_taken = np.concatenate([self._is_taken, np.zeros(num, dtype=np.bool_)])

    def _move_up(self) -> None:
        """Close the gaps."""
        places = self._is_taken[: self._num_places].nonzero()[0]
        num = len(places)
        self._floats[:, :num] = self._floats[:, places]
        self._ints[:, :num] = self._ints[:, places]
        self._is_taken[:num] = True
        self._num_places, self._num_empty = num, 0
        for place, slot in enumerate(self._ints[_I["slot"], :num].tolist()):
            self._places[slot] = place
