"""What responses carry, and every way a request can end."""

from tests.contract.conftest import UNCHUNKED
from tokenflow.executor.api import Executor, FinishReason, OutputConfig, SamplingConfig
from tokenflow.inflight.scripts import expected

PROMPT = (3, 14, 15, 92, 65, 35)


def reference(client, prompt, max_tokens, **fields):
    """The request alone, on a cold cache, in one response; equal to what the script says."""
    output = client.run(
        prompt, max_tokens, streaming=False, cache_salt_id=client.new_salt(), **fields
    )
    if client.script is not None and not fields:
        assert (output.token_ids, output.log_probs) == expected(client.script, prompt, max_tokens)
    return output


def first_new(token_ids, start):
    """Index of the first token from `start` on that did not occur before."""
    return next(i for i in range(start, len(token_ids)) if token_ids[i] not in token_ids[:i])


def test_it_is_an_executor(client):
    assert isinstance(client.executor, Executor)
    assert client.executor.can_enqueue_requests()
    assert isinstance(client.executor.get_kv_cache_event_manager().get_latest_events(0), list)
    assert client.executor.get_kv_tiering() is None, "nobody asked for it"


def test_streaming_deltas_add_up_to_the_single_response(engine, client):
    alone = reference(client, PROMPT, 12)
    assert len(alone.deltas) == 1
    assert alone.reason is FinishReason.LENGTH
    streamed = client.run(PROMPT, 12)
    assert engine.same(alone, streamed)
    assert all(len(delta) == 1 for delta in streamed.deltas)
    assert len(streamed.deltas) == 12, "the last token comes with the final response"


def test_cum_log_probs_and_client_id(client):
    output = client.run(PROMPT, 6, client_id=77)
    assert output.final.client_id == 77
    assert abs(output.final.result.cum_log_probs[0] - sum(output.log_probs)) < 1e-6
    plain = client.run(PROMPT, 2, output_config=OutputConfig())
    assert plain.final.result.log_probs is None


def test_prompt_is_part_of_a_single_response_unless_excluded(client):
    keep = OutputConfig(exclude_input_from_output=False)
    whole = client.run(PROMPT, 4, streaming=False, output_config=keep)
    assert whole.token_ids[: len(PROMPT)] == list(PROMPT)
    assert len(whole.token_ids) == len(PROMPT) + 4
    streamed = client.run(PROMPT, 4, output_config=keep)
    assert streamed.token_ids == whole.token_ids[len(PROMPT) :]


def test_end_token_ends_and_is_left_out(engine, client):
    alone = reference(client, PROMPT, 30)
    at = first_new(alone.token_ids, 5)
    output = client.run(PROMPT, 30, end_id=alone.token_ids[at])
    assert output.reason is FinishReason.END_ID
    assert output.token_ids == alone.token_ids[:at]
    assert output.last_tokens == []
    assert client.run(PROMPT, 30, end_id=-1).reason is FinishReason.LENGTH


def test_min_tokens_masks_the_end_token(client):
    alone = reference(client, PROMPT, 30)
    at = first_new(alone.token_ids, 5)
    sampling = SamplingConfig(min_tokens=at + 3)
    output = client.run(PROMPT, 30, end_id=alone.token_ids[at], sampling_config=sampling)
    assert output.token_ids[:at] == alone.token_ids[:at]
    assert output.token_ids[at] != alone.token_ids[at]
    assert len(output.token_ids) >= at + 3


def test_stop_word_ends_and_is_part_of_the_output(client):
    alone = reference(client, PROMPT, 30)
    at = first_new(alone.token_ids, 5)
    word = tuple(alone.token_ids[at - 1 : at + 1])
    output = client.run(PROMPT, 30, stop_words=((1, 2, 1, 2), word))
    assert output.reason is FinishReason.STOP_WORDS
    assert output.token_ids == alone.token_ids[: at + 1]


def test_stop_word_may_begin_in_the_prompt(client):
    alone = reference(client, PROMPT, 4)
    output = client.run(PROMPT, 30, stop_words=((PROMPT[-1], alone.token_ids[0]),))
    assert (output.reason, output.token_ids) == (FinishReason.STOP_WORDS, alone.token_ids[:1])


def test_stop_on_the_last_allowed_token_is_a_stop(client):
    alone = reference(client, PROMPT, 30)
    at = first_new(alone.token_ids, 5)
    output = client.run(PROMPT, at + 1, stop_words=((alone.token_ids[at],),))
    assert output.reason is FinishReason.STOP_WORDS
    output = client.run(PROMPT, at + 1, end_id=alone.token_ids[at])
    assert output.reason is FinishReason.END_ID


def test_lengths_at_the_limit(client):
    """max_seq_len is 256."""
    prompt = [i % 200 for i in range(256)]
    assert len(client.run(prompt[:254], 4).token_ids) == 2
    assert len(client.run(prompt[:255], 4).token_ids) == 1
    for bad in (prompt, [*prompt, 1]):
        error = client.run(bad, 4).error
        assert error.startswith("Encountered an error when fetching new request: ")
        assert str(len(bad)) in error
        assert "255" in error


def test_refused_requests_are_error_responses_and_the_engine_lives(engine, client):
    stream = client.enqueue(PROMPT, 40)
    for fields, word in (
        ({"end_id": engine.vocab_size}, "end_id"),
        ({"prompt": (engine.vocab_size,)}, "input_token_ids"),
        ({"bad_words": ((1,), ())}, "bad_words"),
        ({"sampling_config": SamplingConfig(beam_width=2)}, "beam_width"),
    ):
        output = client.run(**{"prompt": PROMPT, **fields})
        assert word in output.error
    assert engine.same(client.wait(stream), reference(client, PROMPT, 40))


def test_more_blocks_than_the_pool(client_with):
    client = client_with(**UNCHUNKED)  # 128 tokens
    assert "blocks" in client.run(PROMPT, 124).error
    assert client.run(PROMPT, 123).reason is FinishReason.LENGTH
