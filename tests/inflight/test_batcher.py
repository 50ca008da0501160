"""The iteration: boundaries, capacity policies, chunks, stop criteria, failures, statistics."""

import pytest

from tests.inflight.helpers import (
    GUARANTEED,
    MAX_UTILIZATION,
    VOCAB,
    Driver,
    executor_config,
    request,
)
from tokenflow.errors import ConfigError, InternalError
from tokenflow.executor.api import (
    FinishReason,
    KvCacheRetentionConfig,
    OutputConfig,
    SamplingConfig,
)
from tokenflow.inflight.batcher import InflightBatcher
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import counting, expected, fixed, pseudo_random

RANDOM = pseudo_random(VOCAB)


def test_deltas_and_final():
    driver = Driver(executor_config())
    request_id = driver.enqueue([5, 6], 3)
    assert [r.result.output_token_ids for r in driver.step()] == [
        [[expected(RANDOM, [5, 6], 1)[0][0]]]
    ]
    driver.run()
    output = driver.outputs[request_id]
    assert (output.token_ids, output.log_probs) == expected(RANDOM, [5, 6], 3)
    assert output.reason is FinishReason.LENGTH
    assert output.num_responses == 3, "the last token comes with the final response"
    assert output.final.result.cum_log_probs == [sum(output.log_probs)]


def test_cancel_before_a_boundary_gives_slot_and_blocks_to_the_next():
    driver = Driver(executor_config(max_batch_size=1, num_blocks=8))
    a = driver.enqueue([1, 2], 28)
    for _ in range(3):
        driver.step()
    driver.cancel(a)
    b = driver.enqueue([3, 4], 28)
    driver.step()
    assert driver.outputs[a].reason is FinishReason.CANCELLED
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 3)[0]
    assert driver.outputs[b].token_ids == expected(RANDOM, [3, 4], 1)[0]


def test_cancel_during_the_step_loses_its_token_and_frees_the_slot():
    driver = Driver(executor_config(max_batch_size=1, num_blocks=8))
    a = driver.enqueue([1, 2], 28)
    driver.step()
    ids = []

    def during():
        driver.cancel(a)
        ids.append(driver.enqueue([3, 4], 28))

    responses = driver.step(during)
    assert [r.result.output_token_ids for r in responses] == [[[]]]
    assert responses[0].result.finish_reasons == [FinishReason.CANCELLED]
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 1)[0]
    driver.step()
    assert driver.outputs[ids[0]].token_ids == expected(RANDOM, [3, 4], 1)[0]


def test_natural_end_wins_over_a_cancel_in_the_same_step():
    driver = Driver(executor_config())
    a = driver.enqueue([1, 2], 2)
    driver.step()
    driver.step(lambda: driver.cancel(a))
    assert driver.outputs[a].reason is FinishReason.LENGTH
    assert driver.outputs[a].token_ids == expected(RANDOM, [1, 2], 2)[0]
    driver.run()
    assert driver.outputs[a].num_responses == 2


def test_cancel_of_a_waiting_request_and_of_one_not_admitted_yet():
    driver = Driver(executor_config(max_batch_size=1))
    a = driver.enqueue([1], 10)
    b = driver.enqueue([2], 10)
    driver.step()
    driver.cancel(b)
    c = driver.enqueue([3], 10)
    driver.cancel(c)
    driver.step()
    for cancelled in (b, c):
        assert driver.outputs[cancelled].reason is FinishReason.CANCELLED
        assert driver.outputs[cancelled].token_ids == []
    driver.run()
    assert driver.outputs[a].token_ids == expected(RANDOM, [1], 10)[0]


