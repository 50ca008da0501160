"""Length and time limits of requests on a real server."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import GrpcStream, events_of, metric, num_active, post, wait_until
from tests.e2e.conftest import Factory
from tests.e2e.test_requests import expected_text
from triton_backend.launcher import TritonServer

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")
REQUEST: dict[str, Any] = {"text_input": "hello", "stream": True, "end_id": -1, "outputs": OUTPUTS}
MAX_SEQ_LEN = 512


def both_modes(server: TritonServer, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The responses of stream=false and of stream=true."""
    single = post(server, "generate", {**body, "stream": False})
    stream = post(server, "generate_stream", {**body, "stream": True})
    return [[json.loads(single[1])], events_of(stream[1])]


@pytest.mark.parametrize(
    ("num_input_tokens", "max_tokens", "num_output_tokens"),
    [
        (MAX_SEQ_LEN - 2, 4, 2),
        (MAX_SEQ_LEN - 1, 4, 1),
        (MAX_SEQ_LEN, 4, None),
        (MAX_SEQ_LEN + 1, 4, None),
        (472, 4095, 40),
        (MAX_SEQ_LEN - 20, 2**31 - 1, 20),
    ],
)
def test_lengths_at_the_limit_are_the_same_in_both_modes(
    alive: TritonServer, num_input_tokens: int, max_tokens: int, num_output_tokens: int | None
) -> None:
    body = {"text_input": "a" * num_input_tokens, "max_tokens": max_tokens, "end_id": -1}
    for responses in both_modes(alive, {**body, "return_num_output_tokens": True}):
        if num_output_tokens is None:
            (response,) = responses
            message = f"text_input: has {num_input_tokens} tokens; max_seq_len 512 leaves room for"
            assert message in response["error"]
            continue
        assert sum(response["num_output_tokens"] for response in responses) == num_output_tokens
        assert responses[-1]["finish_reason"] == "length"


def test_without_max_tokens_the_default_holds(alive: TritonServer) -> None:
    for text, expected in (("a" * 10, 128), ("a" * 500, 12)):
        body = {"text_input": text, "end_id": -1, "return_num_output_tokens": True}
        reply = json.loads(post(alive, "generate", body)[1])
        assert (reply["num_output_tokens"], reply["finish_reason"]) == (expected, "length")


def test_an_empty_prompt_is_refused_and_a_blank_one_is_a_prompt(alive: TritonServer) -> None:
    for (response,) in both_modes(alive, {"text_input": "", "max_tokens": 20}):
        assert "text_input: must not be empty" in response["error"]
    for responses in both_modes(alive, {"text_input": "   ", "max_tokens": 3, "end_id": -1}):
        assert responses[-1]["finish_reason"] == "length"


def test_prompts_that_are_too_long_hurt_nobody_else(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        for number in range(4):
            stream.send(str(number), **{**REQUEST, "max_tokens": 60})
        wait_until(lambda: metric(alive, "tokenflow_active_requests", state="running") == 4)
        for length in (MAX_SEQ_LEN + 1, 2715, 40_000):
            answer = other.ask(text_input="a" * length, max_tokens=4)
            assert "text_input: has " in (answer.error or "")
        for _ in range(5):
            assert other.ask(text_input="b", max_tokens=2, end_id=-1).error is None
        answers = stream.collect(4)
    expected = expected_text(tokenizer_dir, "hello", 60)
    assert [answer.text for answer in answers.values()] == [expected] * 4


def num_timed_out(server: TritonServer) -> float:
    return metric(server, "tokenflow_requests_total", outcome="timeout")


def test_a_request_ends_at_its_time_limit_with_what_it_has(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    """Time that it spends paused counts; the same over gRPC and HTTP, in both modes."""
    before = num_timed_out(alive)
    whole = expected_text(tokenizer_dir, "hello", 400)
    limit_s = 1.0
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        start = time.monotonic()
        for request_id in ("runs", "held"):
            stream.send(request_id, timeout=int(limit_s * 1e6), **REQUEST, max_tokens=400)
        stream.collect(10**6, until=lambda a: len(a.get("held", a["runs"]).responses) > 3)
        assert other.ask(request_id="held", pause=True).error is None
        answers = stream.collect(2)
        assert time.monotonic() - start >= limit_s
        for request_id in ("runs", "held"):
            assert answers[request_id].finish_reason == "timeout"
            assert answers[request_id].finals.count(True) == 1
        assert stream.is_silent(0.2)
    body = {"text_input": "hello", "max_tokens": 400, "end_id": -1, "timeout": 500_000}
    for responses in both_modes(alive, body):
        text = "".join(response["text_output"] for response in responses)
        assert responses[-1]["finish_reason"] == "timeout"
        assert text
        assert whole.startswith(text)
        assert len(text) < len(whole)
    wait_until(lambda: num_timed_out(alive) == before + 4)


def test_a_request_may_time_out_before_it_starts(other_server: Factory) -> None:
    """One slot, taken; also what its client gave up by itself is never started."""
    server = other_server.start(max_batch_size=1)
    with GrpcStream(server) as stream, GrpcStream(server) as own:
        stream.send("busy", **REQUEST, max_tokens=150, read_rate=100.0)
        wait_until(lambda: metric(server, "tokenflow_active_requests", state="running") == 1)
        own.send("waits", **REQUEST, max_tokens=400, timeout=200_000)
        given_up = GrpcStream(server, stream_timeout=0.3)
        for number in range(5):
            given_up.send(str(number), **REQUEST, max_tokens=400)
        *_, error = given_up.next()
        assert "Deadline Exceeded" in error.message()
        answer = own.collect()["waits"]
        assert (answer.finish_reason, answer.text) == ("timeout", "")
        given_up.close()
        assert stream.collect()["busy"].finish_reason == "length"
        wait_until(lambda: num_active(server) == 0)
    assert metric(server, "tokenflow_requests_total", outcome="cancelled") == 5
    assert num_timed_out(server) == 1
    assert metric(server, "tokenflow_output_tokens_total") == 150


def test_streams_cancelled_at_their_last_response(other_server: Factory) -> None:
    """A server of its own: this Triton may keep count of a cancelled request for ever (see
    docs/operations.md), and then does not unload the model in time."""
    server = other_server.start(exit_timeout_s=1, scripted_step_s=0.002)
    num_workers, num_each, num_tokens = 4, 50, 5
    failures: list[Exception] = []

    def work(seed: int) -> None:
        delays = itertools.cycle([0.0, 0.004, 0.008, 0.011, 0.012, 0.013, 0.014, 0.02])
        try:
            for _, delay in zip(
                range(num_each), itertools.islice(delays, seed, None), strict=False
            ):
                stream = GrpcStream(server)
                stream.send("r", **REQUEST, max_tokens=num_tokens)
                time.sleep(delay)
                stream.close(cancel=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    wait_until(lambda: num_active(server) == 0)
    wait_until(lambda: metric(server, "tokenflow_kv_blocks", state="used") == 0)
    assert metric(server, "tokenflow_requests_total", outcome="failed") == 0
    with GrpcStream(server) as stream:
        answer = stream.ask(**REQUEST, max_tokens=num_tokens)
    assert (len(answer.text), answer.finals.count(True)) == (num_tokens, 1)
    assert "Traceback" not in server.log_path.read_text()
