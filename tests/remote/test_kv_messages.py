"""KV events as messages: before the responses, within the limit of a frame, each kind of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.remote.helpers import LIMIT_S
from tokenflow.executor.api import Response
from tokenflow.executor.backpressure import ResponseOutbox
from tokenflow.executor.channel import FrameBuffer, Iteration, decode_from_host
from tokenflow.executor.kv_api import (
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_events_over_the_limit_go_in_parts_before_the_responses(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    limit = 4000
    outbox = ResponseOutbox(pair[0], window=100, max_message_bytes=limit)
    events = [KVCacheEvent(i, KVCacheRemovedData([2**60] * 100)) for i in range(7)]
    events.insert(3, KVCacheEvent(99, KVCacheRemovedData([2**60] * 1000)))  # too large by itself
    response = Response(request_id=4, error="x" * 3000)
    pusher = threading.Thread(target=outbox.push, args=([response], [], events))
    pusher.start()
    buffer, messages = FrameBuffer(), list[Iteration]()
    while not any(message.responses for message in messages):
        for payload in buffer.feed(pair[1].recv(1 << 20)):
            assert len(payload) <= limit
            message = decode_from_host(payload)
            assert isinstance(message, Iteration)
            messages.append(message)
    pusher.join(LIMIT_S)
    heard = [event for message in messages for event in message.events]
    assert [event.event_id for event in heard] == list(range(7))
    assert messages[-1].responses == [response]
    assert [message.seq for message in messages] == list(range(1, len(messages) + 1))


def test_every_kind_of_event_survives_the_wire(pair: tuple[socket.socket, socket.socket]) -> None:
    outbox = ResponseOutbox(pair[0], window=100)
    stored = KVCacheStoredBlockData(2**64 - 1, [1, 2], HOST_LEVEL, 60)
    events = [
        KVCacheEvent(0, KVCacheCreatedData([3, 4]), window_size=512),
        KVCacheEvent(1, KVCacheStoredData(None, [stored])),
        KVCacheEvent(2, KVCacheUpdatedData(2**64 - 1, has_host_copy=True)),
    ]
    outbox.push([], [], events)
    (payload,) = FrameBuffer().feed(pair[1].recv(1 << 20))
    message = decode_from_host(payload)
    assert isinstance(message, Iteration)
    assert message.events == events
