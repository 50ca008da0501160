"""From what was built to the parameters of the models that serve it.

Owns which parameter of the server follows from which entry of a manifest, and how several engines
share GPUs. Invariants: nothing is served with more than the engine was built for; two engines get
one GPU only by a plan that gives each a part of its memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.build_plan import ENGINE_DIR
from build_engines.builder import TOKENIZER_DIR
from build_engines.checkpoint import TOKENIZER_FILES
from build_engines.manifest import MANIFEST_NAME, find_engine, read_manifest
from build_engines.memory_budget import gb
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_config import check_supported
from tokenflow.executor.trtllm_engine import LIMITS, check_limits, read_built_engine
from tokenflow.executor.trtllm_modes import plan_parallel

TRTLLM, INFLIGHT = "trtllm", "inflight"
MODEL_NAME = "ensemble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of a repository: an engine with its parameters."""

    name: str
    config: ServingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What there is to serve. manifest: of a build, in `folder`; checkpoint: for the embedded
    engine. At least one of them."""

    manifest: Mapping[str, Any] | None = None
    folder: Path | None = None
    checkpoint: Path | None = None


def find_source(engine_dir: Path | None, manifest: Path | None, checkpoint: Path | None) -> Source:
    """The build that is meant by its folder, by its engine's folder, or by its manifest's file.

    Raises ConfigError when nothing is named or it cannot be read.
    """
    if engine_dir is not None and manifest is not None:
        raise ConfigError("manifest", "is in engine_dir already; name one of them")
    file = manifest
    if manifest is not None and manifest.is_dir():
        file = manifest / MANIFEST_NAME
    if engine_dir is not None:
        is_engines = engine_dir.name == ENGINE_DIR and engine_dir.is_dir()
        candidates = (engine_dir, engine_dir.parent) if is_engines else (engine_dir,)
        found = [folder for folder in candidates if (folder / MANIFEST_NAME).is_file()]
        if not found:
            raise ConfigError("engine_dir", f"no {MANIFEST_NAME} in {engine_dir}; was it built?")
        file = found[0] / MANIFEST_NAME
    if file is None:
        if checkpoint is None:
            raise ConfigError("engine_dir", "name --engine-dir, --manifest or --checkpoint")
        return Source(checkpoint=checkpoint)
    return Source(manifest=read_manifest(file), folder=file.parent, checkpoint=checkpoint)


def serving_models(
    source: Source,
    engine: str,
    overrides: Mapping[str, str],
    gpus: Sequence[Sequence[int]] = (),
    *,
    split: bool = False,
) -> tuple[Model, ...]:
    """The models of a repository.

    engine: of ServingConfig. overrides: parameters that win, judged like the others. gpus: devices
    of each engine, one engine for each set (empty: one engine, where TensorRT-LLM puts it).
    split: sets may share GPUs, each engine gets an even part of the memory.
    Raises ConfigError naming the parameter, field or flag.
    """
    if "engine" in overrides:
        raise ConfigError("engine", "is what --engine says; other parameters follow from it")
    values = _engine_values(source) if engine == TRTLLM else _checkpoint_values(source)
    if gpus and engine != TRTLLM:
        raise ConfigError("gpus", f"only engine {TRTLLM} is told its GPUs, not {engine}")
    parts = _parts(source, gpus, split)
    planned = sorted(set(overrides).intersection(name for part in parts for name in part))
    if planned:
        raise ConfigError(planned[0], "is what --gpus and --split say, for each engine its own")
    models = []
    for index, part in enumerate(parts):
        config = parse_parameters({"engine": engine, **values, **part, **overrides})
        if engine == TRTLLM:
            _check_engine(config)
        name = MODEL_NAME if len(parts) == 1 else f"{MODEL_NAME}_{index}"
        models.append(Model(name=name, config=config))
    return tuple(models)


def _check_engine(config: ServingConfig) -> None:
    """What would be refused when the engine is loaded, as far as this machine can tell."""
    built = read_built_engine(config.gpt_model_path)
    check_limits(built, {name: getattr(config, name) for name in LIMITS})
    check_supported(config)
    if config.num_nodes > 1:
        job = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(built.world_size)}
        plan_parallel(config, built, job)


def parse_gpus(text: str) -> tuple[tuple[int, ...], ...]:
    """`0,1;2,3` -> ((0, 1), (2, 3)): one set for each engine. Raises ConfigError("gpus", …)."""
    try:
        sets = tuple(tuple(int(part) for part in group.split(",")) for group in text.split(";"))
    except ValueError:
        raise ConfigError("gpus", f"must look like 0;1 or 0,1;2,3, got {text!r}") from None
    for group in sets:
        if min(group) < 0 or len(set(group)) != len(group):
            raise ConfigError("gpus", f"a set names each GPU once, from 0 on, got {text!r}")
    return sets


def _engine_values(source: Source) -> dict[str, str]:
    if source.manifest is None or source.folder is None:
        raise ConfigError(
            "engine_dir", f"engine {TRTLLM} needs a build: --engine-dir or --manifest"
        )
    if source.checkpoint is not None:
        raise ConfigError(
            "checkpoint", f"is for the embedded engine (--engine {INFLIGHT}), not for {TRTLLM}"
        )
    manifest = source.manifest
    memory = manifest["memory"]
    return {
        **_limit_values(manifest),
        "gpt_model_path": str(find_engine(manifest, source.folder)),
        "tokenizer_dir": str(source.folder / TOKENIZER_DIR),
        "max_tokens_in_paged_kv_cache": "0",  # as many as the fraction gives
        "kv_cache_free_gpu_mem_fraction": str(memory["free_fraction"]),
        "kv_cache_host_memory_bytes": str(memory["host_bytes"]),
    }


def _checkpoint_values(source: Source) -> dict[str, str]:
    """For an engine that loads a checkpoint: the one that is named, else the one of the build."""
    manifest = source.manifest
    checkpoint = source.checkpoint
    if checkpoint is None:
        assert manifest is not None, "find_source"
        checkpoint = Path(manifest["checkpoint"]["path"])
    for name in ("config.json", TOKENIZER_FILES[0]):
        if not (checkpoint / name).is_file():
            raise ConfigError("checkpoint", f"{checkpoint / name} does not exist")
    values = {"gpt_model_path": str(checkpoint)}
    if manifest is not None:
        limits = _limit_values(manifest)
        default = ServingConfig().max_tokens_in_paged_kv_cache
        seq_len, size = int(limits["max_seq_len"]), int(limits["tokens_per_block"])
        # In whole blocks: the longest sequence takes one for its last few tokens, too.
        pool = max(default, math.ceil(seq_len / size) * size)
        values |= {**limits, "max_tokens_in_paged_kv_cache": str(pool)}
    return values


def _limit_values(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(manifest["limits"][name]) for name in LIMITS}


def _parts(
    source: Source, gpus: Sequence[Sequence[int]], split: bool
) -> tuple[dict[str, str], ...]:  # fmt: skip
    """What each engine has to itself: its GPUs, and its part of their memory if they are shared."""
    if not gpus:
        if split:
            raise ConfigError("split", "needs --gpus: the sets that share")
        return ({},)
    assert source.manifest is not None, "only a build is told its GPUs"
    tp = source.manifest["tp_size"]
    for group in gpus:
        if len(group) != tp:
            raise ConfigError(
                "gpus", f"the engine needs {tp} GPUs, {','.join(map(str, group))} has {len(group)}"
            )
    users = Counter(device for group in gpus for device in group)
    shared = sorted(device for device, count in users.items() if count > 1)
    if shared and not split:
        raise ConfigError(
            "gpus",
            f"GPU {shared[0]} is in {users[shared[0]]} sets; two engines on one GPU need --split, "
            "which gives each a part of its memory",
        )
    return tuple(
        {
            "gpu_device_ids": ",".join(map(str, group)),
            **share_of_gpu(source.manifest, max(users[device] for device in group)),
        }
        for group in gpus
    )


def share_of_gpu(manifest: Mapping[str, Any], num_engines: int) -> dict[str, str]:
    """Pool of an engine that has its GPUs with others: nothing to say if it has them alone.

    The pool is the same whatever the order in which the engines load: its size is given in tokens,
    and the fraction is what yields as much on a GPU where all the others are loaded already.
    """
    if num_engines == 1:
        return {}
    memory, limits = manifest["memory"], manifest["limits"]
    part = memory["gpu_bytes"] / num_engines
    room = memory["free_fraction"] * (part - memory["fixed_bytes"])
    num_blocks = max(0, int(room // memory["block_bytes"]))
    num_tokens = num_blocks * limits["tokens_per_block"]
    if num_tokens < limits["max_seq_len"]:
        raise ConfigError(
            "split",
            f"a part of {gb(part)} leaves room for {num_tokens:,} tokens of KV beside "
            f"{gb(memory['fixed_bytes'])}, less than one sequence of {limits['max_seq_len']:,}",
        )
    pool = num_blocks * memory["block_bytes"]
    others = (num_engines - 1) * (memory["fixed_bytes"] + pool)
    free = memory["gpu_bytes"] - others - memory["fixed_bytes"]
    return {
        "max_tokens_in_paged_kv_cache": str(num_tokens),
        "kv_cache_free_gpu_mem_fraction": str(math.ceil(1e4 * pool / free) / 1e4),
    }
