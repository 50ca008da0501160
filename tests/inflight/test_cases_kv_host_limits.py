"""What users of other engines reported of a host tier that is full, far too small or never empty.

As in test_cases_kv_tiers.py.
"""

import logging
import random
from datetime import timedelta

import msgspec
import pytest

from tests.inflight.mirror import stored_blocks
from tests.inflight.pausing import (
    METRICS,
    Stream,
    both_modes,
    both_policies,
    is_idle,
    land,
    offload,
    prompt_of,
    push_out,
    tiered_driver,
)
from tokenflow.errors import ConfigError
from tokenflow.executor.api import KvCacheRetentionConfig, TokenRangeRetentionConfig

FOR_AN_HOUR = KvCacheRetentionConfig(
    token_range_retention_configs=(
        TokenRangeRetentionConfig(
            token_start=0, token_end=None, priority=50, duration_ms=timedelta(hours=1)
        ),
    )
)


@both_modes
def test_case_124_what_the_host_gave_up_is_computed_again(driven):
    """8 paused requests of 6 blocks and a host of 32: some come back, some are computed."""
    driver = tiered_driver(8, 32, max_seq_len=64, kv_tiering=driven)
    streams = []
    for i in range(8):
        stream = Stream(driver, prompt_of(i, 14), 16)
        stream.run_to(10)
        if driven:
            offload(stream)
        stream.pause()
        push_out(driver)
        streams.append(stream)
    for stream in reversed(streams):
        stream.resume()
        stream.finish()
    onboarded = [stream.metrics[-1].num_onboarded_blocks for stream in streams]
    recomputed = [23 - stream.metrics[-1].num_reused_tokens for stream in streams]
    assert any(onboarded)
    assert any(recomputed)
    assert driver.tier_stats.num_host_evicted_blocks > 0
    assert driver.tier_stats.num_onboards_completed >= sum(onboarded)


@both_modes
def test_case_125_hits_do_not_fade_in_2000_cycles(driven):
    """10 requests of 3 blocks in turn on a host that holds 10; the device holds two of them."""
    driver = tiered_driver(8, 36, max_seq_len=32, check_every=101, kv_tiering=driven)
    prompts = [prompt_of(i, 11) for i in range(10)]
    shares = []
    for cycle in range(2000):
        prompt = prompts[cycle % 10]
        output = driver.run_one(prompt, 1, output_config=METRICS)
        metrics = output.final.result.request_perf_metrics
        shares.append(metrics.num_reused_tokens / (len(prompt) - 1))
        if driven:
            driver.tiering.offload([*prompt, 0], 3)
        stats = driver.tier_stats
        assert all(value >= 0 for value in msgspec.structs.astuple(stats) if value != "")
    assert sum(shares[-100:]) == sum(shares[100:200]) == 100
    land(driver)
    assert is_idle(driver)


@both_modes
def test_case_126_a_full_host_takes_new_kv_when_its_owners_have_ended(driven):
    driver = tiered_driver(12, 16, max_seq_len=64, kv_tiering=driven)
    for i in range(12):
        stream = Stream(driver, prompt_of(i, 16), 16)
        stream.run_to(9)
        if driven:
            offload(stream)
        stream.finish()
        push_out(driver)
    stats = driver.tier_stats
    assert stats.num_host_cached_blocks == stats.num_host_blocks, "it is full"
    late = Stream(driver, prompt_of(99, 16), 16)
    late.run_to(9)
    if driven:
        offload(late)
    late.pause()
    push_out(driver)
    late.resume()
    late.finish()
    assert late.metrics[-1].num_onboarded_blocks == 6
    assert is_idle(driver)


@both_modes
def test_case_127_a_host_far_too_small_means_recompute_and_no_flood_of_warnings(driven, caplog):
    driver = tiered_driver(14, 8, max_batch_size=2, max_seq_len=64, kv_tiering=driven)
    with caplog.at_level(logging.DEBUG, logger="tokenflow"):
        streams = []
        for i in range(20):
            stream = Stream(driver, prompt_of(i, 14), 16)
            stream.run_to(10)
            if driven:
                offload(stream)
            stream.pause()
            streams.append(stream)
        for stream in streams:
            stream.resume()
        driver.run(2000)
        for stream in streams:
            stream.take()
            stream.check()
    assert len(caplog.records) <= 1
    stats = driver.tier_stats
    assert stats.num_host_full + stats.num_host_evicted_blocks > 0
    assert sum(stream.metrics[-1].num_reused_tokens < 23 for stream in streams) >= 15
    assert is_idle(driver)


