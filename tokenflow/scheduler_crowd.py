"""Many newcomers at once, where each takes the place of the next stream that yields.

Owns the shortcut for the usual case of a crowd: all slots are taken, and everybody who comes is
admitted and gets the one slot of the first stream that may still yield. What `scheduler.plan` does
one by one is then the same for all, and found out for all together.

Invariant: what is drafted here is what would be drafted one by one; the first newcomer for whom
that is not certain, and all after it, are left to be placed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_forecast import PrefillBudget
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import Victims
from tokenflow.scheduler_view import View, num_first
from tokenflow.types import IntArray

_MIN_CROWD = 6
"""Fewer are placed one by one in less time."""

Step = tuple[int, Sequence[int]]
"""A newcomer, and who was paused for it."""


def place_crowd(
    view: View, draft: Draft, able: Victims, rows: IntArray, load: Load, prefill: PrefillBudget
) -> list[Step]:
    """Place as many of the first of `rows` as can be placed so; counted in `load` and `prefill`."""
    if draft.slots or len(rows) < _MIN_CROWD:
        return []
    victims, spare_s = able.others
    if draft.pause:
        left = ~np.isin(victims, draft.pause)
        victims, spare_s = victims[left], spare_s[left]
    num = min(len(rows), len(victims))
    if num < _MIN_CROWD:
        return []
    newcomers, victims = rows[:num], victims[:num]
    blocks = draft.blocks + np.add.accumulate(view.frees[victims] - view.need[newcomers])
    prefill_s = view.snapshot.sessions.num_resume_tokens[newcomers] / prefill.tokens_per_s
    fits = (blocks >= 0) & (spare_s[:num] >= prefill_s)
    if not view.all_pausable:
        fits &= view.snapshot.sessions.pausable[newcomers]
    num = num_first(fits)
    num = num and load.num_admitted(newcomers[:num])
    num = num and prefill.take_first(newcomers[:num], prefill_s[:num])
    if not num:
        return []
    load.add_first(newcomers[:num])
    names, yielding = newcomers[:num].tolist(), victims[:num].tolist()
    draft.exchange_each(names, yielding, "waiting", int(blocks[num - 1]))
    return list(zip(names, zip(yielding, strict=True), strict=True))
