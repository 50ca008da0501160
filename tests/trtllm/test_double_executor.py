"""What the double's Executor does as TensorRT-LLM's, used directly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm_double.__main__ import environment_with_double
from tests.trtllm_double.folder import FAIL_FILE, Behind, write_engine

SECOND = timedelta(seconds=1)


@pytest.fixture
def load(double: types.ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(
        behind: Behind | None = None, pool: dict[str, Any] | None = None, **config: Any
    ) -> Any:
        folder = tmp_path / f"engine{len(made)}"
        write_engine(folder, behind or Behind(step_s=0.002), tokens_per_block=8, max_num_tokens=16)
        executor = double.Executor(
            folder,
            double.ModelType.DECODER_ONLY,
            double.ExecutorConfig(
                kv_cache_config=double.KvCacheConfig(**{"max_tokens": 320, **(pool or {})}),
                **{"enable_chunked_context": True, **config},
            ),
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


def collect(executor: Any, *ids: int) -> dict[int, list[Any]]:
    """All responses until those of `ids` are final."""
    waiting, found = set(ids), {id: [] for id in ids}
    end = time.monotonic() + 30
    while waiting:
        assert time.monotonic() < end
        for response in executor.await_responses(SECOND):
            found[response.request_id].append(response)
            if response.has_error() or response.result.is_final:
                waiting.discard(response.request_id)
    return found


def test_a_cancelled_request_ends_empty_and_one_that_does_not_stream_loses_all(
    double: types.ModuleType, load: Callable[..., Any]
) -> None:
    executor = load()
    streams = [
        executor.enqueue_request(double.Request([i + 1, 2], 150, streaming=bool(i)))
        for i in range(2)
    ]
    while not (responses := executor.await_responses(SECOND)):
        pass
    assert responses[0].request_id == streams[1]
    executor.cancel_request(streams[1])
    final = collect(executor, streams[1])[streams[1]][-1].result
    assert final.finish_reasons == [double.FinishReason.CANCELLED]
    assert final.output_token_ids == [[]]
    end = collect(executor, streams[0])[streams[0]]
    assert len(end) == 1, "everything in one response"
    assert len(end[0].result.output_token_ids[0]) == 152, "with the prompt"


def test_hazards_are_refused(double: types.ModuleType, load: Callable[..., Any]) -> None:
    executor = load(pool={"event_buffer_max_size": 8})
    request_id = executor.enqueue_request(double.Request(list(range(60)), 20, streaming=True))
    with pytest.raises(RuntimeError, match="before its first token"):
        executor.cancel_request(request_id)
    with pytest.raises(RuntimeError, match="GIL"):
        executor.get_kv_cache_event_manager().get_latest_events()
    collect(executor, request_id)
    waiter = threading.Thread(target=lambda: executor.await_responses(timedelta(seconds=1)))
    waiter.start()
    end = time.monotonic() + 10
    while not executor._awaiting.locked():
        assert time.monotonic() < end
    with pytest.raises(RuntimeError, match="two threads"):
        executor.await_responses(timedelta(0))
    waiter.join()
    assert len(executor.hazards) == 3


def test_hazards_may_be_written_down(
    double: types.ModuleType, load: Callable[..., Any], tmp_path: Path
) -> None:
    executor = load(Behind(on_hazard="record"))
    request_id = executor.enqueue_request(double.Request(list(range(60)), 20, streaming=True))
    executor.cancel_request(request_id)
    collect(executor, request_id)
    assert "before its first token" in (tmp_path / "engine0" / "hazards.txt").read_text()


def test_without_chunks_an_early_cancel_is_no_hazard(
    double: types.ModuleType, load: Callable[..., Any]
) -> None:
    executor = load(enable_chunked_context=False)
    request_id = executor.enqueue_request(double.Request([1, 2], 100, streaming=True))
    executor.cancel_request(request_id)
    assert executor.hazards == []
    collect(executor, request_id)


def test_waiting_for_ids(double: types.ModuleType, load: Callable[..., Any]) -> None:
    executor = load()
    ids = executor.enqueue_requests([double.Request([i + 1], 3) for i in range(2)])
    lists = executor.await_responses(ids=ids, timeout=timedelta(seconds=10))
    assert [[r.request_id for r in responses] for responses in lists] == [[ids[0]], [ids[1]]]
    (late,) = executor.await_responses(id=ids[0], timeout=SECOND)
    assert late.error_msg.startswith(f"ReqId {ids[0]} has already been processed")
    assert executor.get_num_responses_ready() == 0


def test_the_oldest_events_are_gone_and_nothing_is_told_anew(
    double: types.ModuleType, load: Callable[..., Any]
) -> None:
    executor = load(pool={"event_buffer_max_size": 2})
    for start in range(4):
        request = double.Request([start + 1] * 20, 4, streaming=True)
        collect(executor, executor.enqueue_request(request))
    manager = executor.get_kv_cache_event_manager()
    events = manager.get_latest_events(0)
    assert len(events) == 2
    assert events[0].event_id > 1
    collect(executor, executor.enqueue_request(double.Request([9] * 20, 4, streaming=True)))
    created = double.kv_cache.KVCacheCreatedData
    assert not any(isinstance(e.data, created) for e in manager.get_latest_events(0))


def test_a_full_queue_raises(double: types.ModuleType, load: Callable[..., Any]) -> None:
    executor = load(max_queue_size=1, max_batch_size=1)
    first = executor.enqueue_request(double.Request([1], 60, streaming=True))
    while not executor.await_responses(SECOND):
        pass
    second = executor.enqueue_request(double.Request([2], 1))
    with pytest.raises(RuntimeError, match="Maximum queue size of 1 has been reached"):
        executor.enqueue_request(double.Request([3], 1))
    collect(executor, first, second)


def test_steps_that_fail_go_on_failing(
    double: types.ModuleType, load: Callable[..., Any], tmp_path: Path
) -> None:
    """Request by request, for ever; no call raises."""
    executor = load()
    (tmp_path / "engine0" / FAIL_FILE).touch()
    for _ in range(5):
        request_id = executor.enqueue_request(double.Request([1], 3, streaming=True))
        (response,) = collect(executor, request_id)[request_id]
        assert response.error_msg.startswith("Encountered an error in forwardAsync function: CUDA")
    assert executor.can_enqueue_requests()


def test_after_shutdown_every_call_raises(
    double: types.ModuleType, load: Callable[..., Any]
) -> None:
    executor = load()
    executor.shutdown()
    for call in (
        lambda: executor.enqueue_request(double.Request([1], 1)),
        lambda: executor.await_responses(timedelta(0)),
        lambda: executor.cancel_request(1),
        executor.get_latest_iteration_stats,
        executor.get_num_responses_ready,
    ):
        with pytest.raises(RuntimeError, match="Shutdown called"):
            call()
    assert not executor.can_enqueue_requests()


def test_orchestrators_have_no_events_and_rules_of_their_own(
    double: types.ModuleType, tmp_path: Path
) -> None:
    folder = write_engine(tmp_path / "e", Behind(), tp_size=2)
    pool = double.KvCacheConfig(max_tokens=320, event_buffer_max_size=8)

    def load(**parallel: Any) -> Any:
        config = double.ExecutorConfig(
            kv_cache_config=pool, parallel_config=double.ParallelConfig(**parallel)
        )
        return double.Executor(folder, double.ModelType.DECODER_ONLY, config)

    orchestrator = double.CommunicationMode.ORCHESTRATOR
    worker = double.OrchestratorConfig(worker_executable_path=sys.executable)
    executor = load(communication_mode=orchestrator, orchestrator_config=worker)
    assert executor.get_kv_cache_event_manager() is None
    executor.shutdown()
    with pytest.raises(RuntimeError, match="MPI size 1"):
        load()
    with pytest.raises(RuntimeError, match="OrchestratorConfig"):
        load(communication_mode=orchestrator)
    missing = double.OrchestratorConfig(worker_executable_path="/nowhere")
    with pytest.raises(RuntimeError, match="cannot be executed"):
        load(communication_mode=orchestrator, orchestrator_config=missing)
    with pytest.raises(RuntimeError, match="participant_ids"):
        load(communication_mode=orchestrator, orchestrator_config=worker, participant_ids=[0, 1])
    with pytest.raises(RuntimeError, match="device_ids"):
        load(communication_mode=orchestrator, orchestrator_config=worker, device_ids=[0])


def test_another_rank_waits_for_the_end_of_its_leader(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind(), tp_size=2)
    program = (
        "import sys, tensorrt_llm.bindings.executor as t\n"
        "e = t.Executor(sys.argv[1], t.ModelType.DECODER_ONLY, t.ExecutorConfig())\n"
        "assert not e.can_enqueue_requests()\n"
        "try: e.enqueue_request(t.Request([1], 1))\n"
        "except RuntimeError as error: print(error, flush=True)\n"
        "e.shutdown()\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    environment = {
        **environment_with_double(os.environ),
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "TRTLLM_DOUBLE_LEADER_PID": str(leader.pid),
    }
    rank = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], env=environment, stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    assert b"leader rank only" in rank.stdout.readline()
    assert rank.poll() is None
    leader.communicate(b"\n")
    assert rank.wait(30) == 0
    rank.stdout.close()


def test_a_command_finds_the_double_and_so_do_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "line = 'import tensorrt_llm.bindings.executor as t; print(t.Executor.__module__)'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', line]).returncode)\n"
    )
    command = [sys.executable, "-m", "tests.trtllm_double", "--", "python", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "tensorrt_llm.bindings.executor"
