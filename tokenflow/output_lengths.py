"""How long answers are, learned from those that have ended.

`max_tokens` is what a client allows, often far more than the model says. Owns the estimate of what
to expect instead: Kaplan and Meier's (1958) of the length at which answers end by themselves. One
that was cut by its limit or left by its client, and one that is not over yet, says only that it is
longer than what it has; leaving those out would make answers look short, because short ones end
first.

A fit takes about a millisecond.

Invariants: with no answer that ended by itself, what is expected is `max_tokens`; it is never more,
and never less than one token more than there is.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from tokenflow.types import IntArray, LengthEstimate, SessionColumns, SessionState

_WINDOW = 2048
"""Answers that count, the last ones that have ended. Those that go on all count, so it has to be
far more than there are at once, or none would seem to end."""

_NUM_UNENDING = 4
"""So many answers that go on for ever are taken to have been seen: a few that ended say little, and
what is longer than all that were seen may be as long as it is allowed to be."""

_LONGEST = 1 << 16
"""Tokens. Of an answer that ended later it counts only that it was longer."""

_FIT_INTERVAL_S = 1.0
"""Between two fits. Answers that get longer than all others were are to be seen soon."""


class OutputLengths:
    """Learns from ended answers."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)
        self._num_stopped = 0
        self._estimate: LengthEstimate | None = None
        self._fit_time = -math.inf

    def observe(self, num_tokens: int, *, stopped: bool) -> None:
        """An answer of so many tokens is over; stopped: it ended by itself."""
        if not num_tokens:
            return
        if len(self._ended) == _WINDOW:
            self._num_stopped -= self._ended[0][1]
        self._ended.append((num_tokens, stopped))
        self._num_stopped += stopped

    def estimate(self, sessions: SessionColumns, now: float) -> LengthEstimate | None:
        """What is known; None while no answer ended by itself. sessions: those that are not over
        count as far as they are. One whose client has its end, but that the engine has to let go,
        does not count while it is CANCELLING; it does while it is RESUMING, until its next token.
        """
        if not self._num_stopped:
            return None
        if self._estimate is None or now - self._fit_time >= _FIT_INTERVAL_S:
            goes_on = sessions.state != SessionState.CANCELLING
            self._estimate, self._fit_time = self._fitted(sessions.num_generated[goes_on]), now
        return self._estimate

    def _fitted(self, num_generated: IntArray) -> LengthEstimate:
        ended = np.array(self._ended, dtype=np.int64)
        stopped = ended[ended[:, 1] > 0, 0]
        num_ends = np.bincount(stopped[stopped <= _LONGEST], minlength=1)
        seen = np.concatenate([ended[:, 0], num_generated[num_generated > 0]])
        num_seen = np.bincount(np.minimum(seen, len(num_ends)))[: len(num_ends)]
        num_at_risk = len(seen) + _NUM_UNENDING - (np.cumsum(num_seen) - num_seen)
        survival = np.cumprod(1.0 - num_ends / num_at_risk)
        restricted_means = np.cumsum(survival) - survival
        return LengthEstimate(survival=survival, restricted_means=restricted_means)
