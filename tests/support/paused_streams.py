"""Streams whose KV leaves the device at every pause and comes back from the host.

Drives a stepped engine with a host tier. All streams run at once; each is cancelled after every
`every` tokens, other traffic then takes the whole pool until nothing of it is left on the device,
and it goes on with prompt + streamed tokens. By TensorRT-LLM's rules the other traffic is what
sends its blocks to the host. With KvTiering its full blocks are copied while it runs, and every
other stream is brought back by a prefetch before it is enqueued again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.stepped import SteppedExecutor
from tokenflow.executor.api import (
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    OutputConfig,
    Request,
    RequestPerfMetrics,
    Response,
)
from tokenflow.executor.kv_api import KvLocation, KvTierStats
from tokenflow.inflight.runner import Runner
from tokenflow.preemption import engine_request
from tokenflow.types import GenerateRequest

STEP_S = 0.01
MAX_STEPS = 3000


@dataclass(kw_only=True)
class Resume:
    """One resume. location: where the KV of its tokens was when the pool was full of other traffic;
    metrics: what the engine said of the enqueue; prefetched: whether it was brought back before."""

    num_tokens: int
    location: KvLocation
    prefetched: bool
    metrics: RequestPerfMetrics = field(default_factory=RequestPerfMetrics)


@dataclass(eq=False)
class PausedStream:
    """One client's stream. resumes: all of them, in order."""

    request: GenerateRequest
    start_step: int
    prefetches: bool
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    executor_id: int | None = None
    is_cancelled: bool = False
    is_over: bool = False

    @property
    def is_paused(self) -> bool:
        return self.executor_id is None and bool(self.token_ids) and not self.is_over

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.request.input_token_ids, *self.token_ids]

    def take(self, response: Response) -> None:
        assert not response.has_error(), response.error
        result = response.result
        self.token_ids += result.output_token_ids[0]
        self.log_probs += result.log_probs[0] if result.log_probs else []
        if not result.is_final:
            return
        self.executor_id = None
        if self.resumes:
            assert result.request_perf_metrics is not None
            self.resumes[-1].metrics = result.request_perf_metrics
        self.is_over = result.finish_reasons[0] is FinishReason.LENGTH


