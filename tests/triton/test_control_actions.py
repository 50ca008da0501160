"""Control requests at the sender: whom they reach, and when the answer is no."""

from __future__ import annotations

import pytest

from tests.triton.bench import Bench
from tests.triton.fakes import FakeChannel, event
from tokenflow.holds import HoldRefusal
from tokenflow.types import EndReason
from triton_backend.control import (
    Acknowledgement,
    ControlRequest,
    PauseRequest,
    ResumeRequest,
    StopRequest,
)
from triton_backend.stream import ErrorCode
from triton_backend.work import Controlled


def test_control_requests_reach_all_streams_of_the_id_and_are_answered() -> None:
    bench = Bench()
    channels = [bench.open(1, "x"), bench.open(2, "y"), bench.open(3, "x")]
    stop, ack, unknown = FakeChannel(), FakeChannel(), FakeChannel()
    bench.sender.post(Controlled(ack, Acknowledgement("y", 5)))
    bench.sender.post(Controlled(stop, StopRequest("x")))
    bench.sender.post(Controlled(unknown, StopRequest("z")))
    bench.turn()
    bench.turn()  # what was decided
    assert sorted(bench.runtime.cancelled) == [1, 3]
    assert bench.runtime.acknowledged == [(2, 5)]
    for answer in (stop, ack, unknown):
        assert (answer.sent, answer.num_finals) == ([{}], 1)
    bench.sender.post(event(1, end=EndReason.CANCELLED))
    bench.turn()
    assert channels[0].sent[-1]["finish_reason"] == "cancelled"
    late = FakeChannel()
    bench.sender.post(Controlled(late, StopRequest("x")))
    bench.turn()
    assert sorted(bench.runtime.cancelled) == [1, 3, 3]


def ask_control(bench: Bench, control: ControlRequest) -> list[tuple[str, ErrorCode]]:
    """The errors that the control request was answered with; none is a success."""
    answer = FakeChannel()
    bench.sender.post(Controlled(answer, control))
    bench.turn()
    bench.turn()  # what was decided
    assert answer.num_finals == 1
    assert answer.sent == ([] if answer.errors else [{}])
    return answer.errors


def test_pause_and_resume_reach_all_streams_of_the_id_as_often_as_asked() -> None:
    bench = Bench()
    for handle, request_id in ((1, "x"), (2, "y"), (3, "x")):
        bench.open(handle, request_id)
    for _ in range(5):
        assert not ask_control(bench, PauseRequest("x"))
    for _ in range(2):
        assert not ask_control(bench, ResumeRequest("x"))
    assert bench.runtime.paused == [1, 3] * 5
    assert bench.runtime.resumed == [1, 3] * 2


def test_pause_and_resume_of_an_unknown_id_are_not_found() -> None:
    bench = Bench()
    bench.open(1, "job-7")
    for control in (PauseRequest("job-8"), ResumeRequest("job-8"), PauseRequest("")):
        ((message, code),) = ask_control(bench, control)
        assert code is ErrorCode.NOT_FOUND
        assert message == f"id: no unfinished request has the id {control.request_id!r}"
    bench.sender.post(event(1, b"a", end=EndReason.STOP))
    bench.turn()
    ((_, code),) = ask_control(bench, PauseRequest("job-7"))
    assert code is ErrorCode.NOT_FOUND
    assert not ask_control(bench, StopRequest("job-7"))
    runtime = bench.runtime
    assert (runtime.paused, runtime.resumed, runtime.cancelled) == ([], [], [])


def test_what_can_never_be_paused_is_refused_with_the_reason_and_all_or_none_are() -> None:
    bench = Bench()
    bench.runtime.unpausable = 7
    bench.open(1, "x")
    bench.open(2, "x", max_tokens=7)
    ((message, code),) = ask_control(bench, PauseRequest("x"))
    assert (code, bench.runtime.paused) == (ErrorCode.INVALID_ARG, [])
    assert message == "pause: the request 'x' can never be paused: a kind"
    assert not ask_control(bench, ResumeRequest("x"))


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        (HoldRefusal.USED_UP, ErrorCode.INVALID_ARG, "pause: the request 'x' was held as long as"),
        (HoldRefusal.TOO_MANY, ErrorCode.UNAVAILABLE, "overloaded: no more streams may be held at"),
        (HoldRefusal.ENDED, ErrorCode.NOT_FOUND, "id: no unfinished request has the id 'x'"),
    ],
)
def test_what_the_runtime_refuses_is_an_error_of_its_kind(
    refusal: HoldRefusal, code: ErrorCode, message: str
) -> None:
    bench = Bench()
    bench.runtime.refusal = refusal
    bench.open(1, "x")
    ((told, kind),) = ask_control(bench, PauseRequest("x"))
    assert kind is code
    assert told.startswith(message)
    assert not ask_control(bench, ResumeRequest("x"))


def test_a_pause_that_nobody_decides_on_is_answered_at_the_shutdown() -> None:
    bench = Bench()
    bench.runtime.decides = False
    bench.open(1, "x")
    pauses = [FakeChannel(), FakeChannel()]
    for channel in pauses:
        bench.sender.post(Controlled(channel, PauseRequest("x")))
    bench.turn()
    assert [channel.num_finals for channel in pauses] == [0, 0]
    bench.runtime.undecided[0](None)
    bench.turn()
    assert (pauses[0].sent, pauses[1].num_finals) == ([{}], 0)
    bench.sender.stop(0.0)
    bench.turn()
    bench.runtime.undecided[1](None)  # too late
    assert pauses[1].errors == [("the server is shutting down", ErrorCode.UNAVAILABLE)]
    assert [channel.num_finals for channel in pauses] == [1, 1]


def test_the_stream_of_a_client_that_left_is_not_found() -> None:
    bench = Bench()
    channel = bench.open(1, "x")
    bench.turn()
    channel.cancelled = True
    bench.clock.advance(1.0)
    bench.turn()
    assert bench.runtime.cancelled == [1]
    ((_, code),) = ask_control(bench, PauseRequest("x"))
    assert code is ErrorCode.NOT_FOUND


def test_ids_are_taken_as_they_are() -> None:
    ids = ["1", "01", "1 ", "x" * 4096, "\u00e9", "e\u0301"]
    bench = Bench()
    for handle, request_id in enumerate(ids, start=1):
        bench.open(handle, request_id)
    for handle, request_id in enumerate(ids, start=1):
        assert not ask_control(bench, PauseRequest(request_id))
        assert bench.runtime.paused == list(range(1, handle + 1))
