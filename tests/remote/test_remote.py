"""The executor surface through a real process: requests, ends, bounds."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from tests.remote.helpers import (
    LIMIT_S,
    collect,
    engine,
    is_running,
    request,
    tokens,
    wait_until,
)
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError
from tokenflow.executor.api import Executor, FinishReason, Request
from tokenflow.executor.remote import RemoteExecutor

SHORT = timedelta(milliseconds=50)


def test_streams_requests_and_statistics() -> None:
    progress: list[tuple[float, str]] = []
    with engine(on_progress=lambda fraction, text: progress.append((fraction, text))) as executor:
        assert isinstance(executor, Executor)
        assert executor.info.vocab_size == 1000
        first = executor.enqueue_request(request(5, client_id=11))
        second, third = executor.enqueue_requests([request(3), request(1)])
        responses = collect(executor, [first, second, third])
        assert [tokens(responses, id) for id in (first, second, third)] == [
            [0, 1, 2, 3, 4],
            [0, 1, 2],
            [0],
        ]
        assert {r.client_id for r in responses if r.request_id == first} == {11}
        last = [r for r in responses if r.request_id == first][-1]
        assert last.result.finish_reasons == [FinishReason.LENGTH]
        assert last.result.log_probs == [[-2.0]]
        assert executor.get_num_responses_ready() == 0
        stats = []
        deadline = time.monotonic() + LIMIT_S
        while not stats or stats[-1].num_active_requests:
            assert time.monotonic() < deadline
            stats += executor.get_latest_iteration_stats()
        assert [s.iter for s in stats] == list(range(1, len(stats) + 1))
        assert executor.get_latest_iteration_stats() == []
        assert executor.get_kv_cache_event_manager() is None
    assert progress == [(0.5, "counting up"), (1.0, "counted")]


def test_a_thousand_ids_are_unique_and_each_stream_is_its_own() -> None:
    with engine() as executor:
        ids: list[int] = []
        lock = threading.Lock()

        def enqueue(offset: int) -> None:
            mine = [executor.enqueue_request(request(1 + (offset + i) % 7)) for i in range(250)]
            with lock:
                ids.extend(mine)
                lengths.update({id: 1 + (offset + i) % 7 for i, id in enumerate(mine)})

        lengths: dict[int, int] = {}
        threads = [threading.Thread(target=enqueue, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        responses = collect(executor, ids)
        assert len(set(ids)) == 1000
        by_id: dict[int, list[int]] = {id: [] for id in ids}
        for response in responses:
            by_id[response.request_id] += response.result.output_token_ids[0]
        assert by_id == {id: list(range(lengths[id])) for id in ids}
        finals = [r.request_id for r in responses if r.result.is_final]
        assert sorted(finals) == sorted(ids)


def test_cancel_then_enqueue_arrive_in_this_order() -> None:
    with engine(step_s=0.05) as executor:
        running = executor.enqueue_request(request(1000))
        executor.await_responses()
        executor.cancel_request(running)
        executor.cancel_request(running)
        successor = executor.enqueue_request(request(2))
        responses = collect(executor, [running, successor])
        order = [r.request_id for r in responses if r.request_id == successor or r.result.is_final]
        assert order == [running, successor, successor]
        cancelled = next(r for r in responses if r.request_id == running and r.result.is_final)
        assert cancelled.result.finish_reasons == [FinishReason.CANCELLED]
        assert cancelled.result.output_token_ids == [[]]


def test_cancel_of_unknown_or_finished_ids_does_nothing() -> None:
    with engine() as executor:
        id = executor.enqueue_request(request(1))
        collect(executor, [id])
        executor.cancel_request(id)
        executor.cancel_request(12345)
        assert executor.await_responses(SHORT) == []
        other = executor.enqueue_request(request(2))
        assert tokens(collect(executor, [other]), other) == [0, 1]


def test_await_times_out_and_idle_engine_says_nothing() -> None:
    with engine() as executor:
        start = time.monotonic()
        assert executor.await_responses(timedelta(seconds=0.1)) == []
        assert 0.09 < time.monotonic() - start < LIMIT_S
        assert executor.await_responses(timedelta(0)) == []
        assert executor.get_latest_iteration_stats() == []


def test_refusal_by_the_engine_is_an_error_response() -> None:
    with engine("refusing") as executor:
        ids = executor.enqueue_requests([request(client_id=4), request(client_id=5)])
        responses = collect(executor, ids)
        assert [(r.request_id, r.client_id) for r in responses] == [(ids[0], 4), (ids[1], 5)]
        for response in responses:
            assert response.error_msg.startswith("Maximum queue size of 0 has been reached")
        assert executor.can_enqueue_requests()


def test_after_shutdown_every_call_raises_and_shutdown_is_idempotent() -> None:
    with engine() as executor:
        pid = executor.pid
        awaiter_raised = threading.Event()

        def await_for_ever() -> None:
            with pytest.raises(RuntimeError, match="shut down"):
                executor.await_responses()
            awaiter_raised.set()

        awaiter = threading.Thread(target=await_for_ever)
        awaiter.start()
        closers = [threading.Thread(target=executor.shutdown) for _ in range(3)]
        for thread in closers:
            thread.start()
        for thread in [*closers, awaiter]:
            thread.join(LIMIT_S)
        assert awaiter_raised.is_set()
        assert not is_running(pid)
        assert not executor.can_enqueue_requests()
        for call in (
            lambda: executor.enqueue_request(request()),
            lambda: executor.await_responses(SHORT),
            lambda: executor.cancel_request(1),
            executor.get_latest_iteration_stats,
            executor.get_num_responses_ready,
        ):
            with pytest.raises(RuntimeError, match="shut down"):
                call()
        executor.shutdown()


def test_shutdown_waits_neither_for_requests_in_flight_nor_to_use_force() -> None:
    with engine(step_s=0.01, stop_wait_s=10 * LIMIT_S) as executor:
        executor.enqueue_requests([request(100_000)] * 20)
        executor.await_responses()
        start = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - start < LIMIT_S


def test_shutdown_of_a_stuck_engine_is_bounded() -> None:
    with engine("stuck_shutdown", stop_wait_s=0.2, terminate_wait_s=0.2) as executor:
        pid = executor.pid
        start = time.monotonic()
        executor.shutdown()
        assert 0.4 <= time.monotonic() - start < LIMIT_S
        assert not is_running(pid)


# -- back-pressure -------------------------------------------------------------------------------


def test_engine_waits_for_a_caller_that_does_not_read_and_loses_nothing() -> None:
    window = 4
    with engine(step_s=0.001, window=window) as executor:
        id = executor.enqueue_request(request(300))
        wait_until(lambda: executor.get_num_responses_ready() >= window)
        time.sleep(0.4)  # enough for all 300 where nothing stops it
        assert executor.get_num_responses_ready() <= 8 * window, "the engine went on stepping"
        assert tokens(collect(executor, [id]), id) == list(range(300))


def test_engine_that_takes_no_commands_never_blocks_the_caller() -> None:
    with engine(max_backlog_bytes=1 << 20) as executor:
        os.kill(executor.pid, signal.SIGSTOP)
        try:
            large = Request(input_token_ids=(1, 2, 3) * 10_000, max_tokens=2)
            accepted: list[int] = []

            def enqueue_many() -> None:
                while len(accepted) < 1000:
                    accepted.append(executor.enqueue_request(large))

            start = time.monotonic()
            with pytest.raises(EngineError, match="takes no commands"):
                enqueue_many()
            for id in accepted:
                executor.cancel_request(id)
            assert time.monotonic() - start < LIMIT_S
            assert executor.await_responses(SHORT) == []
        finally:
            os.kill(executor.pid, signal.SIGCONT)
        responses = collect(executor, accepted)
        assert all(not r.has_error() for r in responses)
        last = executor.enqueue_request(request(2))
        assert tokens(collect(executor, [last]), last) == [0, 1]


def test_shutdown_of_a_stopped_process_kills_it() -> None:
    with engine(stop_wait_s=0.1, terminate_wait_s=0.1) as executor:
        os.kill(executor.pid, signal.SIGSTOP)
        executor.shutdown()
        assert not is_running(executor.pid)


def test_request_larger_than_a_message_is_refused_and_forgotten() -> None:
    with engine() as executor:
        huge = request(2**70)
        with pytest.raises(EngineError, match="cannot be sent"):
            executor.enqueue_request(huge)
        id = executor.enqueue_request(request(1))
        assert tokens(collect(executor, [id]), id) == [0]


def test_constructor_that_is_interrupted_leaves_nothing() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(fraction: float, text: str) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        RemoteExecutor(
            ServingConfig(engine="scripted"), interrupt, factory="tests.remote.engines:slow_load"
        )
