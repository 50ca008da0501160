"""Starts TensorRT-LLM's Executor (1.2.x) for a configuration; the only importer of `tensorrt_llm`.

Owns the way from a ServingConfig to a `TrtllmExecutor` (trtllm_executor.py) that has computed its
first token: what the engine was built for (trtllm_engine.py), who computes where (trtllm_modes.py),
whose GPU it is (trtllm_gpus.py), what it is told (trtllm_config.py), and how large its pools are.

Facts of TensorRT-LLM 1.2 that shape this file:
- the constructor holds the interpreter's lock while the engine loads, for minutes;
- statistics tell both KV tiers together; how the pools are split is told by the first KV event, or
  by what counts as free while nothing runs: the device blocks, all of them;
- there are no statistics while the engine is idle, so a first request of one token asks for them,
  which shows also that the engine computes.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tokenflow.config import ServingConfig
from tokenflow.errors import CapacityError, ConfigError, EngineError
from tokenflow.executor.api import (
    ExecutorConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    KvCacheStats,
    Request,
    TokenRangeRetentionConfig,
)
from tokenflow.executor.channel import EngineInfo
from tokenflow.executor.trtllm_config import check_lora, check_supported, make_executor_config
from tokenflow.executor.trtllm_engine import LIMITS, BuiltEngine, check_limits, read_built_engine
from tokenflow.executor.trtllm_executor import TrtllmExecutor
from tokenflow.executor.trtllm_gpus import GpuLocks
from tokenflow.executor.trtllm_modes import ParallelPlan, plan_parallel

logger = logging.getLogger("tokenflow")

MODULE = "tensorrt_llm.bindings.executor"

_FIRST_REQUEST_S = 60.0
_FIRST_STATS_S = 1.0
_POLL_S = 0.001


class _NoAnswer(EngineError):
    """The engine computes nothing; it can only be left behind."""


def load_bindings() -> Any:
    """The module of the bindings. Raises ConfigError, for `engine`, where there is none with an
    Executor."""
    try:
        bindings = importlib.import_module(MODULE)
    except Exception as error:  # a library that does not load raises what it likes
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("engine", f"trtllm needs TensorRT-LLM: {reason}") from error
    if not hasattr(bindings, "Executor"):
        package = importlib.import_module(MODULE.partition(".")[0])
        raise ConfigError(
            "engine",
            f"TensorRT-LLM {getattr(package, '__version__', 'of unknown version')} has no Executor "
            "any more: trtllm needs 1.2.1 or older, or a 1.3.0 release candidate up to rc20",
        )
    return bindings


def create_trtllm_engine(
    config: ServingConfig,
    on_progress: Callable[[float, str], None],
    *,
    bindings: Any = None,
    limits: ExecutorConfig | None = None,
    environment: Mapping[str, str] | None = None,
    lock_folder: Path | None = None,
) -> TrtllmExecutor:
    """The engine of `config` in this process, loaded and tried.

    bindings: None = TensorRT-LLM's. limits: None = those of `config`. environment: of mpirun and
    CUDA, None = this process's.
    Raises ConfigError for what the engine was not built for, before anything is loaded; EngineError
    when TensorRT-LLM cannot start it or its first request fails; CapacityError for a KV pool that
    is smaller than was asked for.
    """
    environment = os.environ if environment is None else environment
    limits = limits or config.executor_config()
    check_supported(config)
    built = read_built_engine(config.gpt_model_path)
    check_limits(built, {name: getattr(limits, name) for name in LIMITS})
    check_lora(config, built)
    plan = plan_parallel(config, built, environment)
    if plan.rank > 0:
        raise ConfigError(
            "engine",
            f"rank {plan.rank} of an mpirun job does not serve: it runs "
            "python -m tokenflow.executor.trtllm_worker",
        )
    bindings = bindings or load_bindings()
    locks = GpuLocks(
        plan.device_ids or tuple(range(built.world_size if plan.num_ranks == 1 else 1)),
        exclusive=not limits.kv_cache_config.max_tokens,
        environment=environment,
        folder=lock_folder,
    )
    try:
        on_progress(0.0, "TensorRT-LLM loads the engine (no news until it is done)")
        made = construct(bindings, built, limits, config, plan)
        executor = TrtllmExecutor(bindings, made, built, limits, locks)
        _try_out(executor, built, limits)
    except BaseException:
        locks.release()
        raise
    return executor


def construct(
    bindings: Any,
    built: BuiltEngine,
    limits: ExecutorConfig,
    config: ServingConfig,
    plan: ParallelPlan,
) -> Any:
    """The binding's Executor, as every rank constructs it. Raises EngineError."""
    try:
        made = make_executor_config(bindings, limits, config, plan, has_lora=built.lora is not None)
        return bindings.Executor(str(built.folder), bindings.ModelType.DECODER_ONLY, made)
    except Exception as error:
        raise EngineError(f"TensorRT-LLM cannot start the engine: {error}") from error


