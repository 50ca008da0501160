"""What the adapter relies on in `tensorrt_llm.bindings.executor`.

Owns the list (names, arguments, defaults, values), as recorded for TensorRT-LLM 1.2.x. Invariant:
what the adapter writes, reads, calls or leaves at its default is here. `trtllm_check.py` compares
it with the bindings that are installed, before an engine is loaded.

What may be missing, because only a request that asks for it needs it, is in OPTIONAL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tokenflow.executor.api import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class ClassFacts:
    """One class. arguments: of the constructor. positional: those of them that are given by their
    place, in order. defaults: properties of an instance that was made without them, and the value
    that the adapter counts on; members of enums as text. properties: read from values that
    TensorRT-LLM makes. methods: name -> arguments that are given."""

    arguments: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    properties: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_BLOCKS = ("num_total_allocated_blocks", "num_new_allocated_blocks", "num_reused_blocks",
           "num_missed_blocks")  # fmt: skip
_POOL = ("max_num_blocks", "free_num_blocks", "used_num_blocks", "tokens_per_block",
         "alloc_total_blocks", "alloc_new_blocks", "reused_blocks", "missed_blocks",
         "cache_hit_rate")  # fmt: skip

_SAMPLING = tuple(name for name in SamplingConfig.__struct_fields__ if name != "beam_width")

CLASSES: Mapping[str, ClassFacts] = {
    "Executor": ClassFacts(
        positional=("model_path", "model_type", "executor_config"),
        methods={
            "enqueue_requests": ("requests",),
            "await_responses": ("timeout",),
            "get_num_responses_ready": (),
            "cancel_request": ("id",),
            "get_latest_iteration_stats": (),
            "can_enqueue_requests": (),
            "get_kv_cache_event_manager": (),
            "shutdown": (),
        },
    ),
    "ExecutorConfig": ClassFacts(
        arguments=(
            "max_beam_width", "scheduler_config", "kv_cache_config", "enable_chunked_context",
            "iter_stats_max_iterations", "batching_type", "max_batch_size", "max_num_tokens",
            "parallel_config", "max_queue_size", "peft_cache_config",
        ),
        defaults={
            "normalize_log_probs": True,
            "request_stats_max_iterations": 0,
            "gather_generation_logits": False,
            "enable_trt_overlap": False,
        },
    ),
    "KvCacheConfig": ClassFacts(
        arguments=(
            "enable_block_reuse", "max_tokens", "free_gpu_memory_fraction", "host_cache_size",
            "onboard_blocks", "secondary_offload_min_priority", "event_buffer_max_size",
            "enable_partial_reuse", "copy_on_partial_reuse",
        ),
        defaults={"max_attention_window": None, "sink_token_length": None, "use_uvm": False},
    ),
    "SchedulerConfig": ClassFacts(
        arguments=("capacity_scheduler_policy",),
        defaults={"context_chunking_policy": None, "dynamic_batch_config": None},
    ),
    "ParallelConfig": ClassFacts(
        arguments=(
            "communication_type", "communication_mode", "device_ids", "orchestrator_config",
            "num_nodes",
        ),
        defaults={"participant_ids": None},
    ),
    "PeftCacheConfig": ClassFacts(
        arguments=(
            "optimal_adapter_size", "max_adapter_size", "device_cache_percent", "host_cache_size",
            "lora_prefetch_dir",
        ),
        defaults={"num_host_module_layer": 0, "num_device_module_layer": 0},
    ),
    "LoraConfig": ClassFacts(positional=("task_id",), arguments=("weights", "config")),
    "OrchestratorConfig": ClassFacts(
        arguments=("is_orchestrator", "worker_executable_path", "spawn_processes"),
        defaults={"orch_leader_comm": None},
    ),
    "Request": ClassFacts(
        positional=("input_token_ids", "max_tokens"),
        arguments=(
            "streaming", "sampling_config", "output_config", "end_id", "pad_id", "bad_words",
            "stop_words", "embedding_bias", "kv_cache_retention_config", "client_id", "priority",
            "cache_salt_id", "lora_config",
        ),
        defaults={
            "return_all_generated_tokens": False,
            "request_type": "RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION",
            "allotted_time_ms": None,
        },
    ),
    "SamplingConfig": ClassFacts(
        arguments=tuple(SamplingConfig.__struct_fields__),
        defaults=dict.fromkeys(_SAMPLING),
    ),
    "OutputConfig": ClassFacts(
        arguments=("return_log_probs", "exclude_input_from_output", "return_perf_metrics"),
        defaults={"return_context_logits": False, "return_generation_logits": False},
    ),
    "KvCacheRetentionConfig": ClassFacts(
        positional=(
            "token_range_retention_configs", "decode_retention_priority", "decode_duration_ms",
            "transfer_mode", "directory",
        ),
    ),
    "KvCacheRetentionConfig.TokenRangeRetentionConfig": ClassFacts(
        positional=("token_start", "token_end", "priority", "duration_ms"),
    ),
    "Response": ClassFacts(
        properties=("request_id", "error_msg", "result"), methods={"has_error": ()}
    ),
    "Result": ClassFacts(
        properties=(
            "is_final", "output_token_ids", "finish_reasons", "log_probs", "cum_log_probs",
            "sequence_index", "is_sequence_final", "decoding_iter", "request_perf_metrics",
        ),
    ),
    "RequestPerfMetrics": ClassFacts(properties=("kv_cache_metrics", "first_iter", "last_iter")),
    "KvCacheMetrics": ClassFacts(properties=_BLOCKS),
    "IterationStats": ClassFacts(
        properties=(
            "iter", "iter_latency_ms", "num_active_requests", "num_queued_requests",
            "num_completed_requests", "max_num_active_requests", "kv_cache_stats",
            "inflight_batching_stats",
        ),
    ),
    "KvCacheStats": ClassFacts(properties=_POOL),
    "InflightBatchingStats": ClassFacts(
        properties=(
            "num_scheduled_requests", "num_context_requests", "num_gen_requests",
            "num_paused_requests", "num_ctx_tokens", "avg_num_decoded_tokens_per_iter",
        ),
    ),
    "kv_cache.KVCacheEventManager": ClassFacts(methods={"get_latest_events": ("timeout_ms",)}),
    "kv_cache.KVCacheEvent": ClassFacts(
        properties=("event_id", "data", "window_size", "attention_dp_rank")
    ),
    "kv_cache.KVCacheCreatedData": ClassFacts(properties=("num_blocks_per_cache_level",)),
    "kv_cache.KVCacheStoredData": ClassFacts(properties=("parent_hash", "blocks")),
    "kv_cache.KVCacheStoredBlockData": ClassFacts(
        properties=("block_hash", "tokens", "lora_id", "cache_level", "priority")
    ),
    "kv_cache.KVCacheRemovedData": ClassFacts(properties=("block_hashes",)),
    "kv_cache.KVCacheUpdatedData": ClassFacts(properties=("block_hash", "cache_level", "priority")),
    "kv_cache.KVCacheEventDiffInt": ClassFacts(properties=("old_value", "new_value")),
    "UniqueToken": ClassFacts(properties=("token_id",)),
}  # fmt: skip

ENUMS: Mapping[str, tuple[str, ...]] = {
    "ModelType": ("DECODER_ONLY",),
    "BatchingType": ("INFLIGHT",),
    "CapacitySchedulerPolicy": ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"),
    "CommunicationType": ("MPI",),
    "CommunicationMode": ("LEADER", "ORCHESTRATOR"),
    "KvCacheTransferMode": ("DRAM",),
    "RequestType": ("REQUEST_TYPE_CONTEXT_AND_GENERATION",),
    "FinishReason": (
        "NOT_FINISHED",
        "END_ID",
        "STOP_WORDS",
        "LENGTH",
        "TIMED_OUT",
        "CANCELLED",
    ),
}

OPTIONAL = frozenset(
    {"Request(cache_salt_id)", "Request(lora_config)", "LoraConfig", "LoraConfig(task_id)"}
    | {"LoraConfig(weights)", "LoraConfig(config)"}
    | {f"SamplingConfig({name})" for name in _SAMPLING}
    | {f"SamplingConfig.{name}" for name in _SAMPLING}
)
"""Facts without which only requests that ask for the field are refused."""


def fact_names() -> Iterator[str]:
    """Every fact as `Class`, `Class(argument)`, `Class.property`, `Class.method(argument)` or
    `Enum.MEMBER`."""
    for name, facts in CLASSES.items():
        yield name
        for argument in (*facts.positional, *facts.arguments):
            yield f"{name}({argument})"
        for prop in (*facts.defaults, *facts.properties):
            yield f"{name}.{prop}"
        for method, arguments in facts.methods.items():
            yield f"{name}.{method}"
            for argument in arguments:
                yield f"{name}.{method}({argument})"
    for name, members in ENUMS.items():
        for member in members:
            yield f"{name}.{member}"
