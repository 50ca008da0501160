"""KV events and tiering across the channel: order, bounds, and the engine's end in the middle."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.remote.engines import stats_of
from tests.remote.helpers import LIMIT_S, collect, engine, request, tokens, wait_until
from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError, EngineError, EngineLostError
from tokenflow.executor.api import Executor, IterationStats, Response
from tokenflow.executor.backpressure import ResponseOutbox
from tokenflow.executor.channel import (
    FrameBuffer,
    Iteration,
    RequestSnapshot,
    decode_from_host,
)
from tokenflow.executor.factory import create_executor, start_engine
from tokenflow.executor.host_kv import HostKv
from tokenflow.executor.kv_api import (
    HOST_LEVEL,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvTierStats,
)
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.remote_kv import RemoteKvEvents
from tokenflow.inflight.scripted_runner import KV_BYTES_PER_TOKEN
from tokenflow.inflight.scripts import expected, script_by_name
from tokenflow.kv_mirror import KvMirror

BLOCK_BYTES = 4 * KV_BYTES_PER_TOKEN
TIERED = ServingConfig(
    engine="scripted",
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=64,
    max_num_tokens=32,
    max_seq_len=48,
    max_batch_size=2,
    kv_cache_host_memory_bytes=8 * BLOCK_BYTES,
    kv_tiering=True,
)

SCRIPT = script_by_name("counting", 256)


def hear(executor: Executor, num: int) -> list[KVCacheEvent]:
    """At least `num` events."""
    manager = executor.get_kv_cache_event_manager()
    assert manager is not None
    events: list[KVCacheEvent] = []

    def enough() -> bool:
        events.extend(manager.get_latest_events(0))
        return len(events) >= num

    wait_until(enough)
    return events


# -- over the wire -------------------------------------------------------------------------------


def test_events_come_with_the_responses_they_explain_and_alone() -> None:
    with engine("with_kv") as executor:
        assert (executor.info.has_kv_events, executor.info.has_kv_tiering) == (True, True)
        created = hear(executor, 1)
        assert created == [KVCacheEvent(0, KVCacheCreatedData([10, 20]))]
        id = executor.enqueue_request(request(5))
        responses = collect(executor, [id])
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        events = manager.get_latest_events(0)
        assert len(events) >= len(responses) >= 1, "the events of a step came after its responses"
        assert [e.event_id for e in events] == list(range(1, len(events) + 1))
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        tiering.offload((7, 8), 3, 9)
        tiering.prefetch([7], None)
        tiering.drop_host((7, 8, 9), 1)
        assert [e.data for e in hear(executor, 3)] == [
            KVCacheRemovedData([1, 3, 9, 7, 8]),
            KVCacheRemovedData([2, 0, 7]),
            KVCacheRemovedData([3, 1, 7, 8, 9]),
        ]


def test_an_engine_without_either_says_so() -> None:
    with engine("counting") as executor:
        assert executor.get_kv_cache_event_manager() is None
        assert executor.get_kv_tiering() is None


def test_events_that_nobody_takes_leave_a_gap_and_are_asked_for_anew() -> None:
    config = ServingConfig(engine="scripted", kv_event_buffer_max_size=4)
    executor = RemoteExecutor(config, factory="tests.remote.engines:with_kv")
    try:
        collect(executor, [executor.enqueue_request(request(20))])
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        tiering.prefetch((5,))
        events: list[KVCacheEvent] = []
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        wait_until(lambda: manager._events[-1].data == KVCacheRemovedData([2, 0, 5]))
        events = manager.get_latest_events(0)
        assert len(events) == 4
        assert [e.event_id for e in events] == list(range(18, 22))
        collect(executor, [executor.enqueue_request(request(1))])
        later = hear(executor, 2)
        collect(executor, [executor.enqueue_request(request(1))])
        later += hear(executor, 1)
        assert [e.event_id for e in later] == list(range(22, 25))
        hashes = [e.data.block_hashes for e in later]
        assert hashes.count([4]) == 1, "once for one gap"
    finally:
        executor.shutdown()


def test_everything_is_asked_for_anew_once_for_each_gap() -> None:
    asked: list[object] = []
    takes_hints = [True]

    def send_hint(message: object) -> bool:
        asked.append(message)
        return takes_hints[0]

    def say(*ids: int) -> None:
        kv.take([KVCacheEvent(i, KVCacheRemovedData([i])) for i in ids])

    kv = RemoteKvEvents(10, send_hint)
    kv.take([KVCacheEvent(0, KVCacheCreatedData([1, 1]))])
    say(1, 2)
    kv.get_latest_events(0)
    assert asked == []
    say(4, 5)  # on the way, or over there
    kv.get_latest_events(0)
    kv.get_latest_events(0)
    assert asked == [RequestSnapshot()]
    say(*range(6, 17))  # one more than waits here
    takes_hints[0] = False
    kv.get_latest_events(0)
    kv.get_latest_events(0)
    takes_hints[0] = True
    kv.get_latest_events(0)
    kv.get_latest_events(0)
    assert len(asked) == 4, "until it can be sent"
    say(18)
    kv.take([KVCacheEvent(19, KVCacheCreatedData([1, 1]))])
    kv.get_latest_events(0)
    assert len(asked) == 4, "told without being asked"


def test_waiting_for_events_ends_with_an_event_the_time_or_the_engine() -> None:
    with engine("with_kv") as executor:
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        assert manager.get_latest_events(None)
        assert manager.get_latest_events(20) == []
        heard: list[list[KVCacheEvent]] = []
        waiting = threading.Thread(target=lambda: heard.append(manager.get_latest_events(None)))
        waiting.start()
        executor.kill("on purpose")
        waiting.join(LIMIT_S)
        assert heard == [[]]


def test_locate_is_answered_and_does_not_stop_the_engine() -> None:
    with engine("with_kv", step_s=0.002) as executor:
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        assert tiering.locate((1, 2, 3), 5).num_tokens == 3
        assert tiering.locate((1, 2, 3), 5).num_device_blocks == 5
        asking = threading.Thread(target=_fails_with, args=(EngineLostError, tiering.locate, (0,)))
        asking.start()  # never comes back over there
        responses = collect(executor, ids := [executor.enqueue_request(request(200))])
        assert tokens(responses, ids[0]) == list(range(200))
        executor.kill("on purpose")
        asking.join(LIMIT_S)
        assert not asking.is_alive()
        with pytest.raises(EngineError):
            tiering.locate((1,))
        tiering.offload((1, 2), 1)  # to nobody


def test_a_question_that_is_not_answered_ends() -> None:
    with engine("with_kv") as executor:
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        tiering._timeout_s = 0.05
        with pytest.raises(EngineError, match="did not answer within"):
            tiering.locate((0,))


def test_a_question_that_fails_over_there_fails_here_and_the_next_one_is_answered() -> None:
    with engine("with_kv") as executor:
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        for _ in range(2):
            with pytest.raises(EngineError, match="not today"):
                tiering.locate((1,))
            assert tiering.locate((1, 2)).num_tokens == 2


def test_hints_are_dropped_before_requests_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with engine("with_kv", max_backlog_bytes=4 << 20) as executor:
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        hear(executor, 1)
        os.kill(executor.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            for _ in range(400):
                tiering.prefetch([1] * 5000)
            assert [r.getMessage() for r in caplog.records] == [
                "hints about KV are left out: the engine does not read its commands fast enough"
            ]
            id = executor.enqueue_request(request(3))
            assert time.monotonic() - start < LIMIT_S
        finally:
            os.kill(executor.pid, signal.SIGCONT)
        assert tokens(collect(executor, [id]), id) == [0, 1, 2]
        tiering.prefetch([2**70])  # no message at all
        tiering.drop_host([9])
        heard: list[KVCacheEvent] = []
        while not heard or heard[-1].data != KVCacheRemovedData([3, 0, 9]):
            heard += hear(executor, 1)
        num_hints = sum(e.data == KVCacheRemovedData([2, 0] + [1] * 5000) for e in heard)
        assert 10 < num_hints < 300
        assert len(caplog.records) == 1


def _fails_with(kind: type[Exception], call: object, *arguments: object) -> None:
    with pytest.raises(kind):
        call(*arguments)  # type: ignore[operator]


# -- messages ------------------------------------------------------------------------------------


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


# -- the embedded engine -------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [False, True], ids=["its own process", "this process"])
def test_hints_move_blocks_of_the_embedded_engine(in_process: bool) -> None:
    executor = create_executor(TIERED) if in_process else start_engine(TIERED)
    try:
        if isinstance(executor, RemoteExecutor):
            assert executor.info.num_host_blocks == 8
            assert executor.info.block_bytes == BLOCK_BYTES
        first = hear(executor, 1)[0]
        assert first.data == KVCacheCreatedData([16, 8])
        whole = request(10)
        _finish(executor, executor.enqueue_request(whole))
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        stored = [e for e in hear(executor, 1) if isinstance(e.data, KVCacheStoredData)]
        all_tokens = [t for e in stored for block in e.data.blocks for t in block.tokens]
        assert all_tokens[:3] == [1, 2, 3]
        tiering.offload(all_tokens, 2)
        _finish(executor, executor.enqueue_request(request(1, first=9)))
        copied = [e for e in hear(executor, 2) if isinstance(e.data, KVCacheUpdatedData)]
        assert [e.data.has_host_copy for e in copied] == [True, True]
        assert tiering.locate(all_tokens).num_copied_blocks == 2
    finally:
        executor.shutdown()


def test_what_the_proxy_dropped_is_known_again() -> None:
    """The events of a long run that nobody took; then the mirror is the engine's tree again."""
    config = dataclasses.replace(TIERED, kv_event_buffer_max_size=60)
    executor = start_engine(config)
    try:
        manager, tiering = executor.get_kv_cache_event_manager(), executor.get_kv_tiering()
        assert manager is not None
        assert tiering is not None
        mirror = KvMirror(config.tokens_per_block)
        mirror.apply(hear(executor, 1))
        for i in range(40):
            _finish(executor, executor.enqueue_request(request(10, first=i)))
        mirror.apply(manager.get_latest_events(0))
        assert not mirror.is_complete

        def is_known() -> bool:
            _finish(executor, executor.enqueue_request(request(10)))
            mirror.apply(manager.get_latest_events(0))
            return mirror.is_complete

        wait_until(is_known)
        assert mirror.num_gaps == 1
        whole = [1, 2, 3, *expected(SCRIPT, [1, 2, 3], 10)[0]]
        assert tiering.locate(whole).num_tokens == mirror.locate(whole[:-1]).num_tokens == 12
    finally:
        executor.shutdown()


