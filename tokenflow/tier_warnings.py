"""What operators are told about the KV tiers: that something goes wrong, rarely, and how often.

Owns the warnings that a lasting fault would repeat with every iteration. Invariant: of each kind at
most one within WARNING_PERIOD_S, the first one at once, each with the counts since the one before;
what comes after the last one is in the metrics only. Pure but for the log: time is an argument.
"""

from __future__ import annotations

import logging

from tokenflow.executor.kv_api import KvTierStats

logger = logging.getLogger("tokenflow")

WARNING_PERIOD_S = 60.0


class TierWarnings:
    """Counts what goes wrong with copies and with paused KV, and warns of it."""

    def __init__(self) -> None:
        self._failures = _Seldom(2)
        self._losses = _Seldom(2)

    def copies_failed(self, num_offloads: int, num_onboards: int, error: str, now: float) -> None:
        """So many copies of a block failed, to the host and back; error: why the last one did, as
        far as is known."""
        counts = self._failures.count((num_offloads, num_onboards), now)
        if counts is not None:
            logger.warning(
                "copies of KV blocks failed: %d to the host, %d back, in all since the last such "
                "warning (%s); what is missing is computed again",
                *counts,
                error or "reason unknown",
            )

    def pushed_out(self, num_tokens: int, tiers: KvTierStats, now: float) -> None:
        """A stream that had been paused computed `num_tokens` tokens again, which neither tier had
        kept; tiers: as they are now."""
        counts = self._losses.count((1, num_tokens), now)
        if counts is not None:
            logger.warning(
                "the host tier could not keep the KV of all paused requests: %d of them computed "
                "%d tokens again, in all since the last such warning; of its %d blocks "
                "(kv_cache_host_memory_bytes) it gave %d to others and had none for %d more since "
                "the engine started",
                *counts,
                tiers.num_host_blocks,
                tiers.num_host_evicted_blocks,
                tiers.num_host_full,
            )


class _Seldom:
    """Counts of one kind since its last warning."""

    def __init__(self, num_counts: int) -> None:
        self._counts = (0,) * num_counts
        self._next_time = float("-inf")

    def count(self, added: tuple[int, ...], now: float) -> tuple[int, ...] | None:
        """The counts so far with `added`, if a warning is due; they begin anew then."""
        counts = tuple(a + b for a, b in zip(self._counts, added, strict=True))
        if now < self._next_time:
            self._counts = counts
            return None
        self._counts = (0,) * len(counts)
        self._next_time = now + WARNING_PERIOD_S
        return counts
