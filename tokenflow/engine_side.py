"""All that knows the engine of the moment, put together.

Owns the parts behind the coordinator that speak to an engine or about it (commands, feedback, where
KV is, snapshots, recovery), and what happens to them when an engine is lost and when the next one
starts. Invariant: between the two nothing is asked of an engine and nothing is planned.
"""

from __future__ import annotations

import dataclasses

from tokenflow.answers import Answers
from tokenflow.commands import EngineCommands
from tokenflow.config import ServingConfig
from tokenflow.costs import CostModel
from tokenflow.executor.api import Executor
from tokenflow.executor.kv_api import KvPools, KvTierStats
from tokenflow.feedback import EngineFeedback
from tokenflow.output_lengths import OutputLengths
from tokenflow.recovery import Recovery
from tokenflow.retention import PromptBeginnings
from tokenflow.session import Session
from tokenflow.session_table import SessionTable
from tokenflow.snapshots import Snapshots
from tokenflow.tiering_commands import TieringCommands
from tokenflow.types import Snapshot
from tokenflow.whereabouts import KvWhereabouts


class EngineSide:
    """The parts, and the engine's end and start.

    num_total_blocks: device blocks of the pool.
    """

    def __init__(
        self,
        executor: Executor,
        config: ServingConfig,
        table: SessionTable,
        answers: Answers,
        costs: CostModel,
        lengths: OutputLengths,
    ) -> None:
        engine = config.executor_config()
        pool = engine.kv_cache_config
        self.num_total_blocks = (pool.max_tokens or 0) // engine.tokens_per_block
        self._table = table
        self._beginnings = PromptBeginnings(engine.tokens_per_block)
        self._recovery = Recovery(table, answers)
        self._whereabouts = KvWhereabouts(
            executor, table, answers.counters, self.num_total_blocks, engine.tokens_per_block
        )
        self.commands = EngineCommands(
            executor,
            table,
            answers,
            self._whereabouts,
            TieringCommands(executor, table, engine.tokens_per_block),
            self._beginnings if _has_retention(config) else None,
        )
        self.feedback = EngineFeedback(
            self.commands,
            table,
            answers,
            costs,
            self._whereabouts,
            self._recovery,
            self.num_total_blocks,
        )
        self.snapshots = Snapshots(
            table, self._whereabouts, costs, lengths, config, self.num_total_blocks
        )
        self._look_at_pools(executor)

    def arrived(self, session: Session, now: float) -> None:
        """A request was taken in."""
        request = session.request
        if request.lora_config is not None:
            lora = self.commands.adapters.keep(request.lora_config)
            session.request = request = dataclasses.replace(request, lora_config=lora)
        session.num_shared_tokens = self._beginnings.observe(
            request.input_token_ids, request.cache_salt_id, request.lora_task_id
        )
        self.snapshots.arrived(session, now)

    def lost(self, message: str, now: float) -> None:
        """The engine ended; `message` says how. What it held waits for the next one, if it may."""
        self.commands.lost()
        for session in self._table:
            session.is_left_in_cache = False
            self._recovery.lost(session, message, now)
        self._whereabouts.lost()
        self.emptied()
        self.feedback.tiers.lost()

    def emptied(self) -> None:
        """Everything was taken from the engine, or it is gone: nothing is queued or in use."""
        self.feedback.on_engine_emptied(self.num_total_blocks)

    def started(self, executor: Executor) -> None:
        """An engine that knows nothing took the place of the lost one."""
        self._whereabouts.use(executor)
        self.commands.use(executor)
        self._look_at_pools(executor)

    def snapshot(self, now: float) -> Snapshot:
        """What the planner may look at."""
        return self.snapshots.make(now, has_tiering=self.commands.has_tiering)

    @property
    def tiers(self) -> KvTierStats | None:
        """Both KV tiers, as of the last iteration or the engine's start; None = unknown."""
        return self.feedback.tiers.now

    @property
    def kv_is_mirrored(self) -> bool:
        """True while the engine's events tell where KV is; else it is estimated."""
        return self._whereabouts.is_mirrored

    def _look_at_pools(self, executor: Executor) -> None:
        """Take in what an engine that has just started says of its tiers, if it does."""
        if not isinstance(executor, KvPools):
            return
        self.feedback.tiers.started(executor, self.num_total_blocks)
        self._whereabouts.set_num_host_blocks(executor.num_host_blocks)


def _has_retention(config: ServingConfig) -> bool:
    """True if requests are to say what their blocks are worth: those of the baseline say what those
    of a stock deployment do, nothing."""
    pool = config.executor_config().kv_cache_config
    if config.scheduling_policy != "tokenflow":
        return False
    return bool(pool.host_cache_size or pool.event_buffer_max_size)
