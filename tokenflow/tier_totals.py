"""Both KV tiers over the life of a server: the figures of the moment, and totals of all engines.

Owns the step from an engine's own totals, which start anew with each engine, to the server's.
"""

from __future__ import annotations

from tokenflow.answers import Counters
from tokenflow.executor.kv_api import KvTierStats

_TOTALS = {
    "num_offloads_started": "num_offloads_started",
    "num_offloads_completed": "num_offloads_completed",
    "num_offloads_failed": "num_offloads_failed",
    "num_onboards_started": "num_onboards_started",
    "num_onboards_completed": "num_onboards_completed",
    "num_onboards_failed": "num_onboards_failed",
    "offload_s": "offload_s",
    "onboard_s": "onboard_s",
    "wait_s": "copy_wait_s",
    "num_host_evicted_blocks": "num_host_evicted_blocks",
    "num_host_full": "num_host_full",
}
"""Cumulative fields of KvTierStats, and the counters that they are added to."""


class TierTotals:
    """Adds what each iteration says to `counters`.

    now: both tiers as of the last iteration; None before the first one and without an engine.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.now: KvTierStats | None = None

    def observe(self, stats: KvTierStats) -> None:
        """An iteration ended with these figures."""
        before, self.now = self.now, stats
        for name, counter in _TOTALS.items():
            total = getattr(stats, name)
            known = 0 if before is None else getattr(before, name)
            added = total - known if total >= known else total
            setattr(self._counters, counter, getattr(self._counters, counter) + added)

    def lost(self) -> None:
        """The engine is gone, and its tiers with it; the next one counts from 0."""
        self.now = None
