"""Cases 120 and 121 on a real model: copies beside steps read and write nothing half done.

Streams are paused at random tokens while the others decode, their KV goes to the host in that very
step, and they go on at once or a little later. Every output equals the undisturbed one.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.contract.engines import same_in_float32
from tests.inflight.helpers import MAX_UTILIZATION, Driver, Output, executor_config
from tokenflow.executor.api import FinishReason
from tokenflow.inflight.torch_runner import TorchRunner

NUM_STREAMS, NUM_TOKENS, SIZE = 16, 24, 8


def make(runner: TorchRunner, *, num_blocks: int, driven: bool) -> Driver:
    config = executor_config(
        num_blocks=num_blocks,
        tokens_per_block=SIZE,
        max_batch_size=NUM_STREAMS,
        max_num_tokens=256,
        policy=MAX_UTILIZATION,
        host_cache_size=300 * runner.kv_block_bytes(SIZE),
        kv_tiering=driven,
    )
    config = msgspec.structs.replace(config, max_copy_bytes_in_flight=1 << 30)
    return Driver(config, runner=runner, check_every=10)


@pytest.mark.parametrize("driven", [False, True], ids=["trtllm-rules", "kv-tiering"])
@pytest.mark.parametrize("wait", [0, 3], ids=["case-121-at-once", "case-120-later"])
def test_streams_paused_at_random_tokens_equal_the_undisturbed_ones(
    tiny_model: Callable[[str], Path], driven: bool, wait: int
) -> None:
    runner = TorchRunner(tiny_model("llama"), dtype="float32", num_threads=1)
    chance = random.Random(120 + wait)
    prompts = [[chance.randrange(3, 380) for _ in range(7 + i)] for i in range(NUM_STREAMS)]
    calm = make(runner, num_blocks=200, driven=False)
    ids = [calm.enqueue(prompt, NUM_TOKENS) for prompt in prompts]
    calm.run()
    references = [calm.outputs[i] for i in ids]
    runner.transport.close()

    driver = make(runner, num_blocks=40, driven=driven)
    wholes = [Output() for _ in prompts]
    current: list[int | None] = [driver.enqueue(prompt, NUM_TOKENS) for prompt in prompts]
    resume_steps: dict[int, int] = {}
    while any(whole.reason is None for whole in wholes):
        for i, whole in enumerate(wholes):
            known = prompts[i] + whole.token_ids
            if current[i] is None:
                if whole.reason is None and resume_steps[i] <= driver.num_steps:
                    current[i] = driver.enqueue(known, NUM_TOKENS - len(whole.token_ids))
                continue
            output = driver.outputs[current[i]]
            if output.final is None:
                if output.token_ids and chance.random() < 0.15:
                    if driven:
                        driver.tiering.offload(known + output.token_ids, 10)
                    driver.cancel(current[i])
                continue
            assert output.error is None, output.error
            whole.token_ids += output.token_ids
            whole.log_probs += output.log_probs
            if output.reason is FinishReason.LENGTH:
                whole.reason = output.reason
            elif driven and wait:
                driver.tiering.prefetch(prompts[i] + whole.token_ids)
            current[i], resume_steps[i] = None, driver.num_steps + wait
        driver.step()
    runner.transport.close()
    driver.batcher.poll(driver.now)
    stats = driver.tier_stats
    assert not driver.batcher.kv.has_flights
    assert min(stats.num_offloads_completed, stats.num_onboards_completed) > 10
    assert stats.num_offloads_failed + stats.num_onboards_failed == 0
    for reference, whole in zip(references, wholes, strict=True):
        assert same_in_float32(reference, whole)
