"""What copying a block between the tiers costs, learned from the engine's running totals.

Owns the medians over the last iterations with copies, weighted by blocks, so that a hiccup of the
link counts as little as the few blocks it hit; and the share of the copies' time for which steps
waited, over a longer time. A total that falls means a new engine: it counts from zero again, and
what was learned stays (the link is the same).

Pure: no clock; the totals carry their durations.
"""

from __future__ import annotations

from collections import deque

from tokenflow.executor.kv_api import KvTierStats

_WINDOW = 32

_WAIT_HALF_LIFE_S = 4.0
"""Seconds of copying after which a copy counts half in the share of waiting. The share swings from
one second to the next, and what is admitted while it is low stays."""

_TOTALS = (
    "num_offloads_completed",
    "num_onboards_completed",
    "offload_s",
    "onboard_s",
    "wait_s",
)


class CopyCostModel:
    """Learns from `observe`; all figures are 0 (wait_share: 1) until something was copied."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._offloads: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._onboards: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._waited_s = self._copied_s = 0.0

    def observe(self, stats: KvTierStats) -> float:
        """Learn from the totals at the end of an iteration; returns the seconds for which steps
        waited for copies since the last call."""
        if all(getattr(stats, name) == self._totals[name] for name in _TOTALS):
            return 0.0
        now = {name: float(getattr(stats, name)) for name in _TOTALS}
        if any(now[name] < self._totals[name] for name in _TOTALS):
            self._totals = dict.fromkeys(_TOTALS, 0.0)
        delta = {name: now[name] - self._totals[name] for name in _TOTALS}
        self._totals = now
        for kept, direction in ((self._offloads, "offload"), (self._onboards, "onboard")):
            num, seconds = delta[f"num_{direction}s_completed"], delta[f"{direction}_s"]
            if num > 0 and seconds > 0:
                kept.append((num, seconds / num))
        copied_s = delta["offload_s"] + delta["onboard_s"]
        if copied_s > 0:
            kept_share = 0.5 ** (copied_s / _WAIT_HALF_LIFE_S)
            self._copied_s = kept_share * self._copied_s + copied_s
            self._waited_s = kept_share * self._waited_s + min(copied_s, delta["wait_s"])
        return delta["wait_s"]

    @property
    def offload_block_s(self) -> float:
        """Seconds per block to the host; as back, until one went there."""
        return _median(self._offloads or self._onboards, 0.0)

    @property
    def onboard_block_s(self) -> float:
        """Seconds per block back; as to the host, until one came back."""
        return _median(self._onboards or self._offloads, 0.0)

    @property
    def wait_share(self) -> float:
        """Share of the copies' time for which steps waited, in [0, 1]."""
        return self._waited_s / self._copied_s if self._copied_s else 1.0


def _median(observed: deque[tuple[float, float]], otherwise: float) -> float:
    """Median of the (weight, value) pairs by weight."""
    if not observed:
        return otherwise
    half = 0.5 * sum(weight for weight, _ in observed)
    total = 0.0
    for weight, value in sorted(observed, key=lambda pair: pair[1]):
        total += weight
        if total >= half:
            return value
    return max(value for _, value in observed)
