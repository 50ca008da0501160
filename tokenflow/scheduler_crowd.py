"""Many newcomers at once, where each takes the place of the next stream that yields.

Owns the shortcut for the usual case of a crowd: all slots are taken, and everybody who comes is
admitted and gets the one slot of the first stream that may still yield. What `scheduler.plan` does
one by one is then the same for all, and found out for all together.

Invariant: what is drafted here is what would be drafted one by one; the first newcomer for whom
that is not certain, and all after it, are left to be placed one by one.
"""

from __future__ import annotations

import numpy as np

from tokenflow.scheduler_draft import Draft
from tokenflow.scheduler_forecast import PrefillBudget, num_first
from tokenflow.scheduler_load import Load
from tokenflow.scheduler_rules import Victims
from tokenflow.scheduler_view import View

_MIN_CROWD = 6
"""Fewer are placed one by one in less time."""

Step = tuple[int, list[int]]
"""A newcomer, and who was paused for it."""


def place_crowd(
    view: View, draft: Draft, able: Victims, rows: list[int], load: Load, prefill: PrefillBudget
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
    newcomers, victims = np.array(rows[:num]), victims[:num]
    s = view.snapshot.sessions
    blocks = draft.blocks + (view.frees[victims] - view.need[newcomers]).cumsum()
    fits = (blocks >= 0) & s.pausable[newcomers]
    fits &= spare_s[:num] >= s.num_resume_tokens[newcomers] / prefill.tokens_per_s
    newcomers = newcomers[: num_first(fits)]
    newcomers = newcomers[: load.num_admitted(newcomers)]
    newcomers = newcomers[: prefill.take_first(newcomers)]
    steps = list(zip(newcomers.tolist(), victims[: len(newcomers), None].tolist(), strict=True))
    if steps:
        load.add_first(newcomers)
        draft.place_each(steps, "waiting", int(blocks[len(steps) - 1]))
    return steps
