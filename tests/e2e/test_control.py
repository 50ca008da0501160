"""Clients that stop, pause and resume their streams on a real server, and the ids they use."""

from __future__ import annotations

import json
import queue
import time
import uuid
from pathlib import Path
from typing import Any

from tests.e2e.clients import Answer, GrpcStream, metric, num_active, post, wait_until
from tests.e2e.conftest import Factory
from tests.e2e.test_requests import expected_text
from triton_backend.launcher import TritonServer

OUTPUTS = ("text_output", "num_output_tokens", "token_index", "finish_reason")
REQUEST: dict[str, Any] = {"text_input": "hello", "stream": True, "end_id": -1, "outputs": OUTPUTS}
LONG = {**REQUEST, "max_tokens": 400}
NO_QUEUE = 24
"""Requests at once that the session's server takes without refusing one."""


def read_until_silent(stream: GrpcStream, answer: Answer, seconds: float = 0.25) -> None:
    """Add to `answer` what comes until nothing does for a while."""
    while True:
        try:
            _, when, outputs, final, error = stream.next(seconds)
        except queue.Empty:
            return
        assert error is None
        answer.responses.append(outputs)
        answer.receipt_times.append(when)
        answer.finals.append(final)


def started(stream: GrpcStream, request_id: str, count: int = 5) -> Answer:
    """The answer of the only request on `stream` once it has some responses."""
    answers = stream.collect(10**6, until=lambda a: len(a[request_id].responses) >= count)
    return answers[request_id]


def check_whole(answer: Answer, text: str, length: int) -> None:
    """Every token once, in order, and one end."""
    index = 0
    for response in answer.responses:
        assert response["token_index"] == index
        index += response["num_output_tokens"]
    assert (answer.text, index) == (text, length)
    assert answer.finals == [False] * (len(answer.finals) - 1) + [True]
    assert answer.finish_reason == "length"


def num_resumes(server: TritonServer) -> float:
    kinds = ("cache", "recompute")
    return sum(metric(server, "tokenflow_resumes_total", **{"from": kind}) for kind in kinds)


def test_pause_holds_a_stream_until_it_is_resumed(alive: TritonServer, tokenizer_dir: Path) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("job-7", **{**REQUEST, "max_tokens": 200})
        answer = started(stream, "job-7")
        for _ in range(5):
            assert other.ask(request_id="job-7", pause=True).error is None
        wait_until(lambda: metric(alive, "tokenflow_active_requests", state="paused") == 1)
        assert metric(alive, "tokenflow_held_requests") == 1
        read_until_silent(stream, answer)
        paused_at = answer.num_tokens
        assert paused_at < 200
        assert stream.is_silent(0.3)
        for _ in range(5):
            assert other.ask(request_id="job-7", resume=True).error is None
        assert metric(alive, "tokenflow_held_requests") <= 1
        rest = stream.collect()["job-7"]
        assert len(rest.responses) > 1, "it streams again"
        for name in ("responses", "receipt_times", "finals"):
            getattr(answer, name).extend(getattr(rest, name))
        # Over: nobody to pause.
        assert "'job-7'" in (other.ask(request_id="job-7", pause=True).error or "")
    check_whole(answer, expected_text(tokenizer_dir, "hello", 200), 200)