def test_cancel_in_mid_prefill_stores_only_computed_chunks():
    driver = Driver(executor_config(max_num_tokens=11, tokens_per_block=4))  # chunks of 8
    prompt = list(range(30))
    a = driver.enqueue(prompt, 4)
    driver.step()
    driver.step(lambda: driver.cancel(a))
    assert driver.outputs[a].reason is FinishReason.CANCELLED
    computed = driver.runner.num_computed_tokens
    assert computed == 16
    output = driver.run_one(prompt, 4)
    assert output.token_ids == expected(RANDOM, prompt, 4)[0]
    assert driver.runner.num_computed_tokens == computed + 14 + 3


def test_unknown_finished_and_repeated_cancels_do_nothing():
    driver = Driver(executor_config())
    a = driver.enqueue([1], 2)
    driver.cancel(99)
    driver.run()
    driver.cancel(a)
    b = driver.enqueue([2], 5)
    driver.step()
    driver.cancel(b)
    driver.cancel(b)
    driver.run()
    assert driver.outputs[a].reason is FinishReason.LENGTH
    assert driver.outputs[b].reason is FinishReason.CANCELLED
    assert not driver.batcher._cancels


def test_cancelled_non_streaming_request_returns_no_generated_tokens():
    for exclude, tokens in ((True, []), (False, [7, 8])):
        driver = Driver(executor_config())
        output = OutputConfig(exclude_input_from_output=exclude)
        a = driver.enqueue([7, 8], 9, streaming=False, output_config=output)
        driver.step()
        driver.cancel(a)
        driver.step()
        assert driver.outputs[a].final.result.output_token_ids == [tokens]


def test_resume_after_a_cancel_at_every_index_computes_one_token():
    prompt, total = [11, 12, 13], 60
    ids, log_probs = expected(RANDOM, prompt, total)
    for during in (False, True):
        for k in range(1, total):
            driver = Driver(executor_config(tokens_per_block=8))
            a = driver.enqueue(prompt, total)
            for _ in range(k - during):
                driver.step()
            if during:
                driver.step()
                driver.step(lambda a=a, driver=driver: driver.cancel(a))
            else:
                driver.cancel(a)
                driver.step()
            first = driver.outputs[a]
            if k == total - 1 and during:
                assert first.reason is FinishReason.LENGTH
                continue
            assert first.reason is FinishReason.CANCELLED
            assert len(first.token_ids) == k
            before = driver.runner.num_computed_tokens
            metrics = OutputConfig(return_log_probs=True, return_perf_metrics=True)
            b = driver.run_one(prompt + first.token_ids, total - k, output_config=metrics)
            assert first.token_ids + b.token_ids == ids
            assert first.log_probs + b.log_probs == log_probs
            assert b.reason is FinishReason.LENGTH
            assert driver.runner.num_computed_tokens - before == total - k
            assert b.final.result.request_perf_metrics.num_reused_tokens == len(prompt) + k - 1


# stop criteria


def test_end_token_is_not_part_of_the_output():
    driver = Driver(executor_config(), script=counting(VOCAB))
    output = driver.run_one([0], 10, end_id=3)
    assert (output.token_ids, output.reason) == ([1, 2], FinishReason.END_ID)
    assert output.final.result.output_token_ids == [[]]
    output = driver.run_one([0], 3, end_id=3)
    assert (output.token_ids, output.reason) == ([1, 2], FinishReason.END_ID)
    assert driver.run_one([0], 4, end_id=-1).token_ids == [1, 2, 3, 4]


def test_end_token_before_min_tokens_is_masked():
    driver = Driver(executor_config(), script=counting(VOCAB))
    sampling = SamplingConfig(min_tokens=4)
    output = driver.run_one([0], 8, end_id=3, sampling_config=sampling)
    assert output.token_ids == [1, 2, 4, 5, 6, 7, 8, 9]


