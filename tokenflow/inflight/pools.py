"""How large the engine's KV pools are, and their allocation.

Owns the sizes and the errors of sizes. The memory is the runner's.
"""

from __future__ import annotations

import logging

from tokenflow.errors import ConfigError
from tokenflow.executor.api import ExecutorConfig, KvCacheConfig
from tokenflow.inflight.runner import Runner
from tokenflow.inflight.tiers import DEFAULT_MIN_PRIORITY, HostTier

logger = logging.getLogger("tokenflow")


def num_pool_blocks(config: KvCacheConfig, tokens_per_block: int) -> int:
    """Blocks of the device pool; raises ConfigError for a pool that this engine cannot have."""
    if config.max_tokens is None:
        raise ConfigError("kv_cache_config.max_tokens", "the embedded engine needs its pool size")
    if config.free_gpu_memory_fraction is not None:
        raise ConfigError("kv_cache_config.free_gpu_memory_fraction", "use max_tokens instead")
    if config.event_buffer_max_size < 0:
        raise ConfigError("kv_cache_config.event_buffer_max_size", "must be >= 0")
    if config.max_tokens < tokens_per_block:
        raise ConfigError(
            "kv_cache_config.max_tokens", f"holds no block of {tokens_per_block} tokens"
        )
    return config.max_tokens // tokens_per_block


def num_host_pool_blocks(config: KvCacheConfig, block_bytes: int) -> int:
    """Blocks of the host pool: 0 without one, and where nothing is kept for reuse.

    Raises ConfigError for sizes and thresholds that mean nothing. Less than one block is no error,
    as in TensorRT-LLM, but it is said.
    """
    size, threshold = config.host_cache_size or 0, config.secondary_offload_min_priority
    if size < 0:
        raise ConfigError("kv_cache_config.host_cache_size", f"must be >= 0, got {size}")
    if threshold is not None and not 0 <= threshold <= 100:
        raise ConfigError(
            "kv_cache_config.secondary_offload_min_priority",
            f"must be in [0, 100], got {threshold}",
        )
    if not (config.enable_block_reuse and config.onboard_blocks):
        return 0
    if 0 < size < block_bytes:
        logger.warning(
            "kv_cache_config.host_cache_size: %d bytes hold no KV block (%d bytes); there is no "
            "host tier",
            size,
            block_bytes,
        )
    return size // block_bytes


def allocate_pools(runner: Runner, config: ExecutorConfig, num_blocks: int) -> HostTier | None:
    """Allocates both pools; what is known of the host's, or None if there is none."""
    block_bytes = runner.kv_block_bytes(config.tokens_per_block)
    kv = config.kv_cache_config
    num_host_blocks = num_host_pool_blocks(kv, block_bytes)
    runner.allocate_kv(num_blocks, config.tokens_per_block, num_host_blocks)
    if config.kv_tiering and not num_host_blocks:
        raise ConfigError("kv_tiering", "needs host memory for the KV cache (host_cache_size)")
    if not num_host_blocks:
        return None
    threshold = kv.secondary_offload_min_priority
    return HostTier(
        num_blocks=num_host_blocks,
        transport=runner.transport,
        min_priority=DEFAULT_MIN_PRIORITY if threshold is None else threshold,
        inclusive=config.kv_tiering,
        overlap=config.overlap_copies,
        max_blocks_in_flight=max(1, config.max_copy_bytes_in_flight // block_bytes),
    )
