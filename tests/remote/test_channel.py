"""The wire: frames, bounds, back-pressure, on sockets but without processes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote.counting_engine import _response
from tests.remote.helpers import LIMIT_S, wait_until
from tokenflow.errors import EngineError
from tokenflow.executor.api import FinishReason, Request, Response, SamplingConfig
from tokenflow.executor.backpressure import CommandSender, ResponseOutbox
from tokenflow.executor.channel import (
    MAX_MESSAGE_BYTES,
    Ack,
    Cancel,
    Enqueue,
    Failed,
    FrameBuffer,
    FromHost,
    Iteration,
    decode_from_host,
    decode_to_host,
    encode,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _token(request_id: int, token: int = 0) -> Response:
    return _response(request_id, [token], FinishReason.NOT_FINISHED)


class _Peer:
    """The far end of an outbox."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._messages: list[FromHost] = []

    def receive(self) -> list[Iteration]:
        """Everything that is there now."""
        self._socket.setblocking(False)
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                break
            self._messages += [decode_from_host(p) for p in self._frames.feed(data)]
        result = [m for m in self._messages if isinstance(m, Iteration)]
        self._messages.clear()
        return result


# -- frames --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2**40), max_size=12),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_frames_survive_any_cut_of_the_stream(seqs: list[int], cuts: list[int]) -> None:
    stream = b"".join(encode(Ack(seq)) for seq in seqs)
    buffer, received, position, turn = FrameBuffer(), [], 0, 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        received += buffer.feed(stream[position : position + step])
        position += step
        turn += 1
    assert [decode_to_host(payload) for payload in received] == [Ack(seq) for seq in seqs]


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_garbage_is_no_other_error(data: bytes) -> None:
    for decode in (decode_to_host, decode_from_host):
        with contextlib.suppress(EngineError):
            decode(data)


def test_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(EngineError, match=str(MAX_MESSAGE_BYTES)):
        FrameBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


def test_message_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(EngineError, match="bytes is over the channel's limit of 1000"):
        encode(Failed("x" * 1000), max_bytes=1000)
    encode(Failed("x" * 900), max_bytes=1000)


def test_request_crosses_unchanged() -> None:
    request = Request(
        input_token_ids=(1, 2, 3),
        max_tokens=7,
        end_id=-1,
        stop_words=((1, 2), (3,)),
        sampling_config=SamplingConfig(seed=2**64 - 1, temperature=0.5, min_tokens=3),
        priority=0.25,
        client_id=9,
        cache_salt_id=4,
    )
    payload = encode(Enqueue([5], [request]))[4:]
    assert decode_to_host(payload) == Enqueue([5], [request])


def test_number_that_the_wire_does_not_hold_is_an_error() -> None:
    request = Request(input_token_ids=(1,), max_tokens=2**70)
    with pytest.raises(EngineError, match="cannot be sent"):
        encode(Enqueue([1], [request]))


# -- proxy to host -------------------------------------------------------------------------------


def test_sender_buffers_without_blocking_keeps_order_and_refuses_beyond_its_bound(
    pair: Pair,
) -> None:
    ours, theirs = pair
    woken = threading.Event()
    sender = CommandSender(ours, woken.set, max_backlog_bytes=200_000)
    frame = encode(Enqueue([1], [Request(input_token_ids=tuple(range(5000)), max_tokens=1)]))
    num_sent = 0
    while sender.send(frame, bounded=True):
        num_sent += 1
        assert num_sent < 1000
    assert woken.is_set()
    assert sender.wants_write
    assert sender.send(encode(Cancel(77)), bounded=False), "a cancel is always taken"

    buffer, payloads = FrameBuffer(), []
    while sender.wants_write:
        payloads += buffer.feed(theirs.recv(1 << 20))
        sender.flush()
    theirs.setblocking(False)
    try:
        while True:
            payloads += buffer.feed(theirs.recv(1 << 20))
    except BlockingIOError:
        pass
    assert payloads[:-1] == [frame[4:]] * num_sent
    assert decode_to_host(payloads[-1]) == Cancel(77)


