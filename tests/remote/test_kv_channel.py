"""KV events and tiering across the channel: order, bounds, and the engine's end in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.remote.helpers import LIMIT_S, collect, engine, request, tokens, wait_until
from tests.remote.kv_events import hear
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.channel import RequestSnapshot
from tokenflow.executor.kv_api import KVCacheCreatedData, KVCacheEvent, KVCacheRemovedData
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.remote_kv import RemoteKvEvents


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
