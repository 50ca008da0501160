"""The ExecutorConfig of TensorRT-LLM, made from ours.

Owns what an engine is started with. Every argument is passed by keyword, and those that only some
versions have are left out where they are not needed. What is not given here keeps TensorRT-LLM's
default.
"""

from __future__ import annotations

from typing import Any

from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.executor.api import ExecutorConfig, KvCacheConfig
from tokenflow.executor.trtllm_engine import BuiltEngine
from tokenflow.executor.trtllm_modes import Mode, ParallelPlan

_LORA_SETTINGS = (
    "lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes", "lora_prefetch_dir",
)  # fmt: skip


def check_supported(config: ServingConfig) -> None:
    """Raises ConfigError for what TensorRT-LLM's Executor cannot be told."""
    if config.kv_tiering:
        raise ConfigError(
            "kv_tiering",
            "the trtllm engine has no call that moves KV; it offloads when room is needed",
        )


def check_lora(config: ServingConfig, built: BuiltEngine) -> None:
    """Raises ConfigError for a setting of the LoRA cache where the engine was built without it."""
    defaults = ServingConfig()
    if built.lora is None:
        for name in _LORA_SETTINGS:
            if getattr(config, name) != getattr(defaults, name):
                raise ConfigError(
                    name, "the engine was built without LoRA: build it with --lora_plugin"
                )


def make_executor_config(
    bindings: Any,
    limits: ExecutorConfig,
    config: ServingConfig,
    plan: ParallelPlan,
    *,
    has_lora: bool,
) -> Any:
    """The binding's ExecutorConfig; `bindings` is the module `tensorrt_llm.bindings.executor`.
    has_lora: the engine was built with LoRA."""
    policy = limits.scheduler_config.capacity_scheduler_policy
    has_events = plan.mode is Mode.LEADER
    optional: dict[str, Any] = {
        "parallel_config": _parallel_config(bindings, config, plan),
        "max_queue_size": limits.max_queue_size,
        "peft_cache_config": _peft_cache_config(bindings, config) if has_lora else None,
    }
    return bindings.ExecutorConfig(
        max_beam_width=1,
        scheduler_config=bindings.SchedulerConfig(
            capacity_scheduler_policy=getattr(bindings.CapacitySchedulerPolicy, policy.name)
        ),
        kv_cache_config=_kv_cache_config(bindings, limits.kv_cache_config, config, has_events),
        enable_chunked_context=limits.enable_chunked_context,
        iter_stats_max_iterations=limits.iter_stats_max_iterations,
        batching_type=bindings.BatchingType.INFLIGHT,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _kv_cache_config(
    bindings: Any, pool: KvCacheConfig, config: ServingConfig, has_events: bool
) -> Any:
    """Both bounds of the pool are given; TensorRT-LLM takes the smaller one."""
    optional = {
        "max_tokens": pool.max_tokens or None,
        "host_cache_size": pool.host_cache_size or None,
        "secondary_offload_min_priority": pool.secondary_offload_min_priority,
    }
    return bindings.KvCacheConfig(
        enable_block_reuse=pool.enable_block_reuse,
        free_gpu_memory_fraction=config.kv_cache_free_gpu_mem_fraction,
        onboard_blocks=pool.onboard_blocks,
        event_buffer_max_size=pool.event_buffer_max_size if has_events else 0,
        enable_partial_reuse=pool.enable_partial_reuse,
        copy_on_partial_reuse=pool.copy_on_partial_reuse,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _peft_cache_config(bindings: Any, config: ServingConfig) -> Any:
    """The cache of LoRA adapters. What the settings leave open is TensorRT-LLM's default."""
    optional: dict[str, Any] = {
        "device_cache_percent": config.lora_cache_gpu_memory_fraction,  # a share, whatever its name
        "host_cache_size": config.lora_cache_host_memory_bytes,
        "lora_prefetch_dir": config.lora_prefetch_dir,
    }
    return bindings.PeftCacheConfig(
        optimal_adapter_size=config.lora_cache_optimal_adapter_size,
        max_adapter_size=config.lora_cache_max_adapter_size,
        **{name: value for name, value in optional.items() if value},
    )


def _parallel_config(bindings: Any, config: ServingConfig, plan: ParallelPlan) -> Any:
    """None where TensorRT-LLM's default, the first GPU in this process, is what is wanted."""
    optional: dict[str, Any] = {}
    if plan.device_ids:
        optional["device_ids"] = list(plan.device_ids)
    if plan.num_nodes > 1:
        optional["num_nodes"] = plan.num_nodes
    if plan.mode is Mode.ORCHESTRATOR:
        optional["orchestrator_config"] = bindings.OrchestratorConfig(
            is_orchestrator=True,
            worker_executable_path=config.executor_worker_path,
            spawn_processes=True,
        )
    elif not optional:
        return None
    return bindings.ParallelConfig(
        communication_type=bindings.CommunicationType.MPI,
        communication_mode=getattr(bindings.CommunicationMode, plan.mode.value),
        **optional,
    )
