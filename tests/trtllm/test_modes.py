"""Who computes where: one GPU, workers on one node, ranks under mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Client
from tests.trtllm.conftest import Starter
from tests.trtllm_double.__main__ import environment_with_double
from tests.trtllm_double.folder import Behind, write_engine
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_engine import read_built_engine
from tokenflow.executor.trtllm_modes import Mode, ParallelPlan, plan_parallel

WORKER = {"executor_worker_path": sys.executable}


def _mpi(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


def _plan(
    start: Starter, environment: dict[str, str] | None = None, tp_size: int = 1, **settings: Any
) -> ParallelPlan:
    folder = start.folder(tp_size=tp_size)
    return plan_parallel(
        start.config(folder, **settings), read_built_engine(str(folder)), environment or {}
    )


def test_one_gpu_needs_nothing(start: Starter) -> None:
    assert _plan(start) == ParallelPlan(mode=Mode.LEADER)
    assert _plan(start, gpu_device_ids="3").device_ids == (3,)


def test_several_ranks_on_one_node_are_workers(start: Starter) -> None:
    plan = _plan(start, tp_size=2, gpu_device_ids="2,0", **WORKER)
    assert plan == ParallelPlan(mode=Mode.ORCHESTRATOR, device_ids=(2, 0))


def test_under_mpirun_every_rank_takes_part(start: Starter) -> None:
    for rank in range(2):
        plan = _plan(start, _mpi(rank, 2), tp_size=2, num_nodes=2, max_engine_restarts=0)
        assert (plan.mode, plan.rank, plan.num_nodes) == (Mode.LEADER, rank, 2)
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert _plan(start, pmi, tp_size=2, max_engine_restarts=0).rank == 1


@pytest.mark.parametrize(
    ("key", "environment", "tp_size", "settings"),
    [
        ("gpt_model_path", _mpi(0, 4), 2, {}),
        ("gpt_model_path", _mpi(0, 2), 1, {}),
        ("gpu_device_ids", {}, 1, {"gpu_device_ids": "0,1"}),
        ("gpu_device_ids", {}, 2, {"gpu_device_ids": "0", **WORKER}),
        ("gpu_device_ids", {}, 1, {"gpu_device_ids": "a"}),
        ("gpu_device_ids", {}, 2, {"gpu_device_ids": "1,1"}),
        ("gpu_device_ids", {}, 1, {"gpu_device_ids": "-1"}),
        (
            "gpu_device_ids",
            _mpi(0, 2),
            2,
            {"gpu_device_ids": "0,1", "num_nodes": 2, "max_engine_restarts": 0},
        ),
        ("executor_worker_path", {}, 2, {"executor_worker_path": "/nowhere"}),
        ("num_nodes", {}, 2, {"num_nodes": 2, **WORKER}),
        ("num_nodes", {}, 1, {"num_nodes": 2}),
        ("max_engine_restarts", _mpi(0, 2), 2, {"max_engine_restarts": 1}),
    ],
)
def test_what_does_not_fit_is_named(
    start: Starter, key: str, environment: dict[str, str], tp_size: int, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(start, environment, tp_size, **settings)
    assert caught.value.key == key


def test_an_orchestrator_serves_without_events(start: Starter) -> None:
    folder = start.folder(tp_size=2)
    executor = start.executor(folder=folder, kv_cache_host_memory_bytes=1 << 20, **WORKER)
    assert executor.get_kv_cache_event_manager() is None
    given = executor._executor._values["executor_config"].kv_cache_config
    assert given.event_buffer_max_size == 0, "nobody could take them"
    # Half a rank's heads: a block takes half as much, so that twice as many are said to fit.
    assert executor.block_bytes == 8 * 512
    client = Client(executor)
    output = client.run((1, 2, 3), 5)
    assert output.token_ids == [4, 5, 6, 7, 8]
    client.until(lambda: client.stats)
    assert all(entry.kv_tier_stats is None for entry in client.stats)


def test_a_rank_that_does_not_serve_is_told_what_to_run(start: Starter) -> None:
    folder = start.folder(tp_size=2)
    with pytest.raises(ConfigError, match=r"rank 1 .* tokenflow\.executor\.trtllm_worker"):
        start.executor(folder=folder, environment=_mpi(1, 2), max_engine_restarts=0)


def test_a_worker_rank_ends_with_its_leader(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind(), tp_size=2)
    leader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    environment = {
        **environment_with_double(os.environ),
        **_mpi(1, 2),
        "TRTLLM_DOUBLE_LEADER_PID": str(leader.pid),
    }
    command = [sys.executable, "-m", "tokenflow.executor.trtllm_worker", f"gpt_model_path={folder}",
               "max_engine_restarts=0"]  # fmt: skip
    rank = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    assert rank.stderr is not None
    assert b"rank 1 of 2 computes" in rank.stderr.readline()
    leader.communicate(b"\n")
    assert rank.wait(30) == 0
    rank.stderr.close()
    alone = subprocess.run(
        command,
        env=environment_with_double(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 1
    assert "executor_worker_path" in alone.stderr