def test_a_held_stream_keeps_no_other_from_running(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("held", **LONG)
        started(stream, "held")
        assert other.ask(request_id="held", pause=True).error is None
        for number in range(8):
            other.send(str(number), **{**REQUEST, "max_tokens": 5})
        assert len(other.collect(8)) == 8
        assert other.ask(request_id="held", stop=True).error is None
        assert stream.collect()["held"].finish_reason == "cancelled"


def test_hundreds_of_pauses_and_resumes_change_nothing(
    alive: TritonServer, tokenizer_dir: Path
) -> None:
    before = num_resumes(alive)
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("x", **LONG)
        answer = started(stream, "x")
        num_cycles = 0
        while num_cycles < 200:
            pause = other.ask(request_id="x", pause=True)
            resume = other.ask(request_id="x", resume=True)
            assert (pause.error, resume.error) == (None, None), num_cycles
            num_cycles += 1
        rest = stream.collect()["x"]
    answer.responses += rest.responses
    answer.finals += rest.finals
    check_whole(answer, expected_text(tokenizer_dir, "hello", 400), 400)
    assert num_resumes(alive) >= before + 5


def test_control_answers_say_what_is_wrong(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream:
        decaying = {**LONG, "top_p": 0.9, "runtime_top_p_decay": 0.5}
        stream.send("decays", **decaying)
        started(stream, "decays")
        with GrpcStream(alive) as other:
            answer = other.ask(request_id="decays", pause=True)
            assert answer.error is not None
            assert "pause: the request 'decays' can never be paused: top_p decay" in answer.error
            assert other.ask(request_id="decays", resume=True).error is None
            assert "cannot go with" in (
                other.ask(request_id="decays", resume=True, stop=True).error or ""
            )
            assert other.ask(request_id="decays", stop=True).error is None
        assert stream.collect()["decays"].finish_reason == "cancelled"
    for inputs, code in (
        ({"request_id": "nobody", "pause": True}, "NOT_FOUND"),
        ({"request_id": "nobody", "resume": True}, "NOT_FOUND"),
        ({"pause": True}, "INVALID_ARGUMENT"),
    ):
        with GrpcStream(alive, headers={"triton_grpc_error": "true"}) as other:
            other.send(inputs.pop("request_id", ""), **inputs)
            *_, error = other.next()
            assert error.status() == f"StatusCode.{code}"


def test_control_over_http(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream:
        stream.send("h", **LONG)
        answer = started(stream, "h")
        for action in ("pause", "resume", "pause", "stop"):
            status, text = post(alive, "generate", {"id": "h", action: True})
            assert (status, json.loads(text).get("error")) == (200, None)
        read_until_silent(stream, answer)
        assert answer.finish_reason == "cancelled"
    status, text = post(alive, "generate", {"id": "h", "pause": True})
    assert (status, "no unfinished request has the id 'h'" in text) == (400, True)


def test_a_running_stream_that_is_stopped_twice_ends_once(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        stream.send("twice", **LONG)
        started(stream, "twice")
        for _ in range(2):
            other.send("twice", stop=True)
        assert other.collect(2)["twice"].error is None
        answer = stream.collect()["twice"]
        assert answer.finish_reason == "cancelled"
        assert stream.is_silent(0.2)


def test_a_stopped_stream_ends_at_once_and_closing_it_waits_for_nothing(
    alive: TritonServer,
) -> None:
    """Stopped on its own connection, while it streams."""
    stream = GrpcStream(alive)
    stream.send("own", **LONG)
    answer = started(stream, "own")
    stream.send("own", stop=True)
    read_until_silent(stream, answer)
    start = time.monotonic()
    stream.close()
    assert answer.finish_reason == "cancelled"
    assert answer.finals.count(True) == 2  # of the stream and of the stop
    assert answer.num_tokens < 200
    assert time.monotonic() - start < 2.0


def test_stop_with_log_probs_again_and_again(alive: TritonServer) -> None:
    outputs = (*OUTPUTS, "output_log_probs", "cum_log_probs")
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        for start in range(0, 50, 10):
            ids = [str(number) for number in range(start, start + 10)]
            for request_id in ids:
                stream.send(
                    request_id, **{**LONG, "max_tokens": 200, "outputs": outputs},
                    return_log_probs=True,
                )  # fmt: skip
            answers: dict[str, Answer] = {}
            stopped: set[str] = set()
            while sum(any(a.finals) for a in answers.values()) < len(ids):
                request_id, _, values, final, error = stream.next()
                assert error is None
                answer = answers.setdefault(request_id, Answer())
                answer.responses.append(values)
                answer.finals.append(final)
                if answer.num_tokens >= 5 and request_id not in stopped:
                    stopped.add(request_id)
                    other.send(request_id, stop=True)
            assert all(a.error is None for a in other.collect(len(ids)).values())
            for answer in answers.values():
                assert answer.finish_reason == "cancelled"
                log_probs = [p for r in answer.responses for p in r.get("output_log_probs", [])]
                assert len(log_probs) == answer.num_tokens < 200


def test_a_stop_for_every_stream_that_has_ended_is_no_error(alive: TritonServer) -> None:
    seen = len(alive.log_path.read_text())
    with GrpcStream(alive) as stream:
        for number in range(100):
            request_id = f"done{number}"
            assert stream.ask(request_id=request_id, text_input="a", max_tokens=1).error is None
            assert stream.ask(request_id=request_id, stop=True).error is None
    lines = alive.log_path.read_text()[seen:].splitlines()
    assert not [line for line in lines if line.startswith("E") or " ERROR " in line]


def test_a_stop_in_the_last_step_leaves_one_end_and_no_block(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        reasons: list[str | None] = []
        for start in range(0, 200, NO_QUEUE):
            ids = [str(number) for number in range(start, min(200, start + NO_QUEUE))]
            for request_id in ids:
                stream.send(request_id, **{**REQUEST, "max_tokens": 8})
            answers: dict[str, Answer] = {}
            num_stops = num_ends = 0
            while num_ends < len(ids):
                request_id, _, values, final, error = stream.next()
                assert error is None
                answer = answers.setdefault(request_id, Answer())
                answer.responses.append(values)
                num_ends += final
                if answer.num_tokens == 7 and not final:
                    other.send(request_id, stop=True)
                    num_stops += 1
            if num_stops:
                other.collect(num_stops)
            reasons += [answer.finish_reason for answer in answers.values()]
        assert stream.is_silent(0.2)
    assert len(reasons) == 200
    assert set(reasons) <= {"cancelled", "length"}
    wait_until(lambda: metric(alive, "tokenflow_kv_blocks", state="used") == 0)


def test_refused_and_stopped_requests_take_no_room(alive: TritonServer) -> None:
    with GrpcStream(alive) as stream:
        for start in range(0, 96, 24):
            ids = [str(number) for number in range(start, start + 24)]
            for request_id in ids:
                kind = int(request_id) % 3
                bad = {"top_p": 7.0} if kind == 0 else {}
                stream.send(request_id, **{**REQUEST, "max_tokens": 200 if kind == 1 else 2, **bad})
            for request_id in ids[1::3]:  # on the same stream: it cannot overtake
                stream.send(request_id, stop=True)
            stream.collect(len(ids) + len(ids[1::3]))
        wait_until(lambda: num_active(alive) == 0)
        for number in range(36):  # as many as may run and wait
            stream.send(str(number), **{**REQUEST, "max_tokens": 2})
        answers = stream.collect(36)
        assert {answer.error for answer in answers.values()} == {None}


def test_two_streams_with_one_id_run_apart(alive: TritonServer, tokenizer_dir: Path) -> None:
    with GrpcStream(alive) as one, GrpcStream(alive) as two:
        one.send("dup", **{**REQUEST, "max_tokens": 60})
        first = started(one, "dup")
        two.send("dup", **{**REQUEST, "text_input": "world!", "max_tokens": 40})
        second = two.collect()["dup"]
        rest = one.collect()["dup"]
    first.responses += rest.responses
    first.finals += rest.finals
    check_whole(first, expected_text(tokenizer_dir, "hello", 60), 60)
    check_whole(second, expected_text(tokenizer_dir, "world!", 40), 40)
    for state in ("running", "waiting", "paused"):
        assert metric(alive, "tokenflow_active_requests", state=state) >= 0


def test_ids_are_the_clients_own_text(alive: TritonServer) -> None:
    """Neither numbers nor hashes of it; the empty one is one, too."""
    ids = [*(uuid.uuid4().hex for _ in range(8)), "1", "01", "1 ", "x" * 4096, "é", ""]
    with GrpcStream(alive) as stream, GrpcStream(alive) as other:
        for request_id in ids:
            stream.send(request_id, **{**REQUEST, "max_tokens": 30})
        wait_until(lambda: num_active(alive) == len(ids))
        for request_id in ("1 ", "x" * 4096):
            other.send(request_id, stop=True)
            assert other.collect()[request_id].error is None
        answers = stream.collect(len(ids))
    assert set(answers) == set(ids)
    stopped = {i for i, answer in answers.items() if answer.finish_reason == "cancelled"}
    assert stopped == {"1 ", "x" * 4096}
    assert all(answers[i].num_tokens == 30 for i in ids if i not in stopped)


def test_the_streams_of_an_id_are_paused_all_or_none(other_server: Factory) -> None:
    """At most four may be held: three are, the other three go on."""
    server = other_server.start(max_queue_size=4, max_batch_size=8, scripted_step_s=0.05)
    with GrpcStream(server) as stream, GrpcStream(server) as other:
        for count, request_id in enumerate(("a", "a", "a", "b", "b", "b"), start=1):
            stream.send(request_id, **LONG)
            wait_until(
                lambda n=count: metric(server, "tokenflow_active_requests", state="running") == n
            )
        for _ in range(3):
            assert other.ask(request_id="a", pause=True).error is None
            assert "overloaded: " in (other.ask(request_id="b", pause=True).error or "")
            wait_until(lambda: metric(server, "tokenflow_held_requests") == 3)
        assert other.ask(request_id="a", resume=True).error is None
        assert other.ask(request_id="b", pause=True).error is None
        for request_id in ("a", "b"):
            assert other.ask(request_id=request_id, stop=True).error is None
        answers = stream.collect(6)
        assert [answer.finish_reason for answer in answers.values()] == ["cancelled"] * 2
