"""Steps of the embedded engine on this machine: SmolLM2 in bf16, batcher and boundaries included.

Owns the engine that is measured (everything that serves, but for its process) and the grid: decode
over batch and context, prefill alone and beside decoding. Every step is timed from its first
boundary to its drained responses. Steps are taken in rounds over the grid, so that a slow minute of
the machine falls on all of it.
"""

from __future__ import annotations

import os

# OpenMP reads this when torch is loaded: waiting threads must not spin on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import itertools
import time
from pathlib import Path

from perf.lab.embedded import Step
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SchedulerConfig,
)
from tokenflow.inflight.runner import Runner
from tokenflow.inflight.stepped import SteppedExecutor
from tokenflow.inflight.torch_runner import TorchRunner

BATCH_SIZES = (1, 2, 4, 8)
CONTEXTS = (64, 256, 640)
PREFILLS = (32, 64, 128, 256, 480)
NUM_BESIDE = 4
"""Sequences that generate beside a mixed prefill."""
_MAX_BATCH_SIZE = 16
_MAX_NUM_TOKENS = 512
_TOKENS_PER_BLOCK = 32
_POOL_TOKENS = 16 * 1024
_WARMUP_STEPS = 3
_ENDLESS = 300


class StepBench:
    """The engine, step by step; requests get prompts of their own (nothing is reused)."""

    def __init__(self, runner: Runner) -> None:
        self._executor = SteppedExecutor(runner, _config())
        self._vocab_size = runner.vocab_size
        self._prompts = itertools.count(1)

    def start(self, num_tokens: int, max_tokens: int = _ENDLESS) -> int:
        """Enqueue a request with a prompt of `num_tokens`; its id."""
        number = next(self._prompts)
        prompt = tuple((7919 * number + 31 * i) % (self._vocab_size - 1) for i in range(num_tokens))
        return self._executor.enqueue_request(
            Request(input_token_ids=prompt, max_tokens=max_tokens, streaming=True)
        )

    def cancel(self, request_id: int) -> None:
        """Let it go at the next step."""
        self._executor.cancel_request(request_id)

    def step(self) -> Step | None:
        """One step, timed; None when there was nothing to compute."""
        start = time.perf_counter()
        self._executor.begin(time.monotonic())
        self._executor.end(time.monotonic())
        self._executor.await_responses()
        seconds = time.perf_counter() - start
        for stats in self._executor.get_latest_iteration_stats():
            batch = stats.inflight_batching_stats
            if batch.num_scheduled_requests:
                return Step(
                    batch.num_gen_requests,
                    stats.num_gen_context_tokens,
                    batch.num_ctx_tokens,
                    seconds,
                )
        return None

    def steps(self, count: int) -> list[Step]:
        """The next `count` steps that compute something; fewer when the work ends."""
        found: list[Step] = []
        while len(found) < count and self._executor.batcher.has_work:
            step = self.step()
            if step is not None:
                found.append(step)
        return found

    def drain(self) -> None:
        """Step until nothing is left."""
        while self._executor.batcher.has_work:
            self.step()


def open_runner(model_path: Path, num_threads: int = 0) -> TorchRunner:
    """SmolLM2 in bf16 on the CPU. Raises ConfigError when there is no checkpoint."""
    return TorchRunner(model_path, "cpu", "bfloat16", num_threads)


def measure(bench: StepBench, seconds: float) -> list[Step]:
    """Steps of the grid, round after round, for about `seconds` (one whole round at least)."""
    first_use = bench.start(64)
    bench.steps(1 + _WARMUP_STEPS)
    bench.cancel(first_use)
    bench.drain()
    found: list[Step] = []
    start = time.perf_counter()
    while not found or time.perf_counter() - start < seconds:
        for context in CONTEXTS:
            found += _decode(bench, context)
        found += _prefill(bench)
    return found


def _decode(bench: StepBench, context: int) -> list[Step]:
    """Decode at one context, from the largest batch to the smallest."""
    ids = [bench.start(context) for _ in range(max(BATCH_SIZES))]
    found: list[Step] = []
    _until_all_generate(bench, len(ids))
    for batch_size in sorted(BATCH_SIZES, reverse=True):
        while len(ids) > batch_size:
            bench.cancel(ids.pop())
        bench.steps(1)  # at its boundary the others leave
        found += bench.steps(_WARMUP_STEPS)
    for request_id in ids:
        bench.cancel(request_id)
    bench.drain()
    return found


def _prefill(bench: StepBench) -> list[Step]:
    """Each length alone, then beside sequences that generate."""
    found: list[Step] = []
    for num_tokens in PREFILLS:
        bench.start(num_tokens, max_tokens=1)
        found += bench.steps(1)
    ids = [bench.start(128) for _ in range(NUM_BESIDE)]
    _until_all_generate(bench, len(ids))
    for num_tokens in PREFILLS:
        bench.start(num_tokens, max_tokens=1)
        found += bench.steps(1)
    for request_id in ids:
        bench.cancel(request_id)
    bench.drain()
    return found


def _until_all_generate(bench: StepBench, num_sequences: int) -> None:
    while True:
        (step,) = bench.steps(1)
        if step.num_gen == num_sequences:
            return


def _config() -> ExecutorConfig:
    return ExecutorConfig(
        scheduler_config=SchedulerConfig(
            capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
        ),
        kv_cache_config=KvCacheConfig(max_tokens=_POOL_TOKENS),
        max_batch_size=_MAX_BATCH_SIZE,
        max_num_tokens=_MAX_NUM_TOKENS,
        tokens_per_block=_TOKENS_PER_BLOCK,
        max_seq_len=2048,
    )
