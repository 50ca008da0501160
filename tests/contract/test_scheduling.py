"""Order, capacity, chunks, reuse, statistics, lifecycle."""

import itertools
import threading
import time
from datetime import timedelta

import pytest

from tests.contract.conftest import BOUNDED, PAUSING, SLOW, UNCHUNKED, WIDE
from tests.contract.test_responses import PROMPT, reference
from tokenflow.executor.api import FinishReason, OutputConfig, Request

METRICS = OutputConfig(return_log_probs=True, return_perf_metrics=True)


def long_prompt(seed, length):
    return [(seed * 31 + 7 * i + i * i) % 200 for i in range(length)]


def num_reused(output):
    return output.final.result.request_perf_metrics.num_reused_tokens


def test_batch_mates_do_not_change_an_output(engine, client):
    prompts = [long_prompt(i, 5 + 3 * i) for i in range(6)]
    alone = [reference(client, prompt, 20) for prompt in prompts]
    ids = [client.enqueue(prompt, 20, cache_salt_id=client.new_salt()) for prompt in prompts]
    client.wait(*ids)
    assert all(engine.same(a, client.outputs[i]) for a, i in zip(alone, ids, strict=True))


def test_higher_priority_first_then_arrival(client_with):
    client = client_with(**WIDE)
    blockers = [client.enqueue((i, 7), 90 if i else 40, priority=1.0) for i in range(8)]
    client.wait_tokens(blockers[-1], 1)  # the first of them frees its slot, the only one, later
    priorities = (0.1, 0.9, 0.5, 0.9)
    ids = client.enqueue_together(
        [client.request((i, 2), 2, priority=p) for i, p in enumerate(priorities)]
    )
    client.wait(*ids)
    assert [i for i in client.order if i in ids] == [ids[1], ids[3], ids[2], ids[0]]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_small_pool_changes_nothing_but_time(engine, client_with, policy):
    client = client_with(**({} if policy == "guaranteed_no_evict" else PAUSING))  # 40 blocks
    prompts = [long_prompt(i, 60) for i in range(6)]  # each 15 blocks in the end
    alone = [reference(client, prompt, 60) for prompt in prompts]
    client.settle()
    ids = client.enqueue_together(
        [client.request(prompt, 60, cache_salt_id=client.new_salt()) for prompt in prompts]
    )
    client.wait(*ids)
    for output, request_id in zip(alone, ids, strict=True):
        assert engine.same(output, client.outputs[request_id])
    batching = [s.inflight_batching_stats for s in client.stats]
    num_paused = sum(b.num_paused_requests for b in batching)
    assert (num_paused > 0) == (policy == "max_utilization")
    largest = max(b.num_scheduled_requests for b in batching)
    assert largest == 2 if policy == "guaranteed_no_evict" else largest > 2


def test_a_prompt_in_chunks_gives_the_same_output(engine, client_with):
    client, wide = client_with(), client_with(**WIDE)
    prompt = long_prompt(1, 230)
    alone = reference(wide, prompt, 10)
    assert engine.same(alone, reference(client, prompt, 10))
    sizes = [s.inflight_batching_stats.num_ctx_tokens for s in client.stats]
    assert max(sizes) == 56, "a multiple of the block that fits beside a full batch"
    assert sum(sizes) == 230


def test_without_chunks_a_prompt_over_the_budget_is_refused(engine, client_with):
    client = client_with(**UNCHUNKED)
    others = [client.enqueue((i, 1, 2), 22) for i in range(2)]
    assert "65" in client.run(long_prompt(2, 65), 4).error
    fits = client.run(long_prompt(2, 64), 4)
    assert engine.same(fits, reference(client, long_prompt(2, 64), 4))
    client.wait(*others)


def test_prefix_and_partial_block_are_reused(engine, client):
    prompt, salt = long_prompt(3, 45), client.new_salt()  # 5 blocks of 8, and 5 tokens
    cold = client.run(prompt, 4, cache_salt_id=salt, output_config=METRICS)
    assert num_reused(cold) == 0
    warm = client.run(prompt, 4, cache_salt_id=salt, output_config=METRICS)
    assert num_reused(warm) == 44, "all but the last token"
    assert engine.same(cold, warm)
    metrics = warm.final.result.request_perf_metrics
    assert metrics.kv_cache_metrics.num_reused_blocks == 6
    assert metrics.last_iter - metrics.first_iter == 3
    fork = [*prompt[:43], 201, 202]
    forked = client.run(fork, 4, cache_salt_id=salt, output_config=METRICS)
    assert num_reused(forked) == (43 if engine.tells_partial_blocks else 44)
    assert engine.same(forked, reference(client, fork, 4))
    other = client.run(prompt, 4, cache_salt_id=client.new_salt(), output_config=METRICS)
    assert num_reused(other) == 0