def test_case_128_no_host_memory_at_all():
    """Asked for copies ahead of need: refused by name. Else a pause is a recompute."""
    with pytest.raises(ConfigError, match="kv_tiering"):
        tiered_driver(8, 0, kv_tiering=True)
    driver = tiered_driver(8, 0, max_seq_len=64)
    stream = Stream(driver, prompt_of(1, 14), 16)
    stream.run_to(10)
    stream.pause()
    push_out(driver)
    stream.resume()
    stream.finish()
    assert stream.metrics[-1].num_reused_tokens == 0
    assert not driver.batcher.has_work or not driver.step()


@both_modes
@both_policies
def test_case_129_every_step_makes_progress_under_four_times_the_load(driven, policy):
    """64 at once, 24 in and 24 out, on a device that holds a quarter and a host that holds half."""
    driver = tiered_driver(
        192, 384, block_s=0.02, max_batch_size=64, max_num_tokens=256, policy=policy,
        kv_tiering=driven, check_every=13, max_seq_len=64,
    )  # fmt: skip
    streams = [Stream(driver, prompt_of(i, 24), 24) for i in range(64)]
    while driver.batcher.has_work:
        before = sum(stream.num_tokens for stream in streams), driver.runner.num_computed_tokens
        if driven:
            for stream in streams[driver.num_steps % 8 :: 8]:
                offload(stream, 2)
        driver.step()
        after = sum(stream.num_tokens for stream in streams), driver.runner.num_computed_tokens
        assert after > before or not driver.batcher.num_active
    for stream in streams:
        stream.take()
        stream.check()
    land(driver)
    assert is_idle(driver)


def test_case_130_requests_that_go_while_their_kv_comes_leave_no_bytes_counted():
    """100 prefetches whose requests are cancelled; then the budget must be whole again."""
    driver = tiered_driver(16, 128, block_s=0.4, max_seq_len=80, kv_tiering=True,
                           max_blocks_in_flight=6)  # fmt: skip
    streams = []
    for i in range(10):
        stream = Stream(driver, prompt_of(i, 14), 40)
        stream.run_to(4)
        for _ in range(6):
            offload(stream)
            driver.step()
        stream.pause()
        land(driver)
        push_out(driver)
        streams.append(stream)
    for i in range(100):
        stream = streams[i % 10]
        driver.tiering.prefetch(stream.all_token_ids)
        stream.resume()
        if i % 3:
            driver.step()
        driver.cancel(stream.request_id)
        driver.step()
        stream.output.token_ids = []  # the client has gone; the next one asks the same
    land(driver)
    assert is_idle(driver)
    assert driver.tier_stats.num_onboards_completed > 20
    last = streams[0]
    other = push_out(driver)
    for _ in range(3):  # a prefetch takes only room that costs no copy
        driver.tiering.offload([*other, 0], 6, 77)
        driver.step()
        land(driver)
    num_before = driver.tier_stats.num_onboards_completed
    driver.tiering.prefetch(last.all_token_ids)
    driver.step()
    assert driver.tier_stats.num_device_in_transit_blocks == 6, "all of the budget"
    land(driver)
    assert driver.tier_stats.num_onboards_completed == num_before + 6
    last.resume()
    last.finish()
    assert last.metrics[-1].num_reused_tokens == 23
    assert last.metrics[-1].num_onboarded_blocks == 0, "it was there already"


@both_modes
def test_case_131_hours_of_turns_keep_the_books_small(driven):
    """What is kept per block, and nothing per request, whatever ends and comes back."""
    driver = tiered_driver(16, 40, check_every=200, kv_tiering=driven, event_buffer_max_size=64)
    chance, mirror_size = random.Random(131), []
    for i in range(1200):
        history = prompt_of(i % 60, 5 + i // 60 % 20)
        driver.run_one(history, chance.randrange(1, 4), kv_cache_retention_config=FOR_AN_HOUR)
        if driven:
            driver.tiering.offload([*history, 0], 3)
        mirror_size.append(len(stored_blocks(driver.batcher.kv)))
    kv = driver.batcher.kv
    assert max(mirror_size) <= 16 + 40
    victims = kv._tiers.victims
    for queue in (victims.device, victims.host, victims.copies):
        assert len(queue._heap) <= 4 * 40 + 16
    assert len(kv._use._expiry) <= 2 * (16 + 40)
    assert len(kv._sequences) == len(driver.batcher._queue._live_ids) == 0
    assert len(kv.events.get_latest_events(0)) <= 64
    assert is_idle(driver)
