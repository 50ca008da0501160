"""A batcher on the scripted runner, driven step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    FinishReason,
    IterationStats,
    KvCacheConfig,
    OutputConfig,
    Request,
    Response,
    SchedulerConfig,
)
from tokenflow.executor.kv_api import KvTierStats
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN, ScriptedRunner
from tokenflow.inflight.scripts import Script, pseudo_random
from tokenflow.inflight.tiering import EngineTiering

VOCAB = 97
GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def executor_config(
    *,
    num_blocks: int = 64,
    tokens_per_block: int = 4,
    max_batch_size: int = 4,
    max_num_tokens: int = 64,
    max_seq_len: int = 128,
    policy: CapacitySchedulerPolicy = GUARANTEED,
    chunked: bool = True,
    num_host_blocks: int = 0,
    kv_tiering: bool = False,
    overlap_copies: bool = True,
    max_blocks_in_flight: int = 1000,
    **kv: object,
) -> ExecutorConfig:
    block_bytes = tokens_per_block * KV_BYTES_PER_TOKEN
    kv.setdefault("host_cache_size", num_host_blocks * block_bytes)
    return ExecutorConfig(
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        kv_cache_config=KvCacheConfig(max_tokens=num_blocks * tokens_per_block, **kv),
        enable_chunked_context=chunked,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        kv_tiering=kv_tiering,
        overlap_copies=overlap_copies,
        max_copy_bytes_in_flight=max_blocks_in_flight * block_bytes,
    )


def request(prompt, max_tokens=4, **fields) -> Request:
    fields.setdefault("output_config", OutputConfig(return_log_probs=True))
    return Request(input_token_ids=tuple(prompt), max_tokens=max_tokens, **fields)


@dataclass
class Output:
    """Everything one request sent."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    final: Response | None = None
    num_responses: int = 0

    def add(self, response: Response) -> None:
        assert self.final is None, "a response after the final one"
        self.num_responses += 1
        if response.has_error():
            self.error, self.final = response.error_msg, response
            return
        result = response.result
        assert result.is_final == result.is_sequence_final
        self.token_ids += result.output_token_ids[0]
        if result.log_probs is not None:
            self.log_probs += result.log_probs[0]
        if result.is_final:
            self.reason, self.final = result.finish_reasons[0], response
        else:
            assert result.output_token_ids[0], "an empty response that is not the end"
            assert result.finish_reasons == [FinishReason.NOT_FINISHED]


class Driver:
    """Steps a batcher and keeps what came out, checking the pool after each step, or after each
    `check_every` of them."""

    def __init__(
        self,
        config: ExecutorConfig,
        script: Script | None = None,
        runner: object = None,
        check_every: int = 1,
    ) -> None:
        self.runner = runner or ScriptedRunner(script or pseudo_random(VOCAB), VOCAB)
        self.batcher = InflightBatcher(self.runner, config)
        self.outputs: dict[int, Output] = {}
        self.stats: list[IterationStats] = []
        self.now = 0.0
        self.num_steps = 0
        self._check_every = check_every
        self._next_id = 1

    def enqueue(self, prompt, max_tokens=4, **fields) -> int:
        request_id, self._next_id = self._next_id, self._next_id + 1
        self.outputs[request_id] = Output()
        self.batcher.enqueue(request_id, request(prompt, max_tokens, **fields))
        return request_id

    def cancel(self, request_id: int) -> None:
        self.batcher.cancel(request_id)

    @property
    def tiering(self) -> EngineTiering:
        """KV commands for the next step; `locate` is the batcher's `kv.locate`."""
        return EngineTiering(self.batcher.command)

    @property
    def tier_stats(self) -> KvTierStats:
        """Both tiers now."""
        return self.batcher.kv.tier_stats()

    def step(self, during=None) -> list[Response]:
        """One iteration; `during` is called while the runner computes."""
        responses = self.batcher.begin_step(self.now)
        self.batcher.forward()
        if during is not None:
            during()
        self.now += 0.5
        result = self.batcher.finish_step(self.now)
        responses += result.responses
        if result.stats is not None:
            self.stats.append(result.stats)
        for response in responses:
            self.outputs[response.request_id].add(response)
        self.num_steps += 1
        if self.num_steps % self._check_every == 0:
            self.batcher.check_integrity()
        return responses

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is nothing to do."""
        for _ in range(max_steps):
            if not self.batcher.has_work:
                return
            self.step()
        raise AssertionError("the batcher does not come to an end")

    def run_one(self, prompt, max_tokens=4, **fields) -> Output:
        request_id = self.enqueue(prompt, max_tokens, **fields)
        self.run()
        return self.outputs[request_id]
