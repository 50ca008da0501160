"""One configuration, named once.

`ServingConfig` is the whole of it: the parameters of config.pbtxt, the flags of `tokenflow serve`
and the engine process all speak these names. Names that tensorrtllm_backend already has are kept.
A key that is not a field, or a value out of range, is a ConfigError that names it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from tokenflow.errors import ConfigError
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    SchedulerConfig,
)
from tokenflow.executor.trtllm_engine import LIMITS, built_limits

OFFLOAD_MIN_PRIORITY = 30
"""Retention priority from which the engine finds a block worth a host block."""

_PLACEHOLDER = re.compile(r"\$\{\w+\}")
_BATCH_POLICIES = {
    "guaranteed_no_evict": CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    "max_utilization": CapacitySchedulerPolicy.MAX_UTILIZATION,
}


def _field(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "low": low, "high": high}
    )


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Everything that can be set. Field metadata holds help, choices and bounds."""

    # engine
    engine: str = _field(
        "inflight", "engine behind the executor surface", choices=("inflight", "scripted", "trtllm")
    )
    gpt_model_path: str = _field(
        "", "what the engine loads: a Hugging Face checkpoint folder; trtllm: a built engine's"
    )
    tokenizer_dir: str = _field("", "folder with tokenizer.json (default: gpt_model_path)")
    dtype: str = _field("bfloat16", "weights and KV", choices=("bfloat16", "float32"))
    device: str = _field("cpu", "where the model runs", choices=("cpu", "cuda"))
    num_threads: int = _field(
        0, "threads of the model on a CPU (0 = all cores it may use)", low=0, high=1024
    )
    engine_process: bool = _field(True, "run the engine in a process of its own")
    scripted_step_s: float = _field(0.0, "scripted engine: seconds of one step", low=0, high=60)
    gpu_device_ids: str = _field(
        "", "trtllm: GPU of each rank, between commas (empty = the first ones)"
    )
    num_nodes: int = _field(
        1, "trtllm: machines of the engine (several: under mpirun)", low=1, high=1024
    )
    executor_worker_path: str = _field(
        "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "trtllm: program of the workers of an engine of several ranks on one machine",
    )
    lora_cache_optimal_adapter_size: int = _field(
        8, "trtllm: adapter size (rank) that pages of the LoRA cache fit best", low=1, high=4096
    )
    lora_cache_max_adapter_size: int = _field(
        64, "trtllm: largest adapter size (rank) that the LoRA cache takes", low=1, high=4096
    )
    lora_cache_gpu_memory_fraction: float = _field(
        0.0,
        "trtllm: share of the GPU memory left after engine and KV for the LoRA cache "
        "(0 = TensorRT-LLM's default)",
        low=0,
        high=0.99,
    )
    lora_cache_host_memory_bytes: int = _field(
        0, "trtllm: host LoRA cache, bytes (0 = TensorRT-LLM's default)", low=0, high=1 << 44
    )
    lora_prefetch_dir: str = _field(
        "", "trtllm: folder of LoRA adapters that are loaded with the engine (empty = none)"
    )
    # engine limits
    max_batch_size: int = _field(8, "sequences in a batch", low=1, high=4096)
    max_num_tokens: int = _field(512, "tokens computed in one iteration", low=16, high=1 << 20)
    max_seq_len: int = _field(2048, "prompt and output of one request, tokens", low=2, high=1 << 24)
    tokens_per_block: int = _field(32, "tokens in a KV block", low=1, high=1024)
    max_tokens_in_paged_kv_cache: int = _field(
        8192,
        "device KV pool, tokens (trtllm: 0 = what kv_cache_free_gpu_mem_fraction gives)",
        low=0,
        high=1 << 30,
    )
    kv_cache_free_gpu_mem_fraction: float = _field(
        0.9,
        "trtllm: share of the GPU memory that is free after the engine is loaded for the device "
        "KV pool, at most",
        low=0.01,
        high=0.99,
    )
    batch_scheduler_policy: str = _field(
        "auto",
        "how the engine takes blocks: the whole length at the start, or as they are needed "
        "(auto = as needed with scheduling_policy tokenflow and chunked context, else the former)",
        choices=("auto", *_BATCH_POLICIES),
    )
    enable_kv_cache_reuse: bool = _field(
        True, "keep KV blocks for reuse (scheduling_policy tokenflow needs it)"
    )
    enable_chunked_context: bool = _field(True, "prefill long prompts in chunks")
    kv_cache_host_memory_bytes: int = _field(
        0, "host memory behind the device KV pool, bytes (0 = none)", low=0, high=1 << 44
    )
    kv_cache_onboard_blocks: bool = _field(True, "use the host memory of the KV cache")
    kv_tiering: bool = _field(
        False,
        "copy KV to the host ahead of need and bring it back before it is due; only engines that "
        "can be told to (off = TensorRT-LLM's rules: a copy when the device block is wanted)",
    )
    kv_event_buffer_max_size: int = _field(
        16384,
        "KV events kept for the runtime's mirror of the cache (0 = work from an estimate)",
        low=0,
        high=1 << 24,
    )
    # scheduling
    scheduling_policy: str = _field(
        "tokenflow", "who runs, who is paused", choices=("tokenflow", "fcfs-reserve")
    )
    default_read_rate: float = _field(
        6.0, "tokens/s of a reader that declares no read_rate", low=0.01, high=10_000
    )
    slack_margin_s: float = _field(0.5, "safety margin of slack in seconds", low=0, high=60)
    conservativeness: float = _field(
        1.5, "multiple of a pause's round trip that slack must cover", low=1, high=100
    )
    plan_interval_s: float = _field(0.05, "time between two plans", low=0.001, high=10)
    min_quantum_s: float = _field(
        1.0, "time a stream runs at least between two pauses", low=0, high=60
    )
    anticipate_arrivals: bool = _field(
        True, "make room for the arrivals that their moving averages announce"
    )
    learn_output_lengths: bool = _field(
        True,
        "share out what is made in excess by how long answers are expected to be, as others ended, "
        "not by max_tokens",
    )
    admit_by_expected_lengths: bool = _field(
        False,
        "let newcomers in by how long answers are expected to be (needs learn_output_lengths), not "
        "by max_tokens: sooner, but readers stall where answers become longer than they used to be",
    )
    lease_tokens: int = _field(
        0,
        "tokens that a request may generate per enqueue (0 = all it asks for)",
        low=0,
        high=1 << 24,
    )
    max_queue_size: int = _field(256, "requests that may wait for their start", low=1, high=1 << 20)
    max_queue_delay_s: float = _field(
        60.0, "longest wait for a start before 'overloaded'", low=0.01, high=86_400
    )
    max_hold_s: float = _field(
        600.0, "longest time in all that a client may hold a stream paused", low=0.01, high=86_400
    )
    # engine loss
    engine_stall_timeout_s: float = _field(
        30.0,
        "time without an iteration after which a busy engine counts as stuck",
        low=1,
        high=3600,
    )
    engine_load_timeout_s: float = _field(
        1800.0, "longest time from the start of an engine to its readiness", low=1, high=86_400
    )
    max_engine_restarts: int = _field(
        8,
        "engine losses within engine_restart_window_s that are made good; one more ends serving",
        low=0,
        high=1000,
    )
    engine_restart_window_s: float = _field(
        300.0, "time over which engine losses are counted", low=1, high=86_400
    )
    # server
    default_max_tokens: int = _field(
        128, "max_tokens of a request that leaves it out", low=1, high=1 << 24
    )
    exclude_input_in_output: bool = _field(
        True, "non-streaming answers leave the prompt out unless the request says otherwise"
    )
    cancellation_check_period_ms: int = _field(
        100, "time between two looks for clients that left", low=1, high=60_000
    )
    stats_check_period_ms: int = _field(100, "time between metric updates", low=1, high=60_000)
    trace_path: str = _field("", "file that gets one JSON line per scheduling event ('' = none)")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if meta["choices"] and value not in meta["choices"]:
                raise ConfigError(f.name, f"must be one of {meta['choices']}, got {value!r}")
            low, high = meta["low"], meta["high"]
            if low is not None and not low <= value <= high:
                raise ConfigError(f.name, f"must be in [{low}, {high}], got {value!r}")
        if self.scheduling_policy == "tokenflow" and not self.enable_kv_cache_reuse:
            raise ConfigError(
                "enable_kv_cache_reuse",
                "must be true with scheduling_policy tokenflow: a pause keeps its KV there",
            )
        if self.scheduling_policy != "tokenflow" and self.kv_tiering:
            raise ConfigError(
                "kv_tiering",
                "needs scheduling_policy tokenflow: nobody else says what is to be copied",
            )
        if self.admit_by_expected_lengths and not self.learn_output_lengths:
            raise ConfigError(
                "admit_by_expected_lengths",
                "needs learn_output_lengths: else nothing is known but max_tokens",
            )
        if self.lora_cache_optimal_adapter_size > self.lora_cache_max_adapter_size:
            raise ConfigError(
                "lora_cache_optimal_adapter_size",
                f"{self.lora_cache_optimal_adapter_size} is more than lora_cache_max_adapter_size "
                f"{self.lora_cache_max_adapter_size}",
            )
        is_engines_own = self.engine == "trtllm" and not self.max_tokens_in_paged_kv_cache
        if self.max_tokens_in_paged_kv_cache < self.tokens_per_block and not is_engines_own:
            raise ConfigError(
                "max_tokens_in_paged_kv_cache",
                f"holds no block of {self.tokens_per_block} tokens",
            )

    def executor_config(self) -> ExecutorConfig:
        """The engine's part, in TensorRT-LLM's terms."""
        batch_policy = self.batch_scheduler_policy
        if batch_policy == "auto":  # by the figures of perf/lease.py
            # Without chunks a long request could not start again where the engine pauses it itself.
            as_needed = self.scheduling_policy == "tokenflow" and self.enable_chunked_context
            batch_policy = "max_utilization" if as_needed else "guaranteed_no_evict"
        return ExecutorConfig(
            scheduler_config=SchedulerConfig(
                capacity_scheduler_policy=_BATCH_POLICIES[batch_policy]
            ),
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=self.enable_kv_cache_reuse,
                max_tokens=self.max_tokens_in_paged_kv_cache,
                host_cache_size=self.kv_cache_host_memory_bytes,
                onboard_blocks=self.kv_cache_onboard_blocks,
                secondary_offload_min_priority=OFFLOAD_MIN_PRIORITY,
                event_buffer_max_size=(
                    self.kv_event_buffer_max_size if self.enable_kv_cache_reuse else 0
                ),
            ),
            kv_tiering=self.kv_tiering,
            enable_chunked_context=self.enable_chunked_context,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            tokens_per_block=self.tokens_per_block,
            max_seq_len=self.max_seq_len,
        )


