"""The embedded engine as an Executor that moves only when told: no thread, no clock.

Owns the two halves of a step for whoever keeps the time (a simulation, a test): calls between
`begin` and `end` fall into the step in flight, as they do when the engine's own thread computes.
Everything else is the batcher's (batcher.py) and as `executor.InflightExecutor` does it, but for
the bounds of queue and statistics, which nobody needs here: the caller drains both after each step.
Used from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from tokenflow.executor.api import ExecutorConfig, IterationStats, Request, Response
from tokenflow.executor.kv_api import KVCacheEventManager, KvTiering
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.runner import Runner
from tokenflow.inflight.tiering import EngineTiering


class SteppedExecutor:
    """Implements `executor.api.Executor`; `begin` and `end` are one step.

    num_host_blocks, block_bytes: see kv_api.KvPools.
    """

    def __init__(self, runner: Runner, config: ExecutorConfig) -> None:
        """Raises ConfigError for a configuration that the batcher cannot serve."""
        self.batcher = InflightBatcher(runner, config)
        self.num_host_blocks = self.batcher.num_host_blocks
        self.block_bytes = self.batcher.block_bytes
        self._responses: list[Response] = []
        self._stats: list[IterationStats] = []
        self._next_id = 1
        self._tiering = EngineTiering(self.batcher.command) if config.kv_tiering else None

    def enqueue_request(self, request: Request) -> int:
        """See Executor."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """See Executor; the queue has no bound."""
        ids = list(range(self._next_id, self._next_id + len(requests)))
        self._next_id += len(requests)
        for request_id, request in zip(ids, requests, strict=True):
            self.batcher.enqueue(request_id, request)
        return ids

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        """What is ready; never waits."""
        responses, self._responses = self._responses, []
        return responses

    def get_num_responses_ready(self) -> int:
        """See Executor."""
        return len(self._responses)

    def cancel_request(self, id: int) -> None:
        """See Executor."""
        self.batcher.cancel(id)

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """See Executor."""
        stats, self._stats = self._stats, []
        return stats

    def can_enqueue_requests(self) -> bool:
        """See Executor."""
        return True

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """See Executor."""
        return self.batcher.kv.events

    def get_kv_tiering(self) -> KvTiering | None:
        """See Executor; `locate` answers at the next step only, so it is not for callers of this
        engine (`batcher.kv.locate` is)."""
        return self._tiering

    def shutdown(self) -> None:
        """Drops what is queued; what is active ends as its steps are made."""
        self.batcher.drop_queued()

    def begin(self, now: float) -> None:
        """First boundary of a step, at `now`, and its computation."""
        self._responses += self.batcher.begin_step(now)
        self.batcher.forward()

    def end(self, now: float) -> None:
        """Second boundary, at `now`: the step's responses and statistics become ready."""
        result = self.batcher.finish_step(now)
        self._responses += result.responses
        if result.stats is not None:
            self._stats.append(result.stats)
