"""Cancel in every state, and resuming from what was streamed."""

import pytest

from tests.contract.conftest import SLOW, WIDE
from tests.contract.test_responses import PROMPT, reference
from tokenflow.executor.api import FinishReason, OutputConfig, SamplingConfig


def test_cancelled_stream_ends_once_without_tokens(client_with):
    client = client_with(**SLOW)
    request_id = client.enqueue(PROMPT, 200)
    client.wait_tokens(request_id, 5)
    client.executor.cancel_request(request_id)
    client.executor.cancel_request(request_id)
    output = client.wait(request_id)
    assert output.reason is FinishReason.CANCELLED
    assert output.last_tokens == []
    assert output.token_ids == reference(client, PROMPT, len(output.token_ids)).token_ids
    client.run(PROMPT, 2)  # nothing more comes for the cancelled one


def test_cancelled_single_response_request_returns_nothing(client_with):
    client = client_with(**SLOW)
    for exclude in (True, False):
        config = OutputConfig(exclude_input_from_output=exclude)
        other = client.enqueue(PROMPT, 100)
        request_id = client.enqueue(PROMPT, 100, streaming=False, output_config=config)
        client.wait_tokens(other, 3)
        client.executor.cancel_request(request_id)
        output = client.wait(request_id)
        assert output.reason is FinishReason.CANCELLED
        assert output.token_ids == ([] if exclude else list(PROMPT))
        client.settle()


def test_cancel_while_queued(engine, client_with):
    """At once, or where a cancel waits for the first token: with the first tokens."""
    client = client_with(**SLOW)
    running = [client.enqueue((i, 1, 2), 150) for i in range(4)]
    queued = client.enqueue(PROMPT, 50)
    client.wait_tokens(running[0], 2)
    client.executor.cancel_request(queued)
    output = client.wait(queued)
    assert output.reason is FinishReason.CANCELLED
    if engine.cancels_at_once:
        assert output.token_ids == []
        assert client.outputs[running[0]].final is None, "it did not have to wait for a slot"
    else:
        assert 0 < len(output.token_ids) < 50
        assert output.token_ids == reference(client, PROMPT, len(output.token_ids)).token_ids


def test_cancel_before_the_first_token(client_with):
    """In prefill or before; the cache must stay right whatever was stored."""
    client = client_with(**SLOW)
    prompt = [(7 * i) % 200 for i in range(180)]
    for delay in range(4):
        other = client.enqueue(PROMPT, 30)
        client.wait_tokens(other, 1)
        request_id = client.enqueue(prompt, 60, cache_salt_id=5)
        client.wait_tokens(other, 1 + delay)
        client.executor.cancel_request(request_id)
        assert client.wait(request_id).reason is FinishReason.CANCELLED
    output = client.run(prompt, 20, cache_salt_id=5)
    assert output.token_ids == reference(client, prompt, 20).token_ids


def test_cancel_of_unknown_and_finished_requests_does_nothing(client):
    request_id = client.enqueue(PROMPT, 3)
    client.executor.cancel_request(10**9)
    assert client.wait(request_id).reason is FinishReason.LENGTH
    client.executor.cancel_request(request_id)
    assert client.run(PROMPT, 3).reason is FinishReason.LENGTH


def test_cancel_at_the_last_step_gives_one_final_of_either_kind(client):
    alone = reference(client, PROMPT, 8)
    for _ in range(20):
        request_id = client.enqueue(PROMPT, 8)
        client.wait_tokens(request_id, 7)
        client.executor.cancel_request(request_id)
        output = client.wait(request_id)
        if output.reason is FinishReason.LENGTH:
            assert output.token_ids == alone.token_ids
        else:
            assert output.reason is FinishReason.CANCELLED
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]


class Paused:
    """One request that is cancelled after `k` tokens and then resumed from what was streamed."""

    def __init__(self, client, prompt, total, k, **fields):
        self.client, self.prompt, self.total, self.k, self.fields = client, prompt, total, k, fields
        self.ids = [client.enqueue(prompt, total, **fields)]
        self.cancel_sent = False

    @property
    def outputs(self):
        return [self.client.outputs[i] for i in self.ids]

    def advance(self):
        """Cancel or resume when its time has come; True when the whole request has ended."""
        first = self.outputs[0]
        if len(self.ids) == 1 and first.final is None:
            if len(first.token_ids) >= self.k and not self.cancel_sent:
                self.cancel_sent = True
                self.client.executor.cancel_request(self.ids[0])
            return False
        if len(self.ids) == 1 and first.reason is FinishReason.CANCELLED:
            streamed = first.token_ids
            sampling = self.fields.get("sampling_config", SamplingConfig())
            left = max(0, (sampling.min_tokens or 0) - len(streamed))
            fields = {**self.fields, "sampling_config": SamplingConfig(min_tokens=left)}
            self.ids.append(
                self.client.enqueue([*self.prompt, *streamed], self.total - len(streamed), **fields)
            )
        return self.outputs[-1].final is not None

    def whole(self):
        first, last = self.outputs[0], self.outputs[-1]
        if first is not last:
            last.token_ids[:0] = first.token_ids
            last.log_probs[:0] = first.log_probs
        return last


@pytest.mark.parametrize("kind", ["length", "stop"])
def test_pause_after_every_token_gives_the_same_output(engine, client_with, kind):
    """60 tokens, a pause after each index; several in the batch at a time.

    A cancel may come after the end where the client is slow. Each index is paused for certain in
    the tests that step an engine by hand.
    """
    client = client_with(**WIDE)
    total = 60
    fields = {}
    alone = reference(client, PROMPT, total)
    if kind == "stop":
        fields = {
            "end_id": alone.token_ids[2],
            "stop_words": (tuple(alone.token_ids[57:59]),),
            "sampling_config": SamplingConfig(min_tokens=58),
        }
        alone = reference(client, PROMPT, total, **fields)
        assert len(alone.token_ids) > 50
    salt = client.new_salt()
    requests = [
        Paused(client, PROMPT, total, k, cache_salt_id=salt, **fields) for k in range(1, total)
    ]

    def all_ended():
        ended = [request.advance() for request in requests]
        return all(ended)

    client.until(all_ended)
    assert any(len(request.ids) == 2 for request in requests)
    for request in requests:
        assert engine.same(alone, request.whole())
