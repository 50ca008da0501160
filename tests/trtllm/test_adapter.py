"""The adapter's own habits on the double: kept cancels, failed steps, tiers, pools, the end."""

from __future__ import annotations

import dataclasses
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Client
from tests.trtllm import changed
from tests.trtllm.conftest import VOCAB, Starter, without_tensorrt_llm
from tests.trtllm_double.folder import FAIL_FILE, Behind
from tokenflow.costs import CostModel
from tokenflow.errors import CapacityError, ConfigError, EngineError, EngineLostError
from tokenflow.executor.api import Executor, FinishReason, OutputConfig, Request
from tokenflow.executor.factory import served_config
from tokenflow.executor.kv_api import KVCacheSnapshots, KvPools
from tokenflow.executor.trtllm import load_bindings
from tokenflow.executor.trtllm_executor import MAX_FAILED_STEPS, TrtllmExecutor
from tokenflow.executor.trtllm_stats import end_times

SLOW = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.01)
LONG = tuple(range(1, 181))  # three chunks of 64


def binding(executor: TrtllmExecutor) -> Any:
    return executor._executor


def test_it_is_an_executor_with_pools(start: Starter) -> None:
    executor = start.executor(kv_cache_host_memory_bytes=1 << 20)
    assert isinstance(executor, Executor)
    assert isinstance(executor, KvPools)
    assert (executor.num_host_blocks, executor.block_bytes) == (128, 8192)
    assert executor.info.num_blocks == 40
    assert executor.get_kv_tiering() is None
    assert not isinstance(executor.get_kv_cache_event_manager(), KVCacheSnapshots)


# -- cancels -----------------------------------------------------------------------------------


def test_a_cancel_is_kept_until_the_first_token(start: Starter) -> None:
    """The double refuses one that comes earlier. Also after a resume."""
    client = start.client(SLOW)
    known: tuple[int, ...] = LONG
    for _ in range(3):
        request_id = client.enqueue(known, 20)
        client.executor.cancel_request(request_id)
        output = client.wait(request_id)
        assert output.reason is FinishReason.CANCELLED
        assert 1 <= len(output.token_ids) < 20
        known = (*known, *output.token_ids)
    assert binding(client.executor).hazards == []
    alone = client.run(LONG, 40, cache_salt_id=client.new_salt()).token_ids
    assert list(known[len(LONG) :]) == alone[: len(known) - len(LONG)]


def test_after_pauses_of_the_engines_own_cancels_wait_for_a_token(start: Starter) -> None:
    """Six of up to 15 blocks each on 40: the engine pauses some, in whose context nobody may be
    cancelled."""
    client = start.client(SLOW, batch_scheduler_policy="max_utilization")
    ids = [client.enqueue([*range(i, i + 60)], 60) for i in range(6)]
    live = client.executor._live._live
    client.until(lambda: any(s.inflight_batching_stats.num_paused_requests for s in client.stats))
    client.executor._pull_stats()
    computing = [i for i in ids if i in live and live[i].is_computing_context]
    assert computing
    for request_id in ids:
        client.executor.cancel_request(request_id)
    client.wait(*ids)
    assert binding(client.executor).hazards == []


# -- responses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("log_probs", ["all", "new"])
def test_log_probs_of_all_tokens_or_of_the_new_ones(start: Starter, log_probs: str) -> None:
    client = start.client(_behind(log_probs))
    output = client.run((3, 4), 12)
    assert len(output.log_probs) == 12
    single = client.run((3, 4), 12, streaming=False)
    assert (single.token_ids, single.log_probs) == (output.token_ids, output.log_probs)


def _behind(log_probs: str) -> Behind:
    return Behind(vocab_size=VOCAB, script="pseudo_random", log_probs=log_probs)


def test_errors_when_a_request_is_fetched_are_its_own(start: Starter) -> None:
    client = start.client()
    other = client.enqueue((1, 2), 30)
    for _ in range(2 * MAX_FAILED_STEPS):
        output = client.run(range(256), 4)
        assert output.error.startswith("Encountered an error when fetching new request: ")
    assert client.executor.can_enqueue_requests()
    assert client.wait(other).reason is FinishReason.LENGTH


# -- failed steps ------------------------------------------------------------------------------

