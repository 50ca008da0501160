"""Both KV tiers over the life of a server: the figures of the moment, and totals of all engines.

Owns the step from an engine's own totals, which start anew with each engine, to the server's, and
what in them is worth a warning (tier_warnings.py).
"""

from __future__ import annotations

from tokenflow.answers import Counters
from tokenflow.executor.kv_api import KvPools, KvTierStats
from tokenflow.tier_warnings import TierWarnings

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

    now: both tiers as of the last iteration, or as the engine was made; None without an engine, and
        before the first iteration of one that does not say how it was made.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._warnings = TierWarnings()
        self.now: KvTierStats | None = None

    def started(self, pools: KvPools, num_device_blocks: int) -> None:
        """An engine was made; its pools are empty."""
        self.now = KvTierStats(
            block_bytes=pools.block_bytes,
            num_device_blocks=num_device_blocks,
            num_device_used_blocks=0,
            num_device_cached_blocks=0,
            num_device_in_transit_blocks=0,
            num_host_blocks=pools.num_host_blocks,
            num_host_cached_blocks=0,
            num_host_in_transit_blocks=0,
        )

    def observe(self, stats: KvTierStats, now: float) -> None:
        """An iteration ended with these figures."""
        before, self.now = self.now, stats
        if stats == before:
            return
        added = dict.fromkeys(_TOTALS, 0)
        for name, counter in _TOTALS.items():
            total = getattr(stats, name)
            known = 0 if before is None else getattr(before, name)
            if total != known:
                added[name] = total - known if total >= known else total
                setattr(self._counters, counter, getattr(self._counters, counter) + added[name])
        failed = added["num_offloads_failed"], added["num_onboards_failed"]
        if any(failed):
            self._warnings.copies_failed(*failed, stats.last_copy_error, now)

    def pushed_out(self, num_tokens: int, now: float) -> None:
        """A stream that had been paused computed `num_tokens` tokens again, none of them by choice.
        Worth a warning where there is a host tier that was short of room: without one it is what
        pauses cost, and a copy that failed has a warning of its own."""
        tiers = self.now
        if tiers is not None and (tiers.num_host_evicted_blocks or tiers.num_host_full):
            self._warnings.pushed_out(num_tokens, tiers, now)

    def lost(self) -> None:
        """The engine is gone, and its tiers with it; the next one counts from 0."""
        self.now = None
