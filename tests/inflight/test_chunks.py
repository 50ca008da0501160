"""Where the chunks of a prompt begin and end, and engines without chunks."""

from tests.inflight.helpers import MAX_UTILIZATION, VOCAB, Driver, executor_config
from tokenflow.executor.api import FinishReason
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import expected, pseudo_random

RANDOM = pseudo_random(VOCAB)


def test_chunk_borders_do_not_depend_on_neighbours():
    seen = {}

    class Recording(ScriptedRunner):
        def forward(self, chunks):
            for chunk in chunks:
                seen.setdefault(chunk.request_id, []).append((chunk.start, len(chunk.token_ids)))
            assert sum(len(chunk.token_ids) for chunk in chunks) <= 15
            return super().forward(chunks)

    driver = Driver(
        executor_config(max_num_tokens=15, max_batch_size=4, max_seq_len=200, num_blocks=200),
        runner=Recording(RANDOM, VOCAB),
    )
    prompt = [i % 90 for i in range(50)]
    alone = driver.enqueue(prompt, 3, cache_salt_id=1)
    driver.run()
    others = [driver.enqueue([i] * 9, 30) for i in range(2)]
    driver.step()
    crowded = driver.enqueue(prompt, 3, cache_salt_id=2)
    third = driver.enqueue(prompt[:20], 3, cache_salt_id=3)
    driver.run()
    assert seen[alone] == [(0, 12), (12, 12), (24, 12), (36, 12), (48, 2), (50, 1), (51, 1)]
    assert seen[crowded] == seen[alone]
    assert driver.outputs[third].token_ids == expected(RANDOM, prompt[:20], 3)[0]
    assert all(len(driver.outputs[i].token_ids) == 30 for i in others)


def test_first_chunk_after_reuse_ends_at_the_same_border():
    driver = Driver(executor_config(max_num_tokens=11))  # chunks of 8
    prompt = [i % 90 for i in range(20)]
    driver.run_one(prompt[:5], 1)
    driver.enqueue(prompt, 1)
    driver.step()
    assert driver.stats[-1].inflight_batching_stats.num_ctx_tokens == 3


def test_without_chunked_context_long_prompts_are_refused_and_full_ones_never_starve():
    driver = Driver(executor_config(max_num_tokens=16, max_batch_size=4, chunked=False))
    streams = [driver.enqueue([i], 30) for i in range(3)]
    driver.step()
    too_long = driver.enqueue([5] * 17, 1)
    full = driver.enqueue([6] * 16, 2)
    driver.step()
    driver.step()
    assert "17" in driver.outputs[too_long].error
    assert len(driver.outputs[full].token_ids) == 1
    driver.run()
    for i, stream in enumerate(streams):
        assert driver.outputs[stream].token_ids == expected(RANDOM, [i], 30)[0]
    batching = [s.inflight_batching_stats for s in driver.stats[:-1]]
    assert all(b.num_scheduled_requests > 0 for b in batching)
    assert all(b.num_ctx_tokens + b.num_gen_requests <= 16 for b in batching)


def test_max_utilization_without_chunks_refuses_what_could_not_restart():
    config = executor_config(max_num_tokens=16, chunked=False, policy=MAX_UTILIZATION)
    driver = Driver(config)
    assert driver.run_one([1] * 8, 9).reason is FinishReason.LENGTH
    assert "max_tokens" in driver.run_one([1] * 8, 10).error
