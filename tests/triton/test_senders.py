"""The sender thread, without Triton."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton.bench import Bench
from tests.triton.fakes import FakeChannel, event
from tokenflow.types import EndReason
from triton_backend.control import StopRequest
from triton_backend.stream import ErrorCode
from triton_backend.work import Controlled, Refused


def test_tokens_then_final_on_the_last() -> None:
    bench = Bench()
    channel = bench.open(1)
    for item in (event(1, b"a"), event(1, b"b"), event(1, b"c", end=EndReason.LENGTH)):
        bench.sender.post(item)
        bench.turn()
    assert [response["text_output"] for response in channel.sent] == ["a", "b", "c"]
    assert channel.sent[-1]["finish_reason"] == "length"
    assert (channel.num_finals, bench.sender.num_open) == (1, 0)


def test_what_gathered_while_busy_goes_out_as_one_response() -> None:
    bench = Bench()
    one, two = bench.open(1), bench.open(2)
    for text in (b"a", b"b", b"c"):
        bench.sender.post(event(1, text))
        bench.sender.post(event(2, text))
    bench.turn()
    assert [r["text_output"] for r in one.sent] == ["abc"]
    assert [r["num_output_tokens"] for r in two.sent] == [3]


def test_events_may_overtake_the_opening() -> None:
    bench = Bench()
    bench.sender.post(event(1, b"a"))
    bench.turn()
    channel = bench.open(1)
    bench.sender.post(event(1, b"b", end=EndReason.STOP))
    bench.turn()
    assert channel.text == "ab"
    assert channel.num_finals == 1


def test_stop_string_tells_the_runtime_and_drops_what_follows() -> None:
    bench = Bench()
    channel = bench.open(1, stops=("b",))
    bench.sender.post(event(1, b"ab"))
    bench.turn()
    bench.sender.post(event(1, b"c", end=EndReason.LENGTH))
    bench.turn()
    assert bench.runtime.finished == [1]
    assert (channel.text, channel.num_finals) == ("a", 1)
    bench.turn()
    assert not bench.sender._early


def test_error_event_is_a_final_error() -> None:
    bench = Bench()
    channel = bench.open(1)
    bench.sender.post(event(1, end=EndReason.ERROR, error="overloaded", retryable=True))
    bench.turn()
    assert channel.errors == [("overloaded", ErrorCode.UNAVAILABLE)]
    assert channel.num_finals == 1


def test_tokens_that_gathered_with_an_error_go_out_before_it() -> None:
    bench = Bench()
    channel = bench.open(1)
    for item in (event(1, b"a"), event(1, b"b"), event(1, end=EndReason.ERROR, error="lost")):
        bench.sender.post(item)
    bench.turn()
    assert (channel.text, channel.num_finals, bench.sender.num_open) == ("ab", 1, 0)
    assert channel.errors == [("lost", ErrorCode.INTERNAL)]


def test_a_client_that_left_is_cancelled_once_and_gets_one_final() -> None:
    bench = Bench()
    channel = bench.open(1)
    bench.sender.post(event(1, b"a"))
    bench.turn()
    channel.cancelled = True
    bench.clock.advance(0.11)
    bench.turn()
    bench.clock.advance(0.5)
    bench.turn()
    assert bench.runtime.cancelled == [1]
    bench.sender.post(event(1, b"b"))
    bench.sender.post(event(1, end=EndReason.CANCELLED))
    bench.turn()
    assert (channel.text, channel.num_finals, bench.sender.num_open) == ("a", 1, 0)


def test_polling_asks_everybody_once_per_period_and_few_at_a_time() -> None:
    bench = Bench()
    channels = [bench.open(handle) for handle in range(1, 101)]
    bench.turn()
    most = 0
    for _ in range(1000):
        before = sum(channel.num_polls for channel in channels)
        bench.clock.advance(0.001)
        bench.turn()
        most = max(most, sum(channel.num_polls for channel in channels) - before)
    assert most <= 16
    polls = [channel.num_polls for channel in channels]
    assert min(polls) >= 8
    assert max(polls) <= 10


def test_broken_channel_hurts_only_its_own_request() -> None:
    bench = Bench()
    broken, fine = bench.open(1), bench.open(2)
    broken.fail_sends = True
    bench.sender.post(event(1, b"a"))
    bench.sender.post(event(2, b"a", end=EndReason.LENGTH))
    bench.turn()
    assert bench.runtime.cancelled == [1]
    assert (broken.num_finals, fine.num_finals, fine.text) == (1, 1, "a")
    bench.sender.post(event(1, end=EndReason.CANCELLED))
    bench.turn()
    assert broken.num_finals == 1


def test_a_time_limit_ends_the_answer_with_what_there_is() -> None:
    for streaming in (True, False):
        bench = Bench()
        channel = bench.open(1, streaming=streaming)
        bench.sender.post(event(1, b"ab"))
        bench.turn()
        bench.sender.post(event(1, end=EndReason.TIMEOUT))
        bench.turn()
        assert (channel.text, channel.errors, channel.num_finals) == ("ab", [], 1)
        assert channel.sent[-1]["finish_reason"] == "timeout"


def test_shutdown_ends_what_is_open() -> None:
    bench = Bench()
    open_one, done = bench.open(1), bench.open(2)
    bench.sender.post(event(2, b"a", end=EndReason.STOP))
    bench.sender.stop(0.0)
    assert bench.turn()
    assert open_one.errors == [("the server is shutting down", ErrorCode.UNAVAILABLE)]
    assert (open_one.num_finals, done.num_finals, bench.sender.num_open) == (1, 1, 0)


def test_failing_metrics_stop_but_tokens_flow() -> None:
    calls = []

    def on_tick() -> None:
        calls.append(1)
        raise RuntimeError("no metrics")

    bench = Bench(on_tick)
    channel = bench.open(1)
    bench.turn()
    bench.clock.advance(1.0)
    bench.sender.post(event(1, b"a", end=EndReason.STOP))
    bench.turn()
    assert (len(calls), channel.text) == (1, "a")


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["token", "end", "error", "leave", "break", "stop", "turn", "wait"]),
        st.integers(1, 4),
    ),
    max_size=40,
)


@given(_STEPS)
@settings(max_examples=200, deadline=None)
def test_every_request_gets_exactly_one_final(steps: list[tuple[str, int]]) -> None:
    bench = Bench()
    channels = {handle: bench.open(handle, f"id{handle % 2}") for handle in range(1, 5)}
    texts = dict.fromkeys(channels, 0)
    ended: set[int] = set()

    def end(handle: int, reason: EndReason) -> None:
        if handle not in ended:
            ended.add(handle)
            bench.sender.post(event(handle, end=reason, error="e"))

    def token(handle: int) -> None:
        if handle not in ended:
            bench.sender.post(event(handle, bytes([97 + texts[handle] % 26])))
            texts[handle] += 1

    actions: dict[str, Callable[[int], object]] = {
        "token": token,
        "end": lambda handle: end(handle, EndReason.LENGTH),
        "error": lambda handle: end(handle, EndReason.ERROR),
        "leave": lambda handle: setattr(channels[handle], "cancelled", True),
        "break": lambda handle: setattr(channels[handle], "fail_sends", True),
        "stop": lambda handle: bench.sender.post(
            Controlled(FakeChannel(), StopRequest(f"id{handle % 2}"))
        ),
        "wait": lambda handle: bench.clock.advance(0.2),
        "turn": lambda handle: bench.turn(),
    }
    for action, target in steps:
        actions[action](target)
        if action not in ("token", "turn"):
            bench.turn()
        for cancelled in bench.runtime.cancelled:  # the runtime's contract: one more event
            end(cancelled, EndReason.CANCELLED)
    bench.sender.stop(0.0)
    bench.turn()
    for handle, channel in channels.items():
        assert channel.num_finals == 1
        expected = "".join(chr(97 + i % 26) for i in range(texts[handle]))
        assert expected.startswith(channel.text)


def test_answers_that_ended_leave_nothing_behind() -> None:
    """Also when each ends before anybody was polled: memory stays flat over any number of them."""
    bench = Bench()
    streams = []
    for handle in range(1, 201):
        channel = bench.open(handle, f"id{handle}", stops=("b", "cd"))
        streams.append(weakref.ref(channel))
        del channel
        bench.sender.post(event(handle, b"ab"))
        bench.turn()
        bench.sender.post(event(handle, b"c"))  # of a step that ran until the runtime was told
        bench.turn()
    assert bench.runtime.finished == list(range(1, 201))
    assert not any(stream() for stream in streams)
    held = (
        vars(bench.sender)[name] for name in ("_entries", "_handles_of_id", "_early", "_to_poll")
    )
    assert not any(held)


def test_thread_serves_and_stops() -> None:
    bench = Bench()
    bench.sender.start(bench.runtime)
    channel = bench.open(1)
    bench.sender.post(event(1, b"a", end=EndReason.LENGTH))
    deadline = time.monotonic() + 5
    while not channel.num_finals and time.monotonic() < deadline:
        time.sleep(0.005)
    assert channel.text == "a"
    assert bench.sender.stop(5.0)
    assert "tokenflow-sender" not in {thread.name for thread in threading.enumerate()}


def test_refused() -> None:
    bench = Bench()
    channel = FakeChannel()
    bench.sender.post(Refused(channel, "no", ErrorCode.INVALID_ARG))
    bench.turn()
    assert (channel.errors, channel.num_finals) == ([("no", ErrorCode.INVALID_ARG)], 1)
