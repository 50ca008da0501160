"""The largest load that passes, by bisection.

Owns the search. Pure but for what the trial itself does. It relies on this: what passes at a load
passes at every smaller one. Where that is not quite so (few random requests), the answer is a load
that passed, with one close above it that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FIRST_STEP = 1.12
"""Between the first load and the second; each further one is the square, up to `_LONGEST_STEP`."""
_LONGEST_STEP = 2.5
FARTHEST = 100.0
"""So many times more, or less, than the first load is tried."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """passed: the largest load that passed, None if none that was tried did. failed: the smallest
    that failed, None likewise."""

    passed: float | None
    failed: float | None


def largest_load(
    passes: Callable[[float], bool], first: float, *, tolerance: float, is_whole: bool
) -> Bracket:
    """Search from `first` on, up or down, until the two loads of the bracket differ by no more than
    the share `tolerance`, or by 1 where loads are whole numbers; others have three digits.

    Raises ValueError for a first load <= 0, and for a tolerance below 0.01, which three digits
    cannot tell apart.
    """
    if not first > 0 or tolerance < 0.01:
        raise ValueError(f"first must be > 0, tolerance >= 0.01, got {first} and {tolerance}")
    bracket = _gallop(passes, first, is_whole)
    passed, failed = bracket.passed, bracket.failed
    if passed is None or failed is None:
        return bracket
    while failed > passed * (1 + tolerance) and not (is_whole and failed - passed <= 1):
        middle = _rounded(math.sqrt(passed * failed), is_whole)
        if is_whole:
            middle = min(max(middle, passed + 1), failed - 1)
        if passes(middle):
            passed = middle
        else:
            failed = middle
    return Bracket(passed, failed)


def _gallop(passes: Callable[[float], bool], first: float, is_whole: bool) -> Bracket:
    """Away from `first` in growing steps until the verdict changes."""
    load = _rounded(first, is_whole)
    start, step = load, FIRST_STEP
    upwards = passes(load)
    last = load
    while start / FARTHEST < load < start * FARTHEST:
        load = _rounded(last * step if upwards else last / step, is_whole)
        if is_whole and load == last:
            load = last + 1 if upwards else last - 1
        if load <= 0:
            break
        if passes(load) != upwards:
            return Bracket(last, load) if upwards else Bracket(load, last)
        last, step = load, min(step * step, _LONGEST_STEP)
    return Bracket(last, None) if upwards else Bracket(None, last)


def _rounded(load: float, is_whole: bool) -> float:
    return float(max(1, round(load))) if is_whole else float(f"{load:.3g}")
