"""Requests on a real server: gRPC streams, HTTP generate and generate_stream, bad input."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import GrpcStream, events_of, metric, post, wait_until
from triton_backend.launcher import TritonServer
from triton_backend.text import TextTokenizer

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")


def expected_text(model: Path, prompt: str, num_tokens: int) -> str:
    """What the counting script says after a prompt."""
    tokenizer = TextTokenizer.load(model)
    last = tokenizer.encode(prompt)[-1]
    ids = [(last + 1 + index) % tokenizer.vocab_size for index in range(num_tokens)]
    return tokenizer.decode(ids)


def test_grpc_stream(alive: TritonServer, tokenizer_dir: Path) -> None:
    with GrpcStream(alive) as stream:
        answer = stream.ask(
            text_input="hello", max_tokens=60, stream=True, end_id=-1, outputs=OUTPUTS
        )
    assert answer.text == expected_text(tokenizer_dir, "hello", 60)
    assert answer.finals.count(True) == 1
    assert answer.finals[-1]
    index = 0
    for response in answer.responses:
        assert response["token_index"] == index
        index += response["num_output_tokens"]
    assert index == 60
    assert len(answer.responses) > 1, "it streams"
    assert [r.get("finish_reason") for r in answer.responses[:-1]] == [None] * (
        len(answer.responses) - 1
    )
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("empty_final", [True, False])
def test_final_flag_is_on_the_last_data_response(alive: TritonServer, empty_final: bool) -> None:
    with GrpcStream(alive) as stream:
        for stream_flag in (True, False):
            answer = stream.ask(
                text_input="a", max_tokens=3, stream=stream_flag, empty_final=empty_final
            )
            assert answer.finals[-1]
            assert answer.responses[-1]["text_output"]
            assert answer.finals.count(True) == 1
        assert stream.is_silent(0.2)


def test_zero_tokens_is_still_one_response(alive: TritonServer, tokenizer_dir: Path) -> None:
    last = TextTokenizer.load(tokenizer_dir).encode("hello")[-1]
    with GrpcStream(alive) as stream:
        answer = stream.ask(
            text_input="hello", max_tokens=9, stream=True, end_id=last + 1, outputs=OUTPUTS
        )
    assert (len(answer.responses), answer.text, answer.finish_reason) == (1, "", "stop")
    assert answer.responses[0]["num_output_tokens"] == 0


def test_many_requests_on_one_stream_keep_their_ids(alive: TritonServer) -> None:
    lengths = {f"q{number}": 1 + 7 * number for number in range(16)}
    with GrpcStream(alive) as stream:
        for request_id, length in lengths.items():
            stream.send(
                request_id, text_input="x", max_tokens=length, stream=True, end_id=-1,
                outputs=OUTPUTS,
            )  # fmt: skip
        answers = stream.collect(len(lengths))
    for request_id, length in lengths.items():
        responses = answers[request_id].responses
        assert sum(r["num_output_tokens"] for r in responses) == length
        assert [r["token_index"] for r in responses] == sorted(r["token_index"] for r in responses)


def test_an_id_may_be_used_again_at_once_and_twice_at_a_time(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream:
        for _ in range(20):
            assert stream.ask(request_id="t", text_input="a", max_tokens=1).error is None
        for _ in range(2):
            stream.send("dup", text_input="a", max_tokens=20, stream=True, outputs=OUTPUTS)
        answer = stream.collect(2)["dup"]
    assert answer.num_tokens == 40


def test_http_generate(alive: TritonServer, tokenizer_dir: Path) -> None:
    body = {"text_input": "hello", "max_tokens": 20, "end_id": -1, "id": "abc"}
    status, text = post(alive, "generate", body)
    reply = json.loads(text)
    assert status == 200
    assert reply["text_output"] == expected_text(tokenizer_dir, "hello", 20)
    assert (reply["id"], reply["finish_reason"]) == ("abc", "length")
    assert "num_output_tokens" not in reply
    body.update(return_num_output_tokens=True, return_log_probs=True, exclude_input_in_output=False)
    reply = json.loads(post(alive, "generate", body)[1])
    assert reply["num_output_tokens"] == 20
    assert len(reply["output_log_probs"]) == 20
    assert reply["cum_log_probs"] == pytest.approx(sum(reply["output_log_probs"]), rel=1e-5)
    assert reply["text_output"] == "hello" + expected_text(tokenizer_dir, "hello", 20)


def test_http_generate_stream_is_valid_sse_json_and_utf8(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    body = {"text_input": "안녕 😀", "max_tokens": 150, "stream": True, "end_id": -1}
    status, text = post(alive, "generate_stream", body)
    events = events_of(text)
    assert status == 200
    joined = "".join(event["text_output"] for event in events)
    assert joined == expected_text(tokenizer_dir, "안녕 😀", 150)
    assert [e["finish_reason"] for e in events if "finish_reason" in e] == ["length"]
    single = json.loads(post(alive, "generate", {**body, "stream": False})[1])
    assert single["text_output"] == joined


def test_stop_words_end_the_answer_in_both_modes(alive: TritonServer, tokenizer_dir: Path) -> None:
    whole = expected_text(tokenizer_dir, "hello", 40)
    stop = whole[10:13]
    cases: list[Any] = [stop, [stop], ["@@@@", stop, "qq"]]
    for stop_words in cases:
        body = {"text_input": "hello", "max_tokens": 40, "stop_words": stop_words, "end_id": -1}
        reply = json.loads(post(alive, "generate", body)[1])
        assert reply["text_output"] == whole[: whole.index(stop)]
        assert reply["finish_reason"] == "stop"
        events = events_of(post(alive, "generate_stream", {**body, "stream": True})[1])
        assert "".join(event["text_output"] for event in events) == reply["text_output"]
    for empty in ("", [], [""]):
        body = {"text_input": "hello", "max_tokens": 40, "stop_words": empty, "end_id": -1}
        assert json.loads(post(alive, "generate", body)[1])["text_output"] == whole


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4}, "text_input: is required"),
    ({"text_input": "", "max_tokens": 20}, "text_input: must not be empty"),
    ({"text_input": "a" * 600, "max_tokens": 4}, "max_seq_len 512 leaves room for 511"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens: must be in [1, 2147483647], got 0"),
    ({"text_input": ["a", "b"], "max_tokens": [1, 1]}, "batch size must be 1"),
    ({"text_input": "a", "max_tokens": 4, "temperature": -3}, "temperature: "),
    ({"text_input": "a", "max_tokens": 4, "top_p": 100}, "top_p: must be in (0, 1], got 100"),
    ({"text_input": "a", "max_tokens": 4, "top_k": -2}, "top_k: "),
    ({"text_input": "a", "max_tokens": 4, "read_rate": 0}, "read_rate: "),
    ({"text_input": "a", "max_tokens": 4, "priority": 1e9}, "priority: "),
    ({"text_input": "a", "max_tokens": 4, "repetition_penalty": 0}, "repetition_penalty: "),
    ({"text_input": "a", "max_tokens": 4, "min_p": 1.5}, "min_p: must be in [0, 1], got 1.5"),
    ({"text_input": "a", "bad_words": ["x"] * 65}, "bad_words: at most 64"),
    ({"text_input": "a", "embedding_bias_words": "a"}, "needs embedding_bias_weights"),
    ({"text_input": "a", "runtime_top_p_decay": 0.5}, "runtime_top_p_decay: needs a top_p"),
    ({"text_input": "a", "timeout": -5}, "timeout: must be in [0, 1e+15], got -5"),
    ({"text_input": "a", "timeout": "soon"}, "timeout: must be a number, got 'soon'"),
    ({"text_input": "a", "max_tokens": 4, "lora_task_id": 1}, "lora_task_id: "),
    ({"text_input": "a", "max_tokens": 4, "beam_width": 4}, "beam_width: "),
    ({"text_input": "a", "max_tokens": 4, "max_token": 4}, "did you mean max_tokens?"),
    ({"stop": True}, "a request id must be provided"),
    ({"id": "a", "stop": True, "pause": True}, "pause: cannot go with stop in one request"),
    ({"id": "nobody", "pause": True}, "id: no unfinished request has the id 'nobody'"),
    ({"id": "nobody", "resume": True}, "id: no unfinished request has the id 'nobody'"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
def test_bad_input_is_one_clear_error(
    server: TritonServer, body: dict[str, Any], message: str
) -> None:
    for route in ("generate", "generate_stream"):
        status, text = post(server, route, body)
        assert status == 400
        assert message in text
        assert text.count("error") == 1
        assert "Traceback" not in text
        assert "/" not in json.loads(text.removeprefix("data: "))["error"]


def test_malformed_json_and_types_do_no_harm(alive: TritonServer) -> None:
    for raw in (
        b"{", b'{"text_input": "hi \\ud800 there", "max_tokens": 4}',
        b'{"text_input": null, "max_tokens": 4}', b'{"text_input": "a", "max_tokens": "4"}',
        b'{"text_input": "a", "max_tokens": 4, "seed": -1}',
    ):  # fmt: skip
        assert post(alive, "generate", raw)[0] >= 400


def test_wrong_type_or_unknown_input_over_grpc(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream:
        assert "top_p" in (stream.ask(text_input="a", max_tokens=2, top_p=7.0).error or "")
        answer = stream.ask(text_input="a", max_tokens=2, parameters={"max_token": 3})
        assert "did you mean max_tokens?" in (answer.error or "")
        assert stream.ask(text_input="a", max_tokens=2).text


def test_a_long_text_in_an_error_does_not_lose_it(alive: TritonServer) -> None:
    """gRPC carries errors in a header of at most 16 KB."""
    for parameters in ({"é" * 20_000: 1}, {"read_rate": "é" * 20_000}):
        with GrpcStream(alive, headers={"triton_grpc_error": "true"}) as stream:
            stream.send(text_input="a", parameters=parameters)
            *_, error = stream.next()
            assert error.status() == "StatusCode.INVALID_ARGUMENT"
            assert next(iter(parameters))[:9] in error.message()
            assert "characters)" in error.message()


def test_every_fifth_request_is_bad_and_none_are_crossed(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    def one(number: int) -> bool:
        prompt = f"request {number}"
        body = {"text_input": prompt, "max_tokens": 3, "end_id": -1, "id": str(number)}
        if number % 5 == 0:
            body["top_p"] = 7
        status, text = post(alive, "generate", body)
        reply = json.loads(text)
        if number % 5 == 0:
            return status == 400 and "top_p" in reply["error"]
        expected = expected_text(tokenizer_dir, prompt, 3)
        return (reply["id"], reply["text_output"]) == (str(number), expected)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(100)))


@pytest.mark.parametrize("how", ["tensor", "parameter"])
def test_read_rate_reaches_the_scheduler(alive: TritonServer, how: str) -> None:
    """Slow readers with much unread are paused for a newcomer; fast ones would not be."""
    before = metric(alive, "tokenflow_pauses_total", kind="planned")
    rate: dict[str, Any] = (
        {"read_rate": 2.0} if how == "tensor" else {"parameters": {"read_rate": 2}}
    )
    with GrpcStream(alive) as stream:
        for number in range(4):
            stream.send(
                f"slow{number}", text_input="a", max_tokens=150, stream=True, end_id=-1,
                outputs=OUTPUTS, **rate,
            )  # fmt: skip
        wait_until(lambda: metric(alive, "tokenflow_active_requests", state="running") == 4)
        first = stream.collect(10**6, until=lambda a: len(a) == 4)
        stream.collect(10**6, until=lambda a: sum(x.num_tokens for x in a.values()) > 200)
        stream.send("new", text_input="b", max_tokens=20, stream=True, end_id=-1, outputs=OUTPUTS)
        answers = stream.collect(5)
    assert len(first) == 4
    assert metric(alive, "tokenflow_pauses_total", kind="planned") > before
    for request_id, answer in answers.items():
        assert answer.responses[-1]["finish_reason"] == "length", request_id
    last = max(answers[f"slow{n}"].receipt_times[-1] for n in range(4))
    assert answers["new"].receipt_times[0] < last


def test_every_token_comes_once_in_order_over_pauses(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    with GrpcStream(alive) as stream:
        for number in range(10):
            stream.send(
                f"r{number}", text_input="abc", max_tokens=100, stream=True, end_id=-1,
                read_rate=3.0, outputs=OUTPUTS,
            )  # fmt: skip
        answers = stream.collect(10)
    expected = expected_text(tokenizer_dir, "abc", 100)
    for answer in answers.values():
        assert answer.text == expected
        index = 0
        for response in answer.responses:
            assert response["token_index"] == index
            index += response["num_output_tokens"]
        assert index == 100