def test_at_idle_the_last_statistics_have_nothing_on_its_way() -> None:
    """Though the copies take longer than the engine's process looks after a hint."""
    executor = RemoteExecutor(TIERED, factory="tests.remote.engines:slow_copies")
    try:
        _finish(executor, executor.enqueue_request(request(10)))
        tiering = executor.get_kv_tiering()
        assert tiering is not None
        tiering.offload([1, 2, 3, *expected(SCRIPT, [1, 2, 3], 10)[0]], 2)
        stats: list[IterationStats] = []

        def num_in_transit() -> int:
            stats.extend(executor.get_latest_iteration_stats())
            tiers = stats[-1].kv_tier_stats if stats else None
            return tiers.num_host_in_transit_blocks if tiers is not None else -1

        wait_until(lambda: num_in_transit() == 2)
        wait_until(lambda: num_in_transit() == 0)
        copied = [e for e in hear(executor, 2) if isinstance(e.data, KVCacheUpdatedData)]
        assert [e.data.has_host_copy for e in copied] == [True] * 2
    finally:
        executor.shutdown()


class IdleEngine:
    """Has nothing to say."""

    def get_kv_cache_event_manager(self) -> None:
        return None

    def get_kv_tiering(self) -> None:
        return None


def _stats(num_in_transit: int) -> IterationStats:
    tiers = KvTierStats(
        block_bytes=1,
        num_device_blocks=8,
        num_device_used_blocks=0,
        num_device_cached_blocks=0,
        num_device_in_transit_blocks=0,
        num_host_blocks=8,
        num_host_cached_blocks=0,
        num_host_in_transit_blocks=num_in_transit,
    )
    return msgspec.structs.replace(stats_of(1, 0), kv_tier_stats=tiers)