NO_REUSE = {"enable_kv_cache_reuse": False, "scheduling_policy": "fcfs-reserve"}


def test_steps_that_fail_again_and_again_end_the_engine(start: Starter, caplog: Any) -> None:
    folder = start.folder(Behind(vocab_size=VOCAB))
    executor = start.executor(folder=folder, **NO_REUSE)
    client = Client(executor)
    assert client.run((1, 2), 2).token_ids == [3, 4]
    (folder / FAIL_FILE).touch()
    for number in range(MAX_FAILED_STEPS):
        assert executor.can_enqueue_requests()
        ids = [client.enqueue((i, 2), 5) for i in range(2)]
        client.until(lambda ids=ids: all(client.outputs[i].final for i in ids))
        assert "CUDA error" in client.outputs[ids[0]].error, number
    assert not executor.can_enqueue_requests()
    assert "3 steps failed in a row" in caplog.text
    with pytest.raises(EngineLostError, match="CUDA error"):
        executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=1))
    with pytest.raises(EngineLostError):
        executor.await_responses(timedelta(0))
    assert executor.get_latest_iteration_stats() is not None
    executor.cancel_request(1)


@pytest.mark.parametrize("reuses", [True, False])
def test_a_single_failed_step_is_survived(start: Starter, reuses: bool) -> None:
    """In the middle of an answer; without reuse also in the middle of a prompt."""
    folder = start.folder(Behind(vocab_size=VOCAB, step_s=0.001))
    client = Client(start.executor(folder=folder, **({} if reuses else NO_REUSE)))
    for _ in range(2 * MAX_FAILED_STEPS):
        request_id = client.enqueue((1, 2), 250)
        if reuses:
            client.wait_tokens(request_id, 1)
        (folder / FAIL_FILE).touch()
        assert "CUDA error" in client.wait(request_id).error
        (folder / FAIL_FILE).unlink()
        assert client.run((1, 2), 2).token_ids == [3, 4]
    assert client.executor.can_enqueue_requests()


def test_a_prompt_whose_step_failed_is_reused_by_nobody(start: Starter, caplog: Any) -> None:
    """TensorRT-LLM keeps its blocks as if they had been computed."""
    folder = start.folder(Behind(vocab_size=VOCAB))
    client = Client(start.executor(folder=folder))
    (folder / FAIL_FILE).touch()
    assert "CUDA error" in client.run(LONG, 2).error
    assert not client.executor.can_enqueue_requests()
    assert "a step failed in the middle of a prompt" in caplog.text
    with pytest.raises(EngineLostError, match="CUDA error"):
        client.executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=1))


# -- statistics, events, pools -----------------------------------------------------------------


def test_what_generating_requests_read_is_estimated(start: Starter) -> None:
    client = start.client(SLOW)
    ids = [client.enqueue([*range(1, 41)], 40) for _ in range(2)]
    client.wait_tokens(ids[1], 20)
    client.stats.clear()
    client.wait_tokens(ids[1], 30)
    entry = client.stats[-1]
    assert entry.inflight_batching_stats.num_gen_requests == 2
    assert 2 * 55 < entry.num_gen_context_tokens < 2 * 80
    assert end_times([10.0, 20.0, 30.0], 7.0) == [6.95, 6.97, 7.0]


def test_costs_are_learned_from_what_is_told(start: Starter) -> None:
    """A step of 10 ms, whatever else is unknown."""
    client = start.client(SLOW)
    costs = CostModel()
    ids = [client.enqueue([*range(i, i + 40)], 60) for i in range(3)]
    client.wait(*ids)
    for entry in client.stats:
        costs.observe_iteration(entry)
    estimate = costs.estimate(0.05)
    assert costs.num_observed > 60
    context = 3 * 70 * estimate.step_per_context_token_s
    step_s = estimate.step_base_s + 3 * estimate.step_per_sequence_s + context
    assert 0.008 < step_s < 0.02


