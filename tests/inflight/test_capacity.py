"""Both capacity policies, internal pauses, priority, the size of the batch."""

import pytest

from tests.inflight.helpers import GUARANTEED, MAX_UTILIZATION, VOCAB, Driver, executor_config
from tokenflow.executor.api import FinishReason, SamplingConfig
from tokenflow.inflight.scripts import counting, expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


def test_guaranteed_no_evict_reserves_the_whole_length_and_stops_at_the_head():
    driver = Driver(executor_config(num_blocks=8, max_batch_size=4))  # 32 tokens
    a = driver.enqueue([1] * 4, 13)  # 16 tokens: 4 blocks
    b = driver.enqueue([2] * 4, 17)  # 20 tokens: 5 blocks, does not fit beside a
    c = driver.enqueue([3] * 4, 4)  # 2 blocks would fit, but b is first
    driver.step()
    assert [len(driver.outputs[i].token_ids) for i in (a, b, c)] == [1, 0, 0]
    driver.run()
    for request_id, prompt, count in ((a, [1] * 4, 13), (b, [2] * 4, 17), (c, [3] * 4, 4)):
        assert driver.outputs[request_id].token_ids == expected(RANDOM, prompt, count)[0]
    assert all(s.inflight_batching_stats.num_paused_requests == 0 for s in driver.stats)


def test_guaranteed_no_evict_fills_the_pool_exactly():
    driver = Driver(executor_config(num_blocks=8, max_batch_size=4))
    ids = [driver.enqueue([i] * 4, 13) for i in (1, 2)]
    driver.step()
    assert [len(driver.outputs[i].token_ids) for i in ids] == [1, 1]
    driver.run()


def test_max_utilization_pauses_the_last_started_and_repeats_nothing():
    driver = Driver(executor_config(num_blocks=6, max_batch_size=4, policy=MAX_UTILIZATION))
    prompts = {driver.enqueue([i] * 4, 17): [i] * 4 for i in (1, 2, 3)}
    driver.run()
    batching = [s.inflight_batching_stats for s in driver.stats]
    paused = sum(b.num_paused_requests for b in batching)
    assert paused > 0
    assert sum(b.num_context_requests for b in batching) == 3 + paused
    for request_id, prompt in prompts.items():
        output = driver.outputs[request_id]
        assert (output.token_ids, output.log_probs) == expected(RANDOM, prompt, 17)
        assert output.reason is FinishReason.LENGTH
    first = next(iter(prompts))
    assert driver.outputs[first].final.result.decoding_iter == 17


def test_max_utilization_keeps_the_kv_of_what_it_pauses():
    driver = Driver(executor_config(num_blocks=6, policy=MAX_UTILIZATION))
    driver.enqueue([1] * 10, 6)  # needs a fourth block in step 4
    driver.enqueue([2] * 9, 5)  # has 12 tokens then; its last block goes to the first
    driver.run()
    assert sum(s.inflight_batching_stats.num_paused_requests for s in driver.stats) == 1
    num_context = [s.inflight_batching_stats.num_ctx_tokens for s in driver.stats]
    assert sum(num_context) == 10 + 9 + 4, "what was in the block that it lost"


def test_max_utilization_pauses_lower_priority_for_a_newcomer_of_higher():
    driver = Driver(executor_config(num_blocks=4, max_batch_size=4, policy=MAX_UTILIZATION))
    low = driver.enqueue([1] * 12, 5, priority=0.2)
    driver.step()
    high = driver.enqueue([2] * 8, 2, priority=0.9)
    driver.step()
    assert len(driver.outputs[high].token_ids) == 1
    assert driver.stats[-1].inflight_batching_stats.num_paused_requests == 1
    driver.run()
    assert driver.outputs[low].token_ids == expected(RANDOM, [1] * 12, 5)[0]


def test_cancel_of_a_request_that_the_engine_paused():
    driver = Driver(executor_config(num_blocks=5, max_batch_size=2, policy=MAX_UTILIZATION))
    a, b = driver.enqueue([1] * 8, 13), driver.enqueue([2] * 8, 13)
    while not driver.stats or not driver.stats[-1].inflight_batching_stats.num_paused_requests:
        driver.step()
    streamed = list(driver.outputs[b].token_ids)
    driver.cancel(b)
    driver.step()
    assert driver.outputs[b].reason is FinishReason.CANCELLED
    assert driver.outputs[b].token_ids == streamed
    driver.run()
    assert driver.outputs[a].token_ids == expected(RANDOM, [1] * 8, 13)[0]


def test_min_tokens_and_sampling_index_go_on_across_an_internal_pause():
    driver = Driver(
        executor_config(num_blocks=5, max_batch_size=2, policy=MAX_UTILIZATION),
        script=counting(VOCAB),
    )
    sampling = SamplingConfig(min_tokens=12)
    driver.enqueue([50] * 7 + [0], 13)
    b = driver.enqueue([60] * 7 + [0], 13, end_id=9, sampling_config=sampling)
    driver.run()
    assert sum(s.inflight_batching_stats.num_paused_requests for s in driver.stats) > 0
    assert driver.outputs[b].token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]


def test_priority_order_then_arrival():
    driver = Driver(executor_config(max_batch_size=1))
    first = driver.enqueue([9], 3)
    driver.step()
    ids = [driver.enqueue([i], 1, priority=p) for i, p in enumerate((0.1, 0.9, 0.5, 0.9))]
    done = []
    while driver.batcher.has_work:
        done += [r.request_id for r in driver.step() if r.result.is_final]
    assert done == [first, ids[1], ids[3], ids[2], ids[0]]


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_batch_never_exceeds_max_batch_size_and_priority_is_fetched_above_the_cap(policy):
    driver = Driver(executor_config(max_batch_size=2, policy=policy))
    for i in range(2):
        driver.enqueue([i], 6, priority=0.2)
    driver.step()
    for i in range(2, 5):
        driver.enqueue([i], 6, priority=0.8)
    driver.step()
    stats = driver.stats[-1]
    assert stats.num_active_requests == 5
    assert stats.inflight_batching_stats.num_scheduled_requests == 2
    driver.run()
    assert all(s.inflight_batching_stats.num_scheduled_requests <= 2 for s in driver.stats)