def test_stop_words():
    driver = Driver(executor_config(), script=counting(VOCAB))

    def stop(*words, prompt=(0,), max_tokens=6):
        output = driver.run_one(prompt, max_tokens, stop_words=words)
        return output.token_ids, output.reason

    assert stop((2, 3)) == ([1, 2, 3], FinishReason.STOP_WORDS)
    assert stop((9,), (2,)) == ([1, 2], FinishReason.STOP_WORDS)
    assert stop((0, 1)) == ([1], FinishReason.STOP_WORDS), "spans prompt and output"
    assert stop((0,))[1] is FinishReason.LENGTH, "only looked at with a new token"
    assert stop((2, 3), max_tokens=3)[1] is FinishReason.STOP_WORDS, "wins over LENGTH"
    assert stop((90, 91, 0, 1))[1] is FinishReason.LENGTH, "longer than what there is"


def test_non_streaming_comes_once_with_or_without_prompt():
    driver = Driver(executor_config())
    for exclude in (True, False):
        config = OutputConfig(exclude_input_from_output=exclude, return_log_probs=True)
        output = driver.run_one([5, 6], 3, streaming=False, output_config=config)
        ids, log_probs = expected(RANDOM, [5, 6], 3)
        assert output.token_ids == ([] if exclude else [5, 6]) + ids
        assert output.log_probs == log_probs
        assert output.num_responses == 1


# refused requests


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        (range(64), {}, ["64", "63"]),
        ([97], {}, ["input_token_ids", "97"]),
        ([-1], {}, ["input_token_ids", "-1"]),
        ([1], {"end_id": 97}, ["end_id", "97"]),
        ([1], {"end_id": -2}, ["end_id", "-2"]),
        ([1], {"stop_words": ((),)}, ["stop_words"]),
        ([1], {"stop_words": ((1, 97),)}, ["stop_words", "97"]),
        ([1], {"bad_words": ((1,),)}, ["bad_words"]),
        ([1], {"priority": float("nan")}, ["priority"]),
        (["a"], {}, ["fetching"]),
        ([1], {"max_tokens": 34}, ["max_tokens", "9", "8"]),
    ]
    + [
        ([1], {"sampling_config": SamplingConfig(**{name: value})}, [name])
        for name, value in [
            ("beam_width", 2),
            ("num_return_sequences", 2),
            ("repetition_penalty", 1.1),
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.5),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", float("nan")),
            ("temperature", -1.0),
            ("temperature", float("inf")),
            ("min_tokens", -1),
            ("seed", 2**64),
        ]
    ],
)
def test_refused_request_is_an_error_response_and_the_others_go_on(prompt, fields, words):
    driver = Driver(executor_config(num_blocks=8, max_seq_len=64))
    other = driver.enqueue([1], 8)
    driver.step()
    bad = driver.enqueue(prompt, **fields)
    driver.step()
    message = driver.outputs[bad].error
    assert message.startswith("Encountered an error when fetching new request: ")
    assert all(word in message for word in words), message
    driver.run()
    assert driver.outputs[other].token_ids == expected(RANDOM, [1], 8)[0]


def test_neutral_values_and_hints_are_accepted():
    driver = Driver(executor_config())
    sampling = SamplingConfig(
        num_return_sequences=1, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        top_p=1.0, top_k=0, temperature=0.0, seed=2**64 - 1,
    )  # fmt: skip
    output = driver.run_one(
        [1], 2, sampling_config=sampling, kv_cache_retention_config=KvCacheRetentionConfig()
    )
    assert output.reason is FinishReason.LENGTH


def test_max_tokens_is_lowered_to_max_seq_len():
    driver = Driver(executor_config(max_seq_len=64))
    assert [len(driver.run_one(range(n), 4).token_ids) for n in (60, 62, 63)] == [4, 2, 1]


def test_runner_that_refuses_a_request():
    class Refusing(ScriptedRunner):
        def add_request(self, request_id, request):
            if request.input_token_ids[0] == 66:
                raise ValueError("cannot sample like this")
            super().add_request(request_id, request)

    driver = Driver(executor_config(), runner=Refusing(RANDOM, VOCAB))
    bad, good = driver.enqueue([66, 1], 3), driver.enqueue([1], 3)
    driver.run()
    assert "cannot sample like this" in driver.outputs[bad].error
    assert driver.outputs[good].token_ids == expected(RANDOM, [1], 3)[0]
    assert driver.runner.num_requests == 0


