"""Leader and orchestrator mode, and what each rank may do.

The ranks are those that mpirun tells its children; nothing is started. A rank that is not the
leader waits in `shutdown` until the process TRTLLM_DOUBLE_LEADER_PID has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Of this process. has_model: the engine's memory is in this process."""

    rank: int = 0
    is_orchestrator: bool = False

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def has_model(self) -> bool:
        return not self.is_orchestrator


def find_place(parallel: Any, world_size: int, environment: Mapping[str, str]) -> Place:
    """Where this process stands. Raises RuntimeError for what the executor refuses."""
    rank = int(environment.get("OMPI_COMM_WORLD_RANK", 0))
    num_ranks = int(environment.get("OMPI_COMM_WORLD_SIZE", 1))
    mode = "LEADER" if parallel is None else parallel.get("communication_mode").name
    devices = None if parallel is None else parallel.get("device_ids")
    if devices is not None and len(devices) != world_size:
        raise RuntimeError(f"device_ids names {len(devices)} devices, the engine has {world_size}")
    if mode == "ORCHESTRATOR":
        _check_orchestrator(parallel, num_ranks)
        return Place(is_orchestrator=True)
    if num_ranks != world_size:
        raise RuntimeError(
            f"MPI size {num_ranks} is not tensor parallelism x pipeline parallelism {world_size}"
        )
    return Place(rank)


def _check_orchestrator(parallel: Any, num_ranks: int) -> None:
    config = parallel.get("orchestrator_config")
    if config is None or not config.get("is_orchestrator"):
        raise RuntimeError("OrchestratorConfig must be set in orchestrator mode")
    if not config.get("spawn_processes"):
        raise RuntimeError("the double has no workers that somebody else started")
    if num_ranks != 1:
        raise RuntimeError("World size must be 1 in orchestrator mode")
    if parallel.get("participant_ids") is not None:
        raise RuntimeError("participant_ids must not be set when processes are spawned")
    worker = Path(config.get("worker_executable_path"))
    if not worker.is_file():
        raise RuntimeError(f"MPI_Comm_spawn: {worker} cannot be executed")


def wait_for_leader() -> None:
    """What `shutdown` of another rank does."""
    leader = int(os.environ["TRTLLM_DOUBLE_LEADER_PID"])
    while True:
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)
