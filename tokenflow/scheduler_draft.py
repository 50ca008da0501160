"""The draft that a plan fills.

Owns: the free slots and blocks that are left, and who was placed or paused so far.

Invariants: a draft never goes below the free slots or blocks by placing (it may start below, when
the pool is about to run out).
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence

from tokenflow.scheduler_view import PREEMPTED, View
from tokenflow.types import Decision


class Draft:
    """A decision under construction: free room, and who was placed or paused so far.

    slots, blocks: what is free after everything drafted.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.slots = view.free_slots
        self.blocks = view.free_blocks
        self.pause: list[int] = []
        self.resume: list[int] = []
        self.admit: list[int] = []
        self.forced: list[int] = []
        self.prefetch: list[int] = []
        self.offload: list[tuple[int, int]] = []
        self._why: dict[int, str] = {}

    def copy(self) -> Draft:
        """A draft of its own that starts with everything drafted here."""
        other = Draft(self._view)
        other.adopt(self)
        return other

    def adopt(self, other: Draft) -> None:
        """Take over what `other`, a draft of the same view, holds."""
        self.slots, self.blocks = other.slots, other.blocks
        self.pause, self.forced = list(other.pause), list(other.forced)
        self.resume, self.admit = list(other.resume), list(other.admit)
        self.prefetch, self.offload = list(other.prefetch), list(other.offload)
        self._why = dict(other._why)

    def fits(self, row: int) -> bool:
        """True if `row` can be placed without another pause."""
        return self.slots >= 1 and self.blocks >= int(self._view.need[row])

    def victims_for(self, row: int, candidates: Iterable[int]) -> list[int] | None:
        """The fewest of `candidates`, best first, whose pause makes room for `row`.

        [] if it fits as it is, None if all of them do not make enough room. Dropping any one of
        the result leaves too little.
        """
        return self.victims_to_reach(1, int(self._view.need[row]), candidates)

    def set_aside(self) -> None:
        """What is free now is kept for somebody who does not fit yet."""
        self.slots, self.blocks = min(self.slots, 0), min(self.blocks, 0)

    def victims_to_reach(
        self, num_slots: int, num_blocks: int, candidates: Iterable[int]
    ) -> list[int] | None:
        """As `victims_for`, for a number of free slots and blocks."""
        frees = self._view.frees
        slots, blocks = self.slots - num_slots, self.blocks - num_blocks
        chosen: list[int] = []
        if slots < 0 or blocks < 0:
            for candidate in candidates:
                chosen.append(candidate)
                slots, blocks = slots + 1, blocks + int(frees[candidate])
                if slots >= 0 and blocks >= 0:
                    break
        if slots < 0 or blocks < 0:
            return None
        for candidate in reversed(chosen[:-1]):
            freed = int(frees[candidate])
            if slots >= 1 and blocks >= freed:
                chosen.remove(candidate)
                slots, blocks = slots - 1, blocks - freed
        return chosen

    def take_out(self, row: int, why: str, *, forced: bool = False) -> None:
        """Pause `row`."""
        self.pause.append(row)
        if forced:
            self.forced.append(row)
        self._why[row] = why
        self.slots += 1
        self.blocks += int(self._view.frees[row])

    def place(self, row: int, why: str, victims: Sequence[int] = ()) -> None:
        """Start or resume `row`, after pausing `victims` for it."""
        for victim in victims:
            self.take_out(victim, f"for {why}")
        assert self.fits(row), "placed without room"
        started = self._view.snapshot.sessions.state[row] == PREEMPTED
        (self.resume if started else self.admit).append(row)
        self._why[row] = why
        self.slots -= 1
        self.blocks -= int(self._view.need[row])

    def exchange_each(
        self, rows: Sequence[int], victims: Sequence[int], why: str, num_blocks: int
    ) -> None:
        """Start newcomers, each after pausing one of as many victims; that leaves `num_blocks`."""
        self.pause += victims
        self.admit += rows
        self._why.update(dict.fromkeys(victims, f"for {why}"))
        self._why.update(dict.fromkeys(rows, why))
        self.blocks = num_blocks
        assert len(rows) == len(victims), "placed without a slot"
        assert num_blocks >= 0, "placed without room"

    def fetch(self, row: int) -> None:
        """Bring what the host holds of the paused `row` to the device."""
        self.prefetch.append(row)
        self._why[row] = "prefetch"
        self.blocks -= int(self._view.ways.num_blocks[row])

    def copy_out(self, row: int, num_blocks: int) -> None:
        """Copy that many more of the oldest blocks of `row` to the host."""
        self.offload.append((row, num_blocks))
        self._why.setdefault(row, "write-through")

    def prune(self) -> None:
        """Take back pauses that a later, larger one made unnecessary."""
        if self.slots < 1 or not self.pause:
            return
        for row in self.pause[::-1]:
            freed = int(self._view.frees[row])
            if self.slots >= 1 and self.blocks >= freed:
                self.pause.remove(row)
                del self._why[row]
                self.slots, self.blocks = self.slots - 1, self.blocks - freed
        self.forced = [row for row in self.forced if row in self._why]

    def named(self, row: int) -> bool:
        """True if `row` was placed or paused."""
        return row in self._why

    @property
    def named_rows(self) -> KeysView[int]:
        """Those that were."""
        return self._why.keys()

    def decision(self) -> Decision:
        """The drafted decision, in slots."""
        if not self._why:
            return Decision()
        slot_of = self._view.snapshot.sessions.slot.item
        recomputed = []
        if self.resume:
            recomputes = self._view.ways.recomputes
            recomputed = [row for row in self.resume if recomputes[row]]
        return Decision(
            pause=tuple(map(slot_of, self.pause)),
            resume=tuple(map(slot_of, self.resume)),
            admit=tuple(map(slot_of, self.admit)),
            forced=tuple(map(slot_of, self.forced)),
            recompute=tuple(map(slot_of, recomputed)),
            prefetch=tuple(map(slot_of, self.prefetch)),
            offload=tuple([(slot_of(row), num_blocks) for row, num_blocks in self.offload]),
            why=dict(zip(map(slot_of, self._why), self._why.values(), strict=True)),
        )
