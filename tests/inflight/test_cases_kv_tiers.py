"""What users of other engines reported of KV on the host, on the engine alone.

Each test is named after its case. Both modes: by TensorRT-LLM's rules, and driven from above. The
script's tokens are the oracle; a wrong, stale or half-copied block is an error there. Scaled down:
blocks of 4 tokens.
"""

import logging
import random

import pytest

from tests.inflight.helpers import MAX_UTILIZATION, VOCAB, Driver, executor_config
from tests.inflight.paces import WhenTold
from tests.inflight.pausing import (
    SCRIPT,
    Stream,
    both_modes,
    both_policies,
    is_idle,
    land,
    offload,
    prompt_of,
    push_out,
    reference,
    tiered_driver,
)
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN, ScriptedRunner

BLOCK_BYTES = 4 * KV_BYTES_PER_TOKEN


@both_modes
def test_case_057_cancelled_requests_give_their_host_blocks_back(driven):
    """200 x pause at token 40, to the host, cancel: then one more finds room, and comes back."""
    driver = tiered_driver(24, 64, check_every=97, kv_tiering=driven)
    for i in range(200):
        stream = Stream(driver, prompt_of(i, 6), 60)
        stream.run_to(40)
        if driven:
            offload(stream)
        stream.pause()
        if not driven:
            push_out(driver)
        if i % 2 and driven:  # who will not come back may say so
            driver.tiering.drop_host(stream.all_token_ids)
            driver.step()
        assert driver.tier_stats.num_host_in_transit_blocks == 0
    assert is_idle(driver)
    last = Stream(driver, prompt_of(999, 6), 60)
    last.run_to(40)
    if driven:
        offload(last)
    last.pause()
    push_out(driver)
    where = driver.batcher.kv.ahead.locate(last.all_token_ids)
    assert (where.num_tokens, where.num_device_blocks) == (45, 0)
    last.resume()
    last.finish()
    assert last.metrics[-1].num_onboarded_blocks == 12
    assert last.metrics[-1].num_reused_tokens == 45


def test_case_058_cancel_while_its_kv_is_being_copied():
    """Offloads and prefetches under way when the request goes, 200 times, ends in any order."""
    pace, chance = WhenTold(), random.Random(58)
    driver = Driver(
        executor_config(num_blocks=24, num_host_blocks=64, kv_tiering=True),
        runner=ScriptedRunner(SCRIPT, VOCAB, pace=pace),
        check_every=11,
    )
    for i in range(200):
        stream = Stream(driver, prompt_of(i, 9), 40)
        stream.run_to(chance.randrange(1, 30))
        offload(stream)
        if chance.random() < 0.5:
            driver.step()
        stream.pause()
        if i % 3 == 0:
            push_out(driver)
            driver.tiering.prefetch(stream.all_token_ids)
            driver.step()
        if i % 5 == 0:
            stream.resume()
            driver.step()
            driver.cancel(stream.request_id)
            driver.step()
        for _ in range(chance.randrange(4)):
            if pace.pending:
                which = chance.randrange(len(pace.pending))
                (pace.fail if chance.random() < 0.2 else pace.complete)(which)
    driver.run()
    pace.complete_all()
    driver.step()
    assert is_idle(driver)
    assert driver.tier_stats.num_offloads_failed > 0
    assert driver.tier_stats.num_onboards_completed > 0
    alive = Stream(driver, prompt_of(0, 9), 40)
    alive.finish()


@both_modes
@both_policies
def test_case_118_the_same_requests_again_with_a_large_host(driven, policy):
    driver = tiered_driver(32, 512, max_batch_size=8, kv_tiering=driven, policy=policy)
    prompts = [prompt_of(i, 40) for i in range(8)]
    num_onboards = []
    for _ in range(2):
        streams = [Stream(driver, prompt, 20) for prompt in prompts]
        driver.run()
        for stream in streams:
            stream.take()
            stream.check()
        num_onboards.append(driver.tier_stats.num_onboards_completed)
    assert num_onboards[1] >= num_onboards[0] + 40
    assert is_idle(driver)


@pytest.mark.parametrize(
    ("size", "num_blocks", "warns"),
    [(BLOCK_BYTES - 1, 0, True), (0, 0, False), (9 * BLOCK_BYTES + 1, 9, False)],
)
def test_case_119_a_host_size_that_holds_no_block_is_said(size, num_blocks, warns, caplog):
    with caplog.at_level(logging.WARNING):
        driver = Driver(executor_config(host_cache_size=size, event_buffer_max_size=100))
    assert driver.batcher.num_host_blocks == num_blocks
    assert driver.tier_stats.num_host_blocks == num_blocks
    (created,) = driver.batcher.kv.events.get_latest_events(0)
    assert created.data.num_blocks_per_cache_level == [64, num_blocks]
    assert ("host_cache_size" in caplog.text) == warns
    driver.run_one([1, 2, 3], 4)
    assert driver.stats[-1].kv_tier_stats.num_host_blocks == num_blocks


@both_modes
@pytest.mark.parametrize("wait", [0, 4], ids=["at-once", "later"])
def test_cases_120_121_copies_beside_steps_read_and_write_nothing_half_done(driven, wait):
    """32 streams, each paused at random tokens; case 121 resumes at once, 120 some steps later."""
    chance = random.Random(120)
    driver = tiered_driver(
        150, 600, block_s=0.05, max_batch_size=32, max_num_tokens=128, kv_tiering=driven,
        policy=MAX_UTILIZATION, check_every=7,
    )  # fmt: skip
    streams = [Stream(driver, prompt_of(i, 5 + i % 9), 40) for i in range(32)]
    resume_steps = {}
    while not all(stream.is_over for stream in streams):
        for stream in streams:
            if stream.is_over:
                continue
            if stream.output.final is not None:
                if resume_steps.setdefault(stream, driver.num_steps + wait) <= driver.num_steps:
                    del resume_steps[stream]
                    stream.take()
                    if driven and wait and chance.random() < 0.5:
                        driver.tiering.prefetch(stream.all_token_ids)
                    stream.resume()
            elif stream.output.token_ids and chance.random() < 0.1:
                if driven:
                    offload(stream, chance.randrange(1, 8))
                driver.cancel(stream.request_id)
        driver.step()
    for stream in streams:
        stream.take()
        stream.check()
    land(driver)
    assert is_idle(driver)
    assert driver.tier_stats.num_offloads_completed > 100
    assert sum(m.num_onboarded_blocks for s in streams for m in s.metrics) > 20


@both_modes
def test_case_122_same_texts_with_and_without_a_host(driven):
    """100 prompts, 32 at a time, through a pool that holds a few of them."""
    chance = random.Random(122)
    common = prompt_of(1, 40)
    prompts = [common + [chance.randrange(VOCAB) for _ in range(80)] for _ in range(100)]
    outputs = []
    for num_host_blocks in (0, 400):
        driver = tiered_driver(
            120, num_host_blocks, block_s=0.1, max_batch_size=32, max_num_tokens=512,
            kv_tiering=driven and num_host_blocks > 0, policy=MAX_UTILIZATION, check_every=50,
            max_seq_len=256,
        )  # fmt: skip
        for _ in range(2):
            ids = [driver.enqueue(prompt, 6) for prompt in prompts]
            driver.run()
            outputs.append([driver.outputs[i].token_ids for i in ids])
        assert (driver.tier_stats.num_onboards_completed > 0) == (num_host_blocks > 0)
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert outputs[0] == [reference(prompt, 6) for prompt in prompts]
