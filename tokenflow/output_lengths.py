"""How long answers are, learned from those that have ended.

`max_tokens` is what a client allows, often far more than the model says. Owns the estimate of what
to expect instead: Kaplan and Meier's (1958) of the length at which answers end by themselves. One
that was cut by its limit or left by its client, and one that is not over yet, says only that it is
longer than what it has; leaving those out would make answers look short, because short ones end
first.

Invariants: with no answer that ended by itself, what is expected is `max_tokens`; it is never more,
and never less than one token more than there is.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tokenflow.types import IntArray, LengthEstimate

_WINDOW = 256
"""Answers that count, the last ones."""

_NUM_UNENDING = 4
"""So many answers that go on for ever are taken to have been seen: a few that ended say little, and
what is longer than all that were seen may be as long as it is allowed to be."""


class OutputLengths:
    """Learns from ended answers."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)
        self._estimate: LengthEstimate | None = None
        self._is_current = True

    def observe(self, num_tokens: int, *, stopped: bool) -> None:
        """An answer of so many tokens is over; stopped: it ended by itself."""
        if num_tokens:
            self._ended.append((num_tokens, stopped))
            self._is_current = False

    def estimate(self, num_generated: IntArray) -> LengthEstimate | None:
        """What is known; None while no answer ended by itself. num_generated [n]: tokens of the
        answers that are not over; looked at only where some have ended since the last call."""
        if not self._is_current:
            self._estimate = self._fitted(num_generated)
            self._is_current = True
        return self._estimate

    def _fitted(self, num_generated: IntArray) -> LengthEstimate | None:
        ended = np.array(self._ended, dtype=np.int64)
        stopped = ended[ended[:, 1] > 0, 0]
        if not len(stopped):
            return None
        lengths, num_ends = np.unique(stopped, return_counts=True)
        seen = np.sort(np.concatenate([ended[:, 0], num_generated[num_generated > 0]]))
        num_longer = len(seen) - seen.searchsorted(lengths) + _NUM_UNENDING  # or as long
        survival = np.concatenate([[1.0], np.cumprod(1.0 - num_ends / num_longer)])
        points = np.concatenate([[0.0], lengths])
        means = np.concatenate([[0.0], np.cumsum(survival[:-1] * np.diff(points))])
        return LengthEstimate(lengths=points, survival=survival, means=means)