def test_missed_events_leave_the_tiers_unknown(start: Starter) -> None:
    client = start.client(kv_event_buffer_max_size=2, kv_cache_host_memory_bytes=1 << 20)
    executor = client.executor
    assert executor.info.num_host_blocks == 128, "from the statistics"
    for i in range(6):
        client.executor.enqueue_request(Request(input_token_ids=(i,) * 60, max_tokens=4))
    end = time.monotonic() + 30
    while len(executor._live):
        assert time.monotonic() < end
        executor.await_responses(timedelta(seconds=1))
    stats = executor.get_latest_iteration_stats()
    assert stats[-1].kv_tier_stats is None
    ids = [event.event_id for event in executor.get_kv_cache_event_manager().get_latest_events(0)]
    assert ids == [ids[0], ids[0] + 1]
    assert ids[0] > 1


@pytest.mark.parametrize("kv_event_buffer_max_size", [0, 64])
def test_a_pool_of_a_fraction_is_as_large_as_it_gets(
    start: Starter, kv_event_buffer_max_size: int
) -> None:
    behind = Behind(vocab_size=VOCAB, free_gpu_memory_bytes=100 * 8192)
    settings = {
        "max_tokens_in_paged_kv_cache": 0,
        "kv_cache_free_gpu_mem_fraction": 0.5,
        "kv_cache_host_memory_bytes": 30 * 8192,
        "kv_event_buffer_max_size": kv_event_buffer_max_size,
    }
    executor = start.executor(behind, **settings)
    assert (executor.info.num_blocks, executor.info.num_host_blocks) == (50, 30)
    config = start.config(Path("/engine"), **settings)
    served = served_config(config, executor)
    assert served.max_tokens_in_paged_kv_cache == 400
    assert dataclasses.replace(served, max_tokens_in_paged_kv_cache=0) == config
    assert served_config(served, executor) is served


def test_a_pool_that_is_smaller_than_asked_for_is_refused(start: Starter) -> None:
    behind = Behind(vocab_size=VOCAB, free_gpu_memory_bytes=20 * 8192)
    with pytest.raises(CapacityError, match=r"320 tokens were asked for, .* holds 144"):
        start.executor(behind)


# -- start and end -----------------------------------------------------------------------------


def test_an_engine_whose_first_step_fails_does_not_start(start: Starter) -> None:
    folder = start.folder()
    (folder / FAIL_FILE).touch()
    with pytest.raises(EngineError, match="first request failed: Encountered an error in forward"):
        start.executor(folder=folder)


def test_what_the_constructor_says_is_told(start: Starter) -> None:
    folder = start.folder(Behind(vocab_size=VOCAB, runner="nonsense"))
    with pytest.raises(EngineError, match=r"TensorRT-LLM cannot start the engine: .*nonsense"):
        start.executor(folder=folder)


def test_a_configuration_that_the_binding_refuses_is_told(start: Starter) -> None:
    other = changed.without_argument("KvCacheConfig", "copy_on_partial_reuse")
    with pytest.raises(EngineError, match=r"cannot start the engine: KvCacheConfig\.__init__"):
        start.executor(bindings=other)


@without_tensorrt_llm
def test_without_tensorrt_llm_the_reason_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^engine: trtllm needs TensorRT-LLM: ModuleNotFound"):
        load_bindings()


def test_shutdown_ends_what_runs_and_takes_the_ends(start: Starter) -> None:
    client = start.client(SLOW, max_batch_size=2)
    executor = client.executor
    for i in range(4):
        client.enqueue((i, 5), 100)
    waiter = threading.Thread(target=_wait_for_the_end, args=(executor,))
    waiter.start()
    start_time = time.monotonic()
    executor.shutdown()
    waiter.join(10)
    assert not waiter.is_alive()
    assert time.monotonic() - start_time < 5
    assert len(executor._live) == 0
    assert binding(executor).hazards == []


def _wait_for_the_end(executor: TrtllmExecutor) -> None:
    def wait() -> None:
        while True:
            executor.await_responses()

    with pytest.raises(RuntimeError, match="Shutdown called"):
        wait()


def test_older_bindings_serve_what_they_have(start: Starter) -> None:
    older = changed.without_argument("Request", "cache_salt_id")
    client = Client(start.executor(Behind(vocab_size=VOCAB), bindings=older))
    plain = OutputConfig(return_perf_metrics=True)
    assert client.run((1, 2), 3, output_config=plain).token_ids == [3, 4, 5]