def parse_parameters(parameters: Mapping[str, str]) -> ServingConfig:
    """Build a config from strings (config.pbtxt parameters, flags, environment of the engine).

    An empty value or an unfilled `${...}` placeholder means the default, as in
    tensorrtllm_backend; with engine trtllm the limits that are left out are those that the engine
    was built for, and its KV pool is as large as it gets. Raises ConfigError naming the key for
    anything unknown or malformed.
    """
    kinds = get_type_hints(ServingConfig)
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        if key not in kinds:
            raise ConfigError(key, "unknown parameter")
        if text == "" or _PLACEHOLDER.fullmatch(text):
            continue
        values[key] = _parse(key, text, kinds[key])
    if values.get("engine") == "trtllm":
        values.setdefault("max_tokens_in_paged_kv_cache", 0)
        if not values.keys() >= set(LIMITS):
            values = {**built_limits(values.get("gpt_model_path", "")), **values}
    return ServingConfig(**values)


def format_parameters(config: ServingConfig) -> dict[str, str]:
    """The strings that `parse_parameters` turns back into the same config."""
    result: dict[str, str] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        result[f.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return result


def _parse(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("true", "1"):
            return True
        if lowered in ("false", "0"):
            return False
        raise ConfigError(key, f"must be true or false, got {text!r}")
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        kind_text = "a whole number" if kind is int else "a number"
        raise ConfigError(key, f"must be {kind_text}, got {text!r}") from None
