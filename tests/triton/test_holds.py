"""Pauses that clients ask for, from their control requests through sender and coordinator.

Everything is real but the model, the threads and the clock (test_ends.py).
"""

from __future__ import annotations

from tests.triton.fakes import FakeChannel
from tests.triton.test_ends import Server, check
from triton_backend.stream import ErrorCode

ANSWER = b"abcdefghijklmnopqrst"
Errors = list[tuple[str, ErrorCode]]


def serve(*request_ids: str, **changes: object) -> tuple[Server, list[FakeChannel]]:
    """A server that holds at most four streams, on which each of these has some tokens."""
    server = Server(ANSWER, **{"max_queue_size": 4, **changes})
    channels = [server.ask(request_id, max_tokens=len(ANSWER)) for request_id in request_ids]
    for _ in range(3):
        server.step()
    return server, channels


def pause_each(server: Server, *request_ids: str) -> list[Errors]:
    """The errors of some pauses, all of which come before the first of them is decided."""
    answers = [server.control(request_id, "pause") for request_id in request_ids]
    server.step()
    server.step()
    assert [answer.num_finals for answer in answers] == [1] * len(answers)
    assert all(answer.sent == ([] if answer.errors else [{}]) for answer in answers)
    return [answer.errors for answer in answers]


def pause(server: Server, request_id: str) -> Errors:
    (errors,) = pause_each(server, request_id)
    return errors


def is_overloaded(errors: Errors) -> bool:
    return [code for _, code in errors] == [ErrorCode.UNAVAILABLE] and all(
        message.startswith("overloaded: ") for message, _ in errors
    )


def expect_whole(server: Server, channels: list[FakeChannel]) -> None:
    server.run()
    for channel in channels:
        check(channel, ANSWER.decode(), len(ANSWER), "length")


def test_the_streams_of_an_id_are_held_all_or_none() -> None:
    server, channels = serve("x", "x", "x", "x", "x")
    assert is_overloaded(pause(server, "x"))
    assert server.coordinator.num_held == 0
    expect_whole(server, channels)


def test_those_that_are_held_already_need_no_further_place() -> None:
    server, channels = serve("x", "x", "x", "y")
    for request_id in ("x", "y"):
        assert not pause(server, request_id)
    assert server.coordinator.num_held == 4
    for request_id in ("x", "y"):
        assert not pause(server, request_id)
    channels.append(server.ask("x", max_tokens=len(ANSWER)))
    server.step()
    assert is_overloaded(pause(server, "x"))
    assert not pause(server, "y")
    server.control("y", "resume")
    server.step()
    assert not pause(server, "x")
    assert server.coordinator.num_held == 4
    server.control("x", "resume")
    expect_whole(server, channels)


def test_pauses_in_a_row_hold_as_many_as_if_each_had_waited_for_the_last() -> None:
    server, channels = serve("x", "x", "y", "y", "y", "z")
    errors = pause_each(server, "x", "y", "z", "x")
    assert [is_overloaded(e) for e in errors] == [False, True, False, False]
    assert [len(e) for e in errors] == [0, 1, 0, 0]
    assert server.coordinator.num_held == 3
    for request_id in ("x", "z"):
        server.control(request_id, "resume")
    expect_whole(server, channels)


def test_a_pause_that_crosses_the_end_of_its_stream_is_not_found() -> None:
    server, (channel,) = serve("x")
    answer = server.control("x", "pause")
    server.sender.turn(max_wait_s=0.0)
    (session,) = server.coordinator.table
    server.cancel(session.handle)
    server.step()
    server.step()
    assert channel.sent[-1]["finish_reason"] == "cancelled"
    ((message, code),) = answer.errors
    assert (message, code) == ("id: no unfinished request has the id 'x'", ErrorCode.NOT_FOUND)


def test_a_stream_that_used_up_its_holds_refuses_a_pause_for_all_of_its_id() -> None:
    server, channels = serve("x", max_hold_s=1.0)
    assert not pause(server, "x")
    server.clock.advance(1.0)  # it goes on, as if it were resumed
    server.step()
    assert server.coordinator.num_held == 0
    channels.append(server.ask("x", max_tokens=len(ANSWER)))
    server.step()
    message = "pause: the request 'x' was held as long as it may be (max_hold_s)"
    assert pause(server, "x") == [(message, ErrorCode.INVALID_ARG)]
    assert server.coordinator.num_held == 0
    expect_whole(server, channels)