def test_sender_to_nobody_drops_silently(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    sender = CommandSender(ours, lambda: None, max_backlog_bytes=10)
    assert all(sender.send(encode(Ack(1)), bounded=True) for _ in range(100))
    sender.close()
    assert sender.send(encode(Ack(1)), bounded=True)
    assert not sender.wants_write


# -- host to proxy -------------------------------------------------------------------------------


def test_push_waits_for_an_acknowledgement_and_the_gate_closes(pair: Pair) -> None:
    outbox, peer = ResponseOutbox(pair[0], window=2), _Peer(pair[1])
    outbox.push([_token(1)], [])
    outbox.push([_token(2)], [])
    stepped, pushed = threading.Event(), threading.Event()

    def engine() -> None:
        outbox.wait_open()
        stepped.set()

    def pusher() -> None:
        outbox.push([_token(3)], [])
        pushed.set()

    threads = [threading.Thread(target=engine), threading.Thread(target=pusher)]
    for thread in threads:
        thread.start()
    assert not pushed.wait(0.05)
    assert not stepped.is_set()
    assert [message.seq for message in peer.receive()] == [1, 2]
    outbox.acknowledge(2)
    for thread in threads:
        thread.join(LIMIT_S)
    assert stepped.is_set()
    assert [(m.seq, m.responses[0].request_id) for m in peer.receive()] == [(3, 3)]


def test_gate_closes_when_nobody_pulls(pair: Pair) -> None:
    outbox = ResponseOutbox(pair[0], window=2)
    num_steps = 0
    closed = threading.Event()

    def engine() -> None:
        nonlocal num_steps
        while not closed.is_set():
            outbox.wait_open()
            num_steps += 1

    thread = threading.Thread(target=engine)
    thread.start()
    for num_pulls in (1, 2):
        wait_until(lambda limit=16 * num_pulls: num_steps >= limit)
        time.sleep(0.05)
        assert num_steps == 16 * num_pulls, "it went on without a pull"
        if num_pulls == 1:
            outbox.note_pull()
    closed.set()
    outbox.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_post_never_waits_and_goes_with_the_next_message(pair: Pair) -> None:
    outbox, peer = ResponseOutbox(pair[0], window=1), _Peer(pair[1])
    for id in (1, 2, 3):
        outbox.post(_token(id))
    assert [[r.request_id for r in m.responses] for m in peer.receive()] == [[1]]
    outbox.acknowledge(1)
    assert [[r.request_id for r in m.responses] for m in peer.receive()] == [[2, 3]]


def test_acknowledgements_may_overtake_each_other(pair: Pair) -> None:
    outbox = ResponseOutbox(pair[0], window=2)
    outbox.push([_token(1)], [])
    outbox.push([_token(2)], [])
    outbox.acknowledge(2)
    outbox.acknowledge(1)
    outbox.wait_open()
    with pytest.raises(EngineError, match="3 acknowledged, 2 sent"):
        outbox.acknowledge(3)


def test_close_opens_everything_and_drops(pair: Pair) -> None:
    outbox, peer = ResponseOutbox(pair[0], window=1), _Peer(pair[1])
    outbox.push([_token(1)], [])
    waiting = threading.Thread(target=outbox.push, args=([_token(2)], []))
    waiting.start()
    outbox.close()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    outbox.wait_open()
    outbox.push([_token(3)], [])
    assert [m.seq for m in peer.receive()] == [1]


def test_batch_over_the_limit_goes_in_parts_and_a_lone_monster_becomes_an_error(
    pair: Pair,
) -> None:
    limit = 10_000
    outbox = ResponseOutbox(pair[0], window=100, max_message_bytes=limit)
    big = "x" * (limit * 2 // 5)
    batch = [
        Response(request_id=1, error=big),
        Response(request_id=2, error=big),
        Response(request_id=3, error=big),
        Response(request_id=4, client_id=8, error="x" * limit),
        _token(5),
    ]
    pusher = threading.Thread(target=outbox.push, args=(batch, []))
    pusher.start()
    buffer, responses = FrameBuffer(), []
    while len(responses) < len(batch):
        for payload in buffer.feed(pair[1].recv(1 << 20)):
            assert len(payload) <= limit
            message = decode_from_host(payload)
            assert isinstance(message, Iteration)
            responses += message.responses
    pusher.join(LIMIT_S)
    assert [r.request_id for r in responses] == [1, 2, 3, 4, 5]
    assert responses[:3] == batch[:3]
    assert responses[3].client_id == 8
    assert "over the channel's limit" in responses[3].error_msg