def test_an_idle_engine_is_looked_at_while_its_copies_run_and_not_longer() -> None:
    kv = HostKv(IdleEngine(), lambda located: None)
    assert not kv.expects_more([])
    assert kv.expects_more([_stats(0), _stats(2)])
    for _ in range(100):
        assert kv.expects_more([])
    assert not kv.expects_more([_stats(2), _stats(0)])
    assert not kv.expects_more([])


def _finish(executor: Executor, id: int) -> None:
    done = False
    while not done:
        done = any(r.request_id == id and r.result.is_final for r in executor.await_responses())


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"kv_cache_host_memory_bytes": BLOCK_BYTES - 1}, f"hold no KV block ({BLOCK_BYTES}"),
        (
            {"kv_cache_host_memory_bytes": 1 << 20, "kv_cache_onboard_blocks": False},
            "kv_cache_onboard_blocks is false",
        ),
        ({"kv_cache_host_memory_bytes": 0}, None),
        ({"kv_cache_host_memory_bytes": 3 * BLOCK_BYTES + 1}, None),
    ],
)
def test_a_host_tier_of_no_use_is_warned_of(
    fields: dict[str, int], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServingConfig(engine="scripted", tokens_per_block=4, **fields)
    with caplog.at_level(logging.WARNING, logger="tokenflow"):
        executor = create_executor(config)
    executor.shutdown()
    warnings = [r.getMessage() for r in caplog.records if "host tier" in r.getMessage()]
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert warning in warnings[0]
        assert "there is no host tier" in warnings[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a host tier"),
        ({"kv_cache_host_memory_bytes": 100}, "one KV block takes"),
        ({"kv_cache_host_memory_bytes": 1 << 20, "kv_event_buffer_max_size": 0}, "only events"),
    ],
)
def test_tiering_without_what_it_needs_is_refused(fields: dict[str, int], message: str) -> None:
    config = ServingConfig(engine="scripted", kv_tiering=True, **fields)
    with pytest.raises(ConfigError, match=message) as caught:
        create_executor(config)
    assert caught.value.key == "kv_tiering"
