"""A host tier on an engine: when commands act and what they tell, and copies that fail."""

from tests.inflight.helpers import VOCAB, Driver, executor_config
from tests.inflight.mirror import Mirror
from tests.inflight.paces import FailsSometimes
from tests.inflight.pausing import (
    SCRIPT,
    Stream,
    both_modes,
    both_policies,
    is_idle,
    offload,
    prompt_of,
    push_out,
    tiered_driver,
)
from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.scripted_runner import ScriptedRunner


def finished(driver, prompt, max_tokens=4):
    stream = Stream(driver, prompt, max_tokens)
    stream.finish()
    driver.run()
    return stream


def test_commands_of_an_idle_engine_are_carried_out_and_told():
    driver = tiered_driver(8, 16, kv_tiering=True, event_buffer_max_size=1000)
    kv, mirror = driver.batcher.kv, Mirror()
    stream = finished(driver, prompt_of(1, 10))
    tokens = [*stream.all_token_ids, 0]
    for command, where in (
        (lambda: offload(stream), (4, 0, 4)),
        (lambda: push_out(driver), (0, 4, 0)),
        (lambda: driver.tiering.drop_host(tokens), (0, 0, 0)),
    ):
        command()
        num_stats = len(driver.stats)
        driver.run()
        assert not driver.batcher.has_work
        found = kv.ahead.locate(tokens)
        told = found.num_device_blocks, found.num_host_blocks, found.num_copied_blocks
        assert told == where
        mirror.replay(kv.events.get_latest_events(0))
        mirror.check(kv)
        assert len(driver.stats) >= num_stats


def test_statistics_follow_the_commands_of_an_idle_engine():
    driver = tiered_driver(8, 16, kv_tiering=True)
    stream = finished(driver, prompt_of(1, 10))
    num_stats = len(driver.stats)
    offload(stream, 2)
    driver.run()
    assert len(driver.stats) == num_stats + 1
    assert driver.stats[-1].kv_tier_stats.num_offloads_completed == 2
    assert driver.stats[-1].num_active_requests == 0
    assert not driver.batcher.has_work


def test_dropping_a_stream_leaves_the_tail_of_another_one_alone():
    """Both begin alike; what the other one went on with is not the first one's to give up."""
    driver = tiered_driver(8, 16)
    one = finished(driver, [5] * 9, 1)
    other = finished(driver, [5] * 8 + [6, 7, 8], 1)
    push_out(driver)
    push_out(driver)
    kv = driver.batcher.kv
    assert kv.ahead.locate([*other.prompt, 0]).num_tokens == 11
    kv.ahead.drop_host([5] * 8 + [6, 9, 9, 9])
    assert kv.ahead.locate([*other.prompt, 0]).num_tokens == 11
    kv.ahead.drop_host([*one.prompt, 0])
    assert kv.ahead.locate([*other.prompt, 0]).num_tokens == 11
    assert kv.ahead.locate([*one.prompt, 0]).num_tokens == 8
    kv.ahead.drop_host([*other.prompt, 0])
    assert kv.ahead.locate([*other.prompt, 0]).num_tokens == 0


@both_modes
@both_policies
def test_a_resume_whose_blocks_do_not_come_is_computed_and_nobody_else_notices(driven, policy):
    failing: list[CopyDirection] = []
    pace = FailsSometimes(lambda t: "link down" if t.direction in failing else None)
    config = executor_config(num_blocks=24, num_host_blocks=40, kv_tiering=driven, policy=policy)
    driver = Driver(config, runner=ScriptedRunner(SCRIPT, VOCAB, pace=pace))
    stream = Stream(driver, prompt_of(1, 14), 30)
    stream.run_to(12)
    stream.pause()
    push_out(driver)
    beside = Stream(driver, prompt_of(2, 6), 30)
    beside.run_to(5)
    num_computed = driver.runner.num_computed_tokens
    failing.append(CopyDirection.ONBOARD)
    stream.resume()
    stream.run_to(stream.num_tokens + 1)
    assert driver.runner.num_computed_tokens - num_computed >= len(stream.prompt) + 12
    assert driver.tier_stats.num_onboards_failed == 7
    stream.finish()
    beside.finish()
    assert driver.batcher.num_failed_steps == 0
    driver.run()
    assert is_idle(driver)


@both_modes
def test_blocks_that_do_not_get_to_the_host_are_computed_again(driven):
    failing = [CopyDirection.OFFLOAD]
    pace = FailsSometimes(lambda t: "link down" if t.direction in failing else None)
    config = executor_config(num_blocks=24, num_host_blocks=40, kv_tiering=driven)
    driver = Driver(config, runner=ScriptedRunner(SCRIPT, VOCAB, pace=pace))
    stream = Stream(driver, prompt_of(1, 14), 30)
    stream.run_to(12)
    if driven:
        offload(stream)
    stream.pause()
    push_out(driver)
    assert driver.tier_stats.num_offloads_failed >= 7
    assert driver.tier_stats.num_host_cached_blocks == 0
    stream.resume()
    stream.finish()
    assert stream.metrics[-1].num_reused_tokens == 0
    assert is_idle(driver)


def test_a_flood_of_commands_does_not_hold_up_the_batch():
    driver = tiered_driver(8, 8)
    driver.enqueue(range(1, 6), max_tokens=6)
    done = []
    for i in range(1000):
        driver.batcher.command(lambda kv, i=i: done.append(i))
    driver.step()
    assert 0 < len(done) < 500
    driver.run()
    assert done == list(range(1000)), "all of them, in order"