def _try_out(executor: TrtllmExecutor, built: BuiltEngine, limits: ExecutorConfig) -> None:
    """Have the engine compute, and learn what it is. It is shut down before an error is raised,
    unless it does not answer: then its shutdown would not either."""
    try:
        executor.info = _learn_pools(executor, built, limits)
    except _NoAnswer:
        raise
    except BaseException:
        executor.shutdown()
        raise


def _learn_pools(
    executor: TrtllmExecutor, built: BuiltEngine, limits: ExecutorConfig
) -> EngineInfo:
    """Ask for one token, and read how large the pools are. Raises EngineError when none comes,
    CapacityError when the pool is smaller than was asked for."""
    pool, is_idle = _first_iteration(executor)
    levels = executor.num_blocks_per_level()
    asked = limits.kv_cache_config
    if len(levels) > 1:
        num_device, num_host = levels[0], levels[1]
    elif pool is None:
        raise EngineError("TensorRT-LLM told neither KV events nor statistics of its first request")
    elif is_idle:  # nothing is referenced, so that every device block counts as free
        num_device, num_host = pool.free_num_blocks, pool.max_num_blocks - pool.free_num_blocks
    else:
        num_host = _num_host_blocks(asked, built)
        num_device = pool.max_num_blocks - num_host
    size = built.tokens_per_block
    wanted = (asked.max_tokens or 0) // size
    if num_device < max(1, wanted):
        raise CapacityError(
            f"max_tokens_in_paged_kv_cache: {asked.max_tokens} tokens were asked for, the "
            f"engine's pool holds {num_device * size}: the GPU's free memory times "
            "kv_cache_free_gpu_mem_fraction is too small for it"
        )
    if asked.host_cache_size and not num_host:
        logger.warning(
            "kv_cache_host_memory_bytes: %d bytes hold no KV block (about %d bytes), or the "
            "host tier is off; there is none",
            asked.host_cache_size,
            built.block_bytes,
        )
    return EngineInfo(
        vocab_size=built.vocab_size,
        num_blocks=num_device,
        tokens_per_block=size,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        num_host_blocks=num_host,
        block_bytes=built.block_bytes,
    )


def _num_host_blocks(asked: KvCacheConfig, built: BuiltEngine) -> int:
    """As far as can be told from the bytes that were asked for."""
    if not asked.enable_block_reuse or not asked.onboard_blocks:
        return 0
    return (asked.host_cache_size or 0) // built.block_bytes


def _first_iteration(executor: TrtllmExecutor) -> tuple[KvCacheStats | None, bool]:
    """See `_first_stats`. The blocks of the first request are worth nothing."""
    worthless = KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(token_start=0, token_end=None, priority=0),
        ),
        decode_retention_priority=0,
    )
    request = Request(input_token_ids=(0,), max_tokens=1, kv_cache_retention_config=worthless)
    try:
        id = executor.enqueue_request(request)
    except Exception as error:
        raise EngineError(f"TensorRT-LLM refuses its first request: {error}") from error
    end = time.monotonic() + _FIRST_REQUEST_S
    while executor.has_request(id):
        for response in executor.await_responses(timedelta(seconds=0.1)):
            if response.has_error():
                raise EngineError(f"the engine's first request failed: {response.error_msg}")
        if time.monotonic() > end:
            raise _NoAnswer(f"the engine gave no token within {_FIRST_REQUEST_S:g} s")
    return _first_stats(executor, time.monotonic() + _FIRST_STATS_S)


def _first_stats(executor: TrtllmExecutor, end: float) -> tuple[KvCacheStats | None, bool]:
    """KV statistics after the first request, and whether they are those of an idle engine: the
    last iteration comes without active requests. Waits for that one until `end`."""
    pool = None
    while time.monotonic() < end:
        for entry in executor.get_latest_iteration_stats():
            pool = entry.kv_cache_stats
            if not entry.num_active_requests:
                return pool, True
        time.sleep(_POLL_S)
    return pool, False
