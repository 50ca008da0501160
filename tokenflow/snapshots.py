"""What a plan is made from, put together.

Owns the making of a `Snapshot` and the moving averages of arrivals that it contains. Pure but for
what the engine's events tell meanwhile (whereabouts.py).
"""

from __future__ import annotations

import numpy as np

from tokenflow.arrivals import ArrivalAverages
from tokenflow.config import ServingConfig
from tokenflow.costs import CostModel
from tokenflow.output_lengths import OutputLengths
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.types import KvView, Snapshot
from tokenflow.whereabouts import KvWhereabouts


class Snapshots:
    """Makes snapshots of one server. lengths: of the answers that have ended."""

    def __init__(
        self,
        table: SessionTable,
        whereabouts: KvWhereabouts,
        costs: CostModel,
        lengths: OutputLengths,
        config: ServingConfig,
        num_total_blocks: int,
    ) -> None:
        engine = config.executor_config()
        self._table = table
        self._whereabouts = whereabouts
        self._costs = costs
        self._lengths = lengths if config.learn_output_lengths else None
        self._capacity_policy = engine.scheduler_config.capacity_scheduler_policy
        self._tokens_per_block = engine.tokens_per_block
        self._max_batch_size = engine.max_batch_size
        self._plan_interval_s = config.plan_interval_s
        self._num_total_blocks = num_total_blocks
        self._arrivals = ArrivalAverages()

    def arrived(self, session: Session, now: float) -> None:
        """A request was taken in."""
        self._arrivals.observe(now, self._table.num_blocks_to_start(session))

    def make(self, now: float, *, has_tiering: bool) -> Snapshot:
        """The situation at `now`. has_tiering: the engine moves KV when it is told to."""
        self._whereabouts.refresh()
        sessions = self._table.columns(now)
        lengths = self._lengths
        num_blocks_held = int(np.add.reduce(sessions.num_blocks_held))
        return Snapshot(
            now=now,
            sessions=sessions,
            kv=KvView(
                capacity_policy=self._capacity_policy,
                tokens_per_block=self._tokens_per_block,
                num_total_blocks=self._num_total_blocks,
                num_free_blocks=self._num_total_blocks - num_blocks_held,
                max_batch_size=self._max_batch_size,
                num_host_blocks=self._whereabouts.num_host_blocks,
                has_tiering=has_tiering,
            ),
            costs=self._costs.estimate(self._plan_interval_s),
            arrivals=self._arrivals.estimate(now),
            lengths=None if lengths is None else lengths.estimate(sessions, now),
        )
