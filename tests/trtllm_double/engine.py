"""The engine of a folder: its limits against the ExecutorConfig, and the core that computes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tests.trtllm_double.events import CORE_BUFFER
from tests.trtllm_double.folder import KV_BYTES_PER_TOKEN, make_runner, read_behind
from tests.trtllm_double.lora import LoraCache
from tokenflow.executor import api
from tokenflow.inflight.executor import InflightExecutor

logger = logging.getLogger("trtllm_double")

_DEFAULT_FRACTION = 0.9


class Engine:
    """What TensorRT-LLM makes of a folder and a config. Raises RuntimeError for what it refuses.

    is_chunked: prompts are computed in chunks. world_size: ranks that the engine was built for.
    """

    def __init__(self, folder: Path, config: Any, model_type: str) -> None:
        if model_type != "DECODER_ONLY":
            raise RuntimeError(f"the double has no {model_type} models")
        try:
            built = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise RuntimeError(f"Cannot read the engine's config.json: {error}") from None
        self._folder, self._config = folder, config
        self.behind = read_behind(folder)
        self._build = built["build_config"]
        self._plugins = self._build["plugin_config"]
        mapping = built["pretrained_config"]["mapping"]
        self.world_size = mapping["tp_size"] * mapping["pp_size"] * mapping["cp_size"]
        self.vocab_size = built["pretrained_config"]["vocab_size"]
        self.lora = LoraCache(built, config.get("peft_cache_config"))
        self.max_seq_len = self._build["max_seq_len"]
        self._check()
        has_paged_context = self._plugins["use_paged_context_fmha"]
        self.is_chunked = config.get("enable_chunked_context") and has_paged_context
        reuse = config.get("kv_cache_config").get("enable_block_reuse")
        self._reuses = reuse and has_paged_context and not self._build["gather_context_logits"]
        if reuse and not self._reuses:
            logger.warning("KV cache reuse is disabled: the engine was not built for it")

    def _check(self) -> None:
        config = self._config
        if config.get("batching_type").name != "INFLIGHT":
            raise RuntimeError("only in-flight batching is supported")
        for name in ("max_batch_size", "max_beam_width"):
            wanted, limit = config._values[name], self._build[name]
            if wanted is not None and wanted > limit:
                raise RuntimeError(f"Runtime configured {name} {wanted} exceeds engine's {limit}")
        if config.get("scheduler_config").get("capacity_scheduler_policy").name == "STATIC_BATCH":
            raise RuntimeError("the double has no STATIC_BATCH")
        if config.get("request_stats_max_iterations"):
            raise RuntimeError("the double keeps no request statistics")

    def _num_pool_tokens(self, block_bytes: int) -> int:
        """The smaller one of what is asked for in tokens and as a share of free memory."""
        pool, size = self._config.get("kv_cache_config"), self._plugins["tokens_per_block"]
        max_tokens = pool._values["max_tokens"]
        fraction = pool._values["free_gpu_memory_fraction"]
        if fraction is None and max_tokens is not None:
            return int(max_tokens)
        free = int(self.behind.free_gpu_memory_bytes * (fraction or _DEFAULT_FRACTION))
        num_tokens = free // block_bytes * size
        return num_tokens if max_tokens is None else min(num_tokens, max_tokens)

    def start(self) -> InflightExecutor:
        """The core, running."""
        config, pool = self._config, self._config.get("kv_cache_config")
        runner = make_runner(self._folder, self.behind)
        size = self._plugins["tokens_per_block"]
        block_bytes = runner.kv_block_bytes(size)
        assert self.behind.runner == "torch" or block_bytes == size * KV_BYTES_PER_TOKEN
        policy = config.get("scheduler_config").get("capacity_scheduler_policy").name
        has_events = self._reuses and pool.get("event_buffer_max_size") > 0
        return InflightExecutor(
            runner,
            api.ExecutorConfig(
                scheduler_config=api.SchedulerConfig(
                    capacity_scheduler_policy=api.CapacitySchedulerPolicy[policy]
                ),
                kv_cache_config=api.KvCacheConfig(
                    enable_block_reuse=self._reuses,
                    max_tokens=self._num_pool_tokens(block_bytes),
                    host_cache_size=pool._values["host_cache_size"],
                    onboard_blocks=pool.get("onboard_blocks"),
                    secondary_offload_min_priority=pool._values["secondary_offload_min_priority"],
                    event_buffer_max_size=CORE_BUFFER if has_events else 0,
                    enable_partial_reuse=pool._values["enable_partial_reuse"],
                    copy_on_partial_reuse=pool._values["copy_on_partial_reuse"],
                ),
                enable_chunked_context=self.is_chunked,
                iter_stats_max_iterations=config.get("iter_stats_max_iterations"),
                max_batch_size=config._values["max_batch_size"] or self._build["max_batch_size"],
                max_num_tokens=min(
                    config._values["max_num_tokens"] or self._build["max_num_tokens"],
                    self._build["max_num_tokens"],
                ),
                max_queue_size=config._values["max_queue_size"],
                tokens_per_block=size,
                max_seq_len=self.max_seq_len,
            ),
        )
