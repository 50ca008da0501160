"""The embedded engine, made step by step in real time, with a crowd that generates beside.

Owns the engine of a measurement (batcher and KV tiers as they serve, without their thread) and how
its blocks are taken away: by a request that wants every block that nobody references, which is
cancelled after its first chunk, or by such that fill them. These are not computed (filling.py).
Times are this process's clock around whole steps, boundaries
included. Invariant: what one measurement takes for granted is looked up (`locate`), and a
BenchmarkError if it is not so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf.analysis import BenchmarkError
from perf.kv.filling import FillingRunner
from perf.kv.models import TOKENS_PER_BLOCK, Model
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    IterationStats,
    KvCacheConfig,
    KvCacheRetentionConfig,
    Request,
    Response,
    SchedulerConfig,
    TokenRangeRetentionConfig,
)
from tokenflow.executor.kv_api import KvLocation, KvTiering, KvTierStats
from tokenflow.inflight.stepped import SteppedExecutor

_ENDLESS = 1 << 20
_MAX_WAIT_STEPS = 400
_DISPENSABLE = KvCacheRetentionConfig(
    token_range_retention_configs=(
        TokenRangeRetentionConfig(token_start=0, token_end=None, priority=0),
    ),
    decode_retention_priority=0,
)
"""Of what only takes room: it goes first and never to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """Pools and limits of an engine, in blocks and sequences. num_host_blocks 0: no host tier."""

    num_device_blocks: int
    num_host_blocks: int = 0
    kv_tiering: bool = False
    max_batch_size: int = 8
    max_num_tokens: int = 512


