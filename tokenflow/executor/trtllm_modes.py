"""Who computes where: one process, an orchestrator with workers, or the ranks of an mpirun job.

Owns the choice, made from the ranks that the engine was built for and those that mpirun started:

| built for | ranks of this job | mode |
|---|---|---|
| 1 | 1 (no mpirun needed) | leader: this process computes |
| several, one node | 1 | orchestrator: TensorRT-LLM starts a worker per rank |
| several | as many | leader under mpirun: rank 0 serves, the others wait (trtllm_worker.py) |

TensorRT-LLM behaviour: an orchestrator's process holds no model, so it has no KV events; in an
mpirun job a rank that is lost ends the job, so that nothing is started again from inside.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_engine import BuiltEngine

_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Mode(enum.Enum):
    """TensorRT-LLM's CommunicationMode, by name."""

    LEADER = "LEADER"
    ORCHESTRATOR = "ORCHESTRATOR"


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """device_ids: GPU of each rank, () = the first ones. rank: this process's in an mpirun job."""

    mode: Mode
    device_ids: tuple[int, ...] = ()
    num_nodes: int = 1
    rank: int = 0
    num_ranks: int = 1


def plan_parallel(
    config: ServingConfig, built: BuiltEngine, environment: Mapping[str, str]
) -> ParallelPlan:
    """How this process takes part. Raises ConfigError naming what does not fit."""
    rank, num_ranks = _mpi_place(environment)
    device_ids = parse_device_ids(config.gpu_device_ids)
    world_size, num_nodes = built.world_size, config.num_nodes
    if num_ranks not in (1, world_size):
        raise ConfigError(
            "gpt_model_path",
            f"the engine was built for {world_size} ranks, mpirun started {num_ranks}",
        )
    if device_ids and (num_nodes > 1 or len(device_ids) != world_size):
        rule = "must be empty with num_nodes > 1" if num_nodes > 1 else "must name one GPU per rank"
        raise ConfigError(
            "gpu_device_ids", f"{rule} (the engine has {world_size}), got {config.gpu_device_ids!r}"
        )
    if world_size > 1 and num_ranks == 1:
        _check_orchestrator(config)
        return ParallelPlan(mode=Mode.ORCHESTRATOR, device_ids=device_ids)
    if world_size == 1 and num_nodes > 1:
        raise ConfigError("num_nodes", f"an engine of one rank runs on one node, got {num_nodes}")
    if num_ranks > 1 and config.max_engine_restarts > 0:
        raise ConfigError(
            "max_engine_restarts",
            "must be 0 under mpirun: a lost rank ends the job, whoever started it starts it again",
        )
    return ParallelPlan(
        mode=Mode.LEADER,
        device_ids=device_ids,
        num_nodes=num_nodes,
        rank=rank,
        num_ranks=num_ranks,
    )


def parse_device_ids(text: str) -> tuple[int, ...]:
    """`gpu_device_ids` ("0,1"). Raises ConfigError."""
    if not text:
        return ()
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        ids = (-1,)
    if min(ids) < 0 or len(set(ids)) != len(ids):
        raise ConfigError(
            "gpu_device_ids", f"must be different GPU numbers between commas, got {text!r}"
        )
    return ids


def _mpi_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of ranks, as mpirun tells its children; (0, 1) without it."""
    for rank, size in _RANK_VARIABLES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size])
    return 0, 1


def _check_orchestrator(config: ServingConfig) -> None:
    if config.num_nodes > 1:
        raise ConfigError(
            "num_nodes",
            f"{config.num_nodes} nodes need an mpirun job with a rank for each GPU: TensorRT-LLM "
            "starts workers on its own node only",
        )
    if not os.access(config.executor_worker_path, os.X_OK):
        raise ConfigError(
            "executor_worker_path",
            f"{config.executor_worker_path} is no program: an engine of several ranks needs the "
            "worker of TensorRT-LLM",
        )
