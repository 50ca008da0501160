"""Streams that are paused and resumed on a stepped batcher with a host tier."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.inflight.helpers import (
    GUARANTEED,
    MAX_UTILIZATION,
    VOCAB,
    Driver,
    Output,
    executor_config,
)
from tests.inflight.paces import Timed
from tokenflow.executor.api import (
    FinishReason,
    KvCacheRetentionConfig,
    OutputConfig,
    RequestPerfMetrics,
    TokenRangeRetentionConfig,
)
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import pseudo_random

SCRIPT = pseudo_random(VOCAB)
both_modes = pytest.mark.parametrize("driven", [False, True], ids=["trtllm-rules", "kv-tiering"])
both_policies = pytest.mark.parametrize(
    "policy", [GUARANTEED, MAX_UTILIZATION], ids=["guaranteed", "max-utilization"]
)
_NOT_WORTH_A_COPY = KvCacheRetentionConfig(
    token_range_retention_configs=(
        TokenRangeRetentionConfig(token_start=0, token_end=None, priority=0),
    ),
    decode_retention_priority=0,
)
METRICS = OutputConfig(return_log_probs=True, return_perf_metrics=True)


def tiered_driver(
    num_blocks: int,
    num_host_blocks: int,
    *,
    block_s: float | None = None,
    check_every: int = 1,
    **config: object,
) -> Driver:
    """Blocks of 4 tokens. block_s: what a copied block takes (a step takes 0.5); None = nothing."""

    def sleep(seconds: float) -> None:
        driver.now += seconds

    pace = None if block_s is None else Timed(lambda: driver.now, sleep, block_s)
    driver = Driver(
        executor_config(num_blocks=num_blocks, num_host_blocks=num_host_blocks, **config),
        runner=ScriptedRunner(SCRIPT, VOCAB, pace=pace),
        check_every=check_every,
    )
    return driver


class Stream:
    """One client's stream: what it got so far, over all its enqueues.

    metrics: those of each enqueue that has ended.
    """

    def __init__(self, driver: Driver, prompt: Sequence[int], max_tokens: int, **fields: object):
        self.driver, self.prompt, self.max_tokens = driver, list(prompt), max_tokens
        self.fields = {"output_config": METRICS, **fields}
        self.got: list[int] = []
        self.metrics: list[RequestPerfMetrics] = []
        self.resume()

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and all that came."""
        return self.prompt + self.got + self.output.token_ids

    @property
    def output(self) -> Output:
        return self.driver.outputs[self.request_id]

    @property
    def num_tokens(self) -> int:
        return len(self.got) + len(self.output.token_ids)

    @property
    def is_over(self) -> bool:
        return self.output.reason is FinishReason.LENGTH

    def resume(self) -> None:
        self.request_id = self.driver.enqueue(
            self.prompt + self.got, self.max_tokens - len(self.got), **self.fields
        )

    def run_to(self, num_tokens: int) -> None:
        """Step until so many tokens came, or the end."""
        while self.num_tokens < num_tokens and self.output.final is None:
            self.driver.step()

    def pause(self) -> None:
        """Cancel now and wait for the end of this enqueue."""
        self.driver.cancel(self.request_id)
        while self.output.final is None:
            self.driver.step()
        self.take()

    def take(self) -> None:
        """The enqueue has ended: keep what it gave."""
        assert self.output.error is None, self.output.error
        self.metrics.append(self.output.final.result.request_perf_metrics)
        self.got += self.output.token_ids
        self.output.token_ids = []

    def finish(self) -> None:
        """Run to the end and compare with the script."""
        self.run_to(self.max_tokens)
        while self.output.final is None:
            self.driver.step()
        self.take()
        self.check()

    def check(self) -> None:
        assert self.output.reason is FinishReason.LENGTH
        assert self.got == reference(self.prompt, self.max_tokens)


def reference(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the script says after `prompt`."""
    history = tuple(prompt)
    token_ids: list[int] = []
    for _ in range(num_tokens):
        token_ids.append(SCRIPT(history)[0])
        history = (*history, token_ids[-1])
    return token_ids


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Prompts that share no block."""
    return [(31 * seed + (seed % 7 + 2) * i) % VOCAB for i in range(num_tokens)]


def offload(stream: Stream, num_blocks: int = 1000) -> None:
    """Ask for copies of what the stream has so far."""
    stream.driver.tiering.offload(stream.all_token_ids, num_blocks)


def push_out(driver: Driver, salt: int = 77) -> list[int]:
    """Other traffic that takes every block that nobody holds, once, and is not worth keeping; its
    prompt."""
    kv = driver.batcher.kv
    num_tokens = kv.num_free_blocks * kv.tokens_per_block
    prompt = [(7 * i + driver.num_steps) % VOCAB for i in range(num_tokens)]
    output = driver.run_one(
        prompt, 1, cache_salt_id=salt, kv_cache_retention_config=_NOT_WORTH_A_COPY
    )
    assert output.error is None, output.error
    return prompt


def is_idle(driver: Driver) -> bool:
    """Nothing is used, on its way or pinned."""
    stats = driver.tier_stats
    return (
        stats.num_device_used_blocks,
        stats.num_device_in_transit_blocks,
        stats.num_host_in_transit_blocks,
        driver.runner.transport.num_under_way,
        driver.batcher.kv.has_flights,
    ) == (0, 0, 0, 0, False)


def land(driver: Driver) -> None:
    """Let the copies beside the steps end, as an idle engine does."""
    for _ in range(10_000):
        if not driver.batcher.kv.has_flights:
            return
        driver.now += 0.5
        driver.batcher.poll(driver.now)
    raise AssertionError("the copies do not come to an end")