class Stream:
    """A request that is cancelled and enqueued again. token_ids: prompt and output so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids = list(prompt)
        self.request_id: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that hold its KV (that of its last token does not exist)."""
        return -(-(len(self.token_ids) - 1) // TOKENS_PER_BLOCK)


class SteppedEngine:
    """One engine on a model. stats: both tiers as of the last step; to be closed."""

    def __init__(self, model: Model, size: EngineSize) -> None:
        runner = FillingRunner(model.runner(), TOKENS_PER_BLOCK)
        block_bytes = runner.kv_block_bytes(TOKENS_PER_BLOCK)
        self._executor = SteppedExecutor(runner, _config(size, block_bytes))
        self._fillers = runner.fillers
        self._transport = runner.transport if size.num_host_blocks else None
        self._vocab_size = runner.vocab_size
        self._streams: dict[int, Stream] = {}
        self._crowd: list[Stream] = []
        self._seed = 0
        self.num_computed_context_tokens = 0
        self.stats: KvTierStats = self._executor.batcher.kv.tier_stats()

    def close(self) -> None:
        """Let threads and pinned memory go."""
        if self._transport is not None:
            self._transport.close()

    @property
    def tiering(self) -> KvTiering:
        """What moves KV on demand; only with kv_tiering."""
        tiering = self._executor.get_kv_tiering()
        assert tiering is not None
        return tiering

    def new_prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt of this engine begins with."""
        self._seed += 1
        generator = random.Random(self._seed)
        return [generator.randrange(3, self._vocab_size) for _ in range(num_tokens)]

    # -- requests ------------------------------------------------------------------------------

    def start(self, stream: Stream, max_tokens: int = _ENDLESS) -> int:
        """Enqueue all its tokens; it generates so many more, or until it is cancelled. Returns the
        request's id."""
        request = Request(input_token_ids=tuple(stream.token_ids), max_tokens=max_tokens)
        stream.request_id = self._executor.enqueue_request(request)
        self._streams[stream.request_id] = stream
        return stream.request_id

    def plant(self, stream: Stream) -> None:
        """Let it come and be cancelled, with KV that nobody computed: it takes as long as any other
        to copy and to attend to."""
        self._fillers.add(self.start(stream))
        self.until_token(stream)
        self.cancel(stream)

    def start_crowd(self, num_streams: int, num_tokens: int) -> None:
        """Streams that generate beside everything else, until the end."""
        for _ in range(num_streams):
            stream = Stream(self.new_prompt(num_tokens))
            if self._crowd:
                self.plant(stream)
            self.start(stream)
            self.until_token(stream)
            self._crowd.append(stream)

    def cancel(self, stream: Stream) -> None:
        """End it at the boundary of one more step; what it got until then is kept for reuse."""
        request_id = stream.request_id
        assert request_id is not None
        self._executor.cancel_request(request_id)
        del self._streams[request_id]  # the token of that step is lost
        stream.request_id = None
        self.step()

    @property
    def crowd_size(self) -> int:
        """Streams of the crowd."""
        return len(self._crowd)

    # -- steps ---------------------------------------------------------------------------------

    def step(self, before_end: Callable[[], None] | None = None) -> float:
        """One iteration; its seconds. before_end: called while it computes."""
        start = time.perf_counter()
        self._executor.begin(time.monotonic())
        if before_end is not None:
            before_end()
        self._executor.end(time.monotonic())
        seconds = time.perf_counter() - start
        for stats in self._executor.get_latest_iteration_stats():
            self._take_stats(stats)
        for response in self._executor.await_responses():
            self._take(response)
        return seconds

    def until_token(self, stream: Stream) -> float:
        """Steps until `stream` has one token more; seconds from the first boundary on."""
        seconds, num_tokens = 0.0, len(stream.token_ids)
        for _ in range(_MAX_WAIT_STEPS):
            seconds += self.step()
            if len(stream.token_ids) > num_tokens:
                return seconds
        raise BenchmarkError(f"no token of a request within {_MAX_WAIT_STEPS} steps")

    # -- where blocks are ----------------------------------------------------------------------

    @property
    def num_obtainable_blocks(self) -> int:
        """Device blocks that nobody references."""
        return self._executor.batcher.kv.num_free_blocks

    def num_empty_blocks(self) -> tuple[int, int]:
        """Blocks of the device and of the host that hold nothing, not even what is cached."""
        now = self._executor.batcher.kv.tier_stats()
        taken = now.num_device_used_blocks + now.num_device_cached_blocks
        return (
            now.num_device_blocks - taken - now.num_device_in_transit_blocks,
            now.num_host_blocks - now.num_host_cached_blocks - now.num_host_in_transit_blocks,
        )

    def locate(self, stream: Stream) -> KvLocation:
        """Where the KV of a stream that does not run is."""
        return self._executor.batcher.kv.ahead.locate(stream.token_ids)

    def take_all_blocks(self) -> None:
        """Take every device block that nobody references away from what is cached in it. Those of
        the first chunk of the request that does so stay cached, the others are free."""
        while any((len(s.token_ids) - 1) % TOKENS_PER_BLOCK == 0 for s in self._crowd):
            self.step()  # in the next one, some of the crowd need a block too
        num_tokens = self._executor.batcher.kv.num_free_blocks * TOKENS_PER_BLOCK
        request_id = self._executor.enqueue_request(
            Request(
                input_token_ids=tuple(self.new_prompt(num_tokens)),
                max_tokens=1,
                kv_cache_retention_config=_DISPENSABLE,
            )
        )
        self._fillers.add(request_id)
        self.step(lambda: self._executor.cancel_request(request_id))

    def fill(self, num_blocks: int) -> None:
        """Another request comes, fills so many blocks and ends; they stay cached, in place of what
        was used least recently."""
        stream = Stream(self.new_prompt(num_blocks * TOKENS_PER_BLOCK))
        self._fillers.add(self.start(stream, max_tokens=1))
        self.until_token(stream)

    def offload_all(self, stream: Stream) -> None:
        """Copy all blocks of a stream that does not run to the host, beside the crowd's steps."""
        self._until(
            lambda: self.tiering.offload(stream.token_ids, stream.num_blocks),
            lambda: self.locate(stream).num_copied_blocks == stream.num_blocks,
            "to the host",
        )

    def prefetch_all(self, stream: Stream) -> None:
        """Bring them back, beside the crowd's steps."""
        self._until(
            lambda: self.tiering.prefetch(stream.token_ids),
            lambda: self.locate(stream).num_device_blocks == stream.num_blocks,
            "to the device",
        )

    def _until(self, ask: Callable[[], None], is_done: Callable[[], bool], where: str) -> None:
        for _ in range(_MAX_WAIT_STEPS):
            if is_done():
                return
            ask()
            self.step()
        raise BenchmarkError(f"blocks do not come {where} within {_MAX_WAIT_STEPS} steps")

    def _take_stats(self, stats: IterationStats) -> None:
        self.num_computed_context_tokens += stats.inflight_batching_stats.num_ctx_tokens
        if stats.kv_tier_stats is not None:
            self.stats = stats.kv_tier_stats

    def _take(self, response: Response) -> None:
        if response.has_error():
            raise BenchmarkError(f"a request failed: {response.error_msg}")
        stream = self._streams.get(response.request_id)
        if stream is not None:
            stream.token_ids += response.result.output_token_ids[0]


def _config(size: EngineSize, block_bytes: int) -> ExecutorConfig:
    return ExecutorConfig(
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.MAX_UTILIZATION
        ),
        kv_cache_config=KvCacheConfig(
            max_tokens=size.num_device_blocks * TOKENS_PER_BLOCK,
            host_cache_size=size.num_host_blocks * block_bytes,
        ),
        kv_tiering=size.kv_tiering,
        max_batch_size=size.max_batch_size,
        max_num_tokens=size.max_num_tokens,
        tokens_per_block=TOKENS_PER_BLOCK,
        max_seq_len=size.num_device_blocks * TOKENS_PER_BLOCK + 1,
    )