def test_blocks_are_reused_while_their_owner_runs(engine, client_with):
    client = client_with(**SLOW)
    prompt, salt = long_prompt(4, 40), client.new_salt()
    owner = client.enqueue(prompt, 100, cache_salt_id=salt)
    client.wait_tokens(owner, 1)
    output = client.run([*prompt, 9], 4, cache_salt_id=salt, output_config=METRICS)
    assert num_reused(output) == 40
    assert engine.same(output, reference(client, [*prompt, 9], 4))
    assert client.outputs[owner].final is None


def test_resume_recomputes_one_token(client):
    salt = client.new_salt()
    request_id = client.enqueue(long_prompt(5, 30), 100, cache_salt_id=salt)
    client.wait_tokens(request_id, 10)
    client.executor.cancel_request(request_id)
    streamed = client.wait(request_id).token_ids
    history = [*long_prompt(5, 30), *streamed]
    resumed = client.run(history, 4, cache_salt_id=salt, output_config=METRICS)
    assert num_reused(resumed) == len(history) - 1


def test_statistics(client_with):
    client = client_with(**WIDE)
    ids = client.enqueue_together(
        [client.request((i, 1, 2, 3), 20, cache_salt_id=client.new_salt()) for i in range(9)]
    )
    client.wait(*ids)
    client.until(lambda: client.stats and client.stats[-1].num_active_requests == 0)
    stats = client.stats
    assert [s.iter for s in stats] == list(range(stats[0].iter, stats[0].iter + len(stats)))
    assert sum(s.num_completed_requests for s in stats) == 9
    assert sum(s.inflight_batching_stats.num_ctx_tokens for s in stats) == 9 * 4
    assert sum(s.inflight_batching_stats.num_gen_requests for s in stats) == 9 * 19
    assert max(s.num_queued_requests for s in stats) == 1
    assert all(s.num_active_requests <= s.max_num_active_requests == 8 for s in stats)
    assert all(a.end_time <= b.end_time for a, b in itertools.pairwise(stats))
    assert abs(stats[-1].end_time - time.monotonic()) < 60
    for s in stats:
        kv = s.kv_cache_stats
        assert kv.free_num_blocks + kv.used_num_blocks == kv.max_num_blocks == 128
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
    client.pump(0.05)
    assert len(client.stats) == len(stats), "no entries while idle"


def test_await_returns_empty_after_its_timeout(client):
    start = time.monotonic()
    assert client.executor.await_responses(timedelta(milliseconds=50)) == []
    assert 0.04 < time.monotonic() - start < 30
    assert client.executor.get_num_responses_ready() == 0


def test_ids_are_unique_from_many_threads(client):
    ids, lock = [], threading.Lock()

    def enqueue(count):
        for _ in range(count):
            request = Request(input_token_ids=PROMPT, max_tokens=1)
            new = client.executor.enqueue_requests([request, request])
            assert new[1] > new[0]
            with lock:
                ids.extend(new)

    threads = [threading.Thread(target=enqueue, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 80
    seen = []
    while len(seen) < 80:
        seen += [r.request_id for r in client.executor.await_responses(timedelta(seconds=30))]
    assert sorted(seen) == sorted(ids)


@pytest.mark.parametrize("engine", BOUNDED, indirect=True)
def test_full_queue_raises(fresh):
    client = fresh(max_queue_size=2, max_batch_size=1, **SLOW)
    blocker = client.enqueue(PROMPT, 200)
    client.wait_tokens(blocker, 1)
    queued = [client.enqueue((i,), 2) for i in range(2)]
    with pytest.raises(RuntimeError, match="Maximum queue size of 2 has been reached"):
        client.enqueue((3,), 2)
    client.executor.cancel_request(queued[0])
    client.wait(queued[0])
    replacement = client.enqueue((4,), 2)
    client.executor.cancel_request(blocker)
    client.wait(blocker, replacement, queued[1])


def test_shutdown(fresh):
    client = fresh(max_batch_size=1)
    running = client.enqueue(PROMPT, 30)
    client.enqueue((1, 2), 30)
    client.wait_tokens(running, 1)
    raised = []

    def wait_for_ever():
        try:
            while True:
                client.executor.await_responses()
        except RuntimeError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait_for_ever)
    waiter.start()
    client.executor.shutdown()
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(raised) == 1
    client.executor.shutdown()
    assert not client.executor.can_enqueue_requests()
    for call in (
        lambda: client.executor.enqueue_request(Request(input_token_ids=(1,), max_tokens=1)),
        lambda: client.executor.await_responses(timedelta(0)),
        lambda: client.executor.cancel_request(running),
        client.executor.get_latest_iteration_stats,
        client.executor.get_num_responses_ready,
    ):
        with pytest.raises(RuntimeError):
            call()


def test_natural_ends_of_many_requests(engine, client):
    """More requests than slots, all kinds of lengths, one final each."""
    ids = {client.enqueue((i, 3, 5), 1 + i % 7): 1 + i % 7 for i in range(40)}
    client.wait(*ids)
    for request_id, length in ids.items():
        output = client.outputs[request_id]
        assert output.reason is FinishReason.LENGTH
        assert len(output.token_ids) == length