class Traffic:
    """Requests of nobody's that take all the room there is, one at a time."""

    def __init__(self, executor: SteppedExecutor, vocab_size: int) -> None:
        self._executor = executor
        self._rng = random.Random(11)
        self._vocab_size = vocab_size
        self.token_ids: list[int] = []
        self.executor_id: int | None = None
        self.num_requests = 0

    def send(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.token_ids = [self._rng.randrange(3, self._vocab_size) for _ in range(num_tokens)]
        self.executor_id = self._executor.enqueue_request(
            Request(input_token_ids=tuple(self.token_ids), max_tokens=1)
        )


class PausingDrive:
    """Runs `prompts` to `num_tokens` each; see the module's text.

    config: GUARANTEED_NO_EVICT, with room for all streams at once and a little more.
    stagger: steps between the starts of two streams; 0 = all pause and resume together.
    pass_time: called after each step beside which copies run: an empty step takes no time.
    """

    def __init__(
        self,
        runner: Runner,
        config: ExecutorConfig,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        every: int = 7,
        stagger: int = 0,
        pass_time: Callable[[], object] = lambda: time.sleep(0.0005),
    ) -> None:
        self._executor = SteppedExecutor(runner, config)
        self._kv = self._executor.batcher.kv
        self._tiering = self._executor.get_kv_tiering()
        self.tokens_per_block = config.tokens_per_block
        self.every = every
        self._traffic = Traffic(self._executor, runner.vocab_size)
        self._pass_time = pass_time
        self._step = 0
        self._leaving: list[PausedStream] = []
        self._fetching = False
        self.streams = [
            PausedStream(
                GenerateRequest(
                    request_id=str(index),
                    input_token_ids=tuple(prompt),
                    max_tokens=num_tokens,
                    arrival_time=0.0,
                    output_config=OutputConfig(return_log_probs=True),
                ),
                start_step=index * stagger,
                prefetches=self._tiering is not None and index % 2 == 1,
            )
            for index, prompt in enumerate(prompts)
        ]

    @property
    def num_traffic_requests(self) -> int:
        return self._traffic.num_requests

    def run(self) -> KvTierStats:
        """To the end of all streams; the tiers when the engine is idle again."""
        while not all(stream.is_over for stream in self.streams):
            assert self._step < MAX_STEPS, "the streams do not come to their ends"
            for stream in self.streams:
                self._go_on(stream)
            self._bring_back()
            self._make_step()
        for _ in range(MAX_STEPS):
            if not self._kv.has_flights:
                break
            self._make_step()
        self._executor.batcher.check_integrity()
        return self._kv.tier_stats()

    def _make_step(self) -> None:
        self._executor.begin(self._step * STEP_S)
        self._executor.end((self._step + 0.5) * STEP_S)
        self._step += 1
        for response in self._executor.await_responses():
            if response.request_id == self._traffic.executor_id:
                assert not response.has_error(), response.error
                if response.result.is_final:
                    self._end_traffic()
                continue
            for stream in self.streams:
                if stream.executor_id == response.request_id:
                    stream.take(response)
                    break
        if self._kv.has_flights:
            self._pass_time()

    def _go_on(self, stream: PausedStream) -> None:
        if stream.executor_id is None:
            if not stream.token_ids and self._step >= stream.start_step:
                self._enqueue(stream)
            return
        num_generated = len(stream.token_ids)
        if self._tiering is not None and num_generated:
            self._tiering.offload(stream.all_token_ids, 1)
        base = stream.resumes[-1].num_tokens if stream.resumes else 0
        base = max(0, base - len(stream.request.input_token_ids))
        if num_generated - base >= self.every and not stream.is_cancelled:
            stream.is_cancelled = True
            self._executor.cancel_request(stream.executor_id)

    def _enqueue(self, stream: PausedStream) -> None:
        stream.is_cancelled = False
        stream.executor_id = self._executor.enqueue_request(
            engine_request(stream.request, stream.token_ids, client_id=1)
        )

    # -- between a pause and its resume --------------------------------------------------------

    def _bring_back(self) -> None:
        """Drive what is paused off the device, then bring it back; one step at a time."""
        if not self._leaving:
            self._leaving = [stream for stream in self.streams if stream.is_paused]
        if not self._leaving or self._traffic.executor_id is not None:
            return
        if self._fetching:
            fetched = [s for s in self._leaving if not self._locate(s).num_host_blocks]
            if len(fetched) == len(self._leaving):
                self._resume(fetched)
            return
        if any(self._locate(stream).num_device_blocks for stream in self._leaving):
            self._traffic.send(self._num_free_blocks() * self.tokens_per_block)
            return
        location = self._kv.ahead.locate([*self._traffic.token_ids, 0])
        if self._tiering is not None and location.num_copied_blocks < location.num_device_blocks:
            return  # a prefetch takes only room that costs no copy
        for stream in self._leaving:
            stream.resumes.append(
                Resume(
                    num_tokens=len(stream.all_token_ids),
                    location=self._locate(stream),
                    prefetched=stream.prefetches,
                )
            )
            if stream.prefetches:
                assert self._tiering is not None
                self._tiering.prefetch(stream.all_token_ids)
        self._resume([stream for stream in self._leaving if not stream.prefetches])
        self._fetching = bool(self._leaving)

    def _resume(self, streams: Sequence[PausedStream]) -> None:
        for stream in streams:
            self._enqueue(stream)
            self._leaving.remove(stream)
        self._fetching = self._fetching and bool(self._leaving)

    def _end_traffic(self) -> None:
        self._traffic.executor_id = None
        if self._tiering is not None:
            self._tiering.offload([*self._traffic.token_ids, 0], 1 << 20)

    def _locate(self, stream: PausedStream) -> KvLocation:
        return self._kv.ahead.locate(stream.all_token_ids)

    def _num_free_blocks(self) -> int:
        """Blocks that no stream in the engine has reserved."""
        reserved = sum(
            -(-(len(s.request.input_token_ids) + s.request.max_tokens - 1) // self.tokens_per_block)
            for s in self.streams
            if s.executor_id is not None
        )
        return self._kv.num_total_blocks - reserved


def tiered_config(
    *,
    num_blocks: int,
    host_cache_size: int,
    tokens_per_block: int,
    kv_tiering: bool,
    max_batch_size: int = 9,
    max_num_tokens: int = 512,
) -> ExecutorConfig:
    """Limits for `PausingDrive`; nobody's prompt is cut in pieces but the other traffic's."""
    return ExecutorConfig(
        kv_cache_config=KvCacheConfig(
            max_tokens=num_blocks * tokens_per_block,
            host_cache_size=host_cache_size,
            secondary_offload_min_priority=30,
        ),
        kv_tiering=kv_tiering,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        tokens_per_block=tokens_per_block,
        max_seq_len=4096,
    )


def assert_everything_came_back(drive: PausingDrive, stats: KvTierStats) -> None:
    """Blocks went to the host and came back, and no KV was computed twice."""
    size, num_onboarded = drive.tokens_per_block, 0
    for stream in drive.streams:
        assert len(stream.resumes) == (stream.request.max_tokens - 1) // drive.every
        for resume in stream.resumes:
            kept, blocks = resume.num_tokens - 1, -(-(resume.num_tokens - 1) // size)
            assert resume.location == KvLocation(num_tokens=kept, num_host_blocks=blocks)
            assert resume.metrics.num_reused_tokens == kept
            assert resume.metrics.num_onboarded_blocks == (0 if resume.prefetched else blocks)
            num_onboarded += blocks
    assert stats.num_onboards_completed >= num_onboarded
    copies_are_kept = any(stream.prefetches for stream in drive.streams)
    assert stats.num_offloads_completed >= (1 if copies_are_kept else num_onboarded)
    assert (stats.num_offloads_failed, stats.num_onboards_failed) == (0, 0)
    assert stats.num_device_used_blocks == 0
    assert (stats.num_device_in_transit_blocks, stats.num_host_in_transit_blocks) == (0, 0)