# capacity


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


# chunks


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


# failures


class Failing(ScriptedRunner):
    """Fails while `broken`, after having written its chunks."""

    broken = False

    def forward(self, chunks):
        output = super().forward(chunks)
        if self.broken:
            raise RuntimeError("out of order")
        return output


def test_failed_step_ends_every_active_request_and_the_queue_goes_on():
    driver = Driver(executor_config(max_batch_size=2), runner=Failing(RANDOM, VOCAB))
    a, b = driver.enqueue([1], 9), driver.enqueue([2], 9)
    c = driver.enqueue([3], 9)
    driver.step()
    driver.runner.broken = True
    driver.step(lambda: driver.cancel(b))
    for request_id in (a, b):
        assert driver.outputs[request_id].error == (
            "Encountered an error in forward function: out of order"
        )
    assert driver.batcher.kv.num_used_blocks == 0
    assert driver.runner.num_requests == 0
    driver.runner.broken = False
    driver.run()
    assert driver.outputs[c].token_ids == expected(RANDOM, [3], 9)[0]
    assert driver.run_one([1], 9).token_ids == expected(RANDOM, [1], 9)[0]


def test_a_failed_request_stores_nothing_more():
    driver = Driver(executor_config(), runner=Failing(RANDOM, VOCAB))
    prompt = list(range(6))
    driver.enqueue(prompt, 9)
    driver.step()
    driver.runner.broken = True
    driver.step()
    driver.runner.broken = False
    metrics = OutputConfig(return_perf_metrics=True)
    output = driver.run_one(prompt, 9, output_config=metrics)
    assert output.final.result.request_perf_metrics.num_reused_tokens == 4, "full blocks only"
    assert output.token_ids == expected(RANDOM, prompt, 9)[0]


def test_a_failed_copy_ends_requests_and_poisons_nothing():
    class CannotCopy(ScriptedRunner):
        broken = True

        def copy_blocks(self, copies):
            if self.broken:
                raise RuntimeError("no copy today")
            super().copy_blocks(copies)

    driver = Driver(executor_config(), runner=CannotCopy(RANDOM, VOCAB))
    driver.run_one([1, 2, 3, 4, 5, 6, 7], 1)
    fork = [1, 2, 3, 4, 5, 6, 50, 51]
    assert "no copy today" in driver.run_one(fork, 4).error
    driver.runner.broken = False
    assert driver.run_one(fork, 4).token_ids == expected(RANDOM, fork, 4)[0]
    assert driver.run_one([1, 2, 3, 4, 5, 6, 7, 8], 4).reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [[1, 2], [VOCAB], []])
def test_runner_that_returns_nonsense_is_a_failed_step(tokens):
    class Nonsense(ScriptedRunner):
        def forward(self, chunks):
            output = super().forward(chunks)
            output.token_ids[:] = tokens
            return output

    driver = Driver(executor_config(), runner=Nonsense(RANDOM, VOCAB))
    assert "forward function" in driver.run_one([1], 3).error


def test_phases_out_of_order_raise():
    batcher = InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config())
    with pytest.raises(InternalError):
        batcher.finish_step(0.0)
    batcher.begin_step(0.0)
    with pytest.raises(InternalError):
        batcher.begin_step(0.0)


def test_limits_that_cannot_work():
    for fields in ({"max_num_tokens": 3}, {"max_batch_size": 0}, {"max_seq_len": 1}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config(**fields))


# statistics


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


def test_step_returns_everything_at_once():
    batcher = InflightBatcher(ScriptedRunner(RANDOM, VOCAB), executor_config())
    batcher.enqueue(1, request([1], 1))
    batcher.enqueue(2, request([VOCAB], 1))
    assert sorted(r.request_id for r in batcher.step(0.0).responses) == [1, 2]


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
