"""What kinds that can never be paused may hold of the engine: half of the slots and of the blocks.

Owns who of them may come in. They yield to nobody, so however many they are and however long they
wait, they are in nobody else's way.
"""

from __future__ import annotations

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_view import View
from tokenflow.types import BoolArray, IntArray


class FixedShare:
    """What they hold with those that a draft admits, and who may join them.

    One alone may be larger than half, or it could never run. One that the others leave no blocks,
    and that has waited for max_bypass_s, is overtaken by no more of its kind, or the small ones
    would go past it for ever.
    """

    def __init__(self, view: View, draft: Draft) -> None:
        self._view = view
        self._num = self._num_blocks = 0
        if not view.all_pausable:
            s = view.snapshot.sessions
            rows = np.concatenate([view.in_engine, np.array(draft.admit, dtype=np.int64)])
            rows = rows[~s.pausable[rows]]
            self._num, self._num_blocks = len(rows), int(np.add.reduce(s.num_blocks_final[rows]))

    def allows(self, row: int) -> bool:
        """True if `row` may be admitted as far as it is up to its kind."""
        if self._view.all_pausable or self._view.snapshot.sessions.pausable[row]:
            return True
        return bool(self._have_room(np.array([row]))[0])

    def take(self, row: int) -> None:
        """Count `row` as admitted."""
        s = self._view.snapshot.sessions
        if not s.pausable[row]:
            self._num += 1
            self._num_blocks += int(s.num_blocks_final[row])

    def admissible(self) -> IntArray:
        """The waiting rows without those of them that may not be admitted now."""
        rows = self._view.waiting
        if self._view.all_pausable or not self._num:
            return rows
        s = self._view.snapshot.sessions
        may_come = s.pausable[rows]
        fixed = (~may_come).nonzero()[0]
        have_room = self._have_room(rows[fixed])
        waited_s = self._view.snapshot.now - s.arrival_time[rows[fixed]]
        left_out = ~have_room & (waited_s > self._view.policy.max_bypass_s)
        if np.count_nonzero(left_out):
            have_room[int(left_out.argmax()) :] = False
        may_come[fixed] = have_room
        result: IntArray = rows[may_come]
        return result

    def _have_room(self, rows: IntArray) -> BoolArray:
        """For each of `rows`, if it came alone, whether half would do."""
        kv, num_blocks = self._view.snapshot.kv, self._view.snapshot.sessions.num_blocks_final[rows]
        if not self._num:
            return np.ones(len(rows), dtype=np.bool_)
        enough: BoolArray = 2 * (self._num_blocks + num_blocks) <= kv.num_total_blocks
        return enough & (2 * (self._num + 1) <= kv.max_batch_size)
