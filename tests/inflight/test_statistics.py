"""Statistics of iterations and of requests."""

from tests.inflight.helpers import Driver, executor_config
from tokenflow.executor.api import OutputConfig
from tokenflow.inflight.scripts import fixed


def test_statistics():
    driver = Driver(executor_config(max_batch_size=1, num_blocks=8))
    driver.enqueue([1] * 5, 2)
    driver.enqueue([2], 1)
    driver.run()
    first, second, third, drained = driver.stats
    assert [s.iter for s in driver.stats] == [0, 1, 2, 3]
    assert (first.num_active_requests, first.num_queued_requests) == (1, 1)
    batching = first.inflight_batching_stats
    assert (batching.num_context_requests, batching.num_gen_requests) == (1, 0)
    assert batching.num_ctx_tokens == 5
    assert (first.iter_latency_ms, first.end_time) == (500.0, 0.5)
    assert first.kv_cache_stats.used_num_blocks == 2
    assert second.inflight_batching_stats.num_gen_requests == 1
    assert second.num_gen_context_tokens == 6
    assert (second.num_completed_requests, third.num_completed_requests) == (1, 1)
    assert drained.num_active_requests == 0
    assert drained.inflight_batching_stats.num_scheduled_requests == 0
    assert drained.kv_cache_stats.free_num_blocks == 8
    assert driver.step() == []
    assert len(driver.stats) == 4, "no entries while idle"


def test_perf_metrics_of_a_prompt_that_is_cached():
    driver = Driver(executor_config(), script=fixed([8], 9, then=1))
    metrics = OutputConfig(return_perf_metrics=True)
    driver.run_one(range(9), 1)
    result = driver.run_one(range(9), 2, output_config=metrics).final.result
    perf = result.request_perf_metrics
    assert perf.num_reused_tokens == 8
    assert perf.kv_cache_metrics.num_reused_blocks == 2
    assert perf.kv_cache_metrics.num_missed_blocks == 1
    assert perf.last_iter - perf.first_iter == 1
    assert result.log_probs is None
