"""LoRA adapters, and engines that were built for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokenflow.executor.lora import LoraConfig, TensorData

LORA_PLUGIN = {"lora_plugin": "auto"}
LORA_BUILD = {"lora_config": {"lora_dir": [], "max_lora_rank": 16}}
ROW_SIZE = 24


def adapter(task_id: int, value: float = 1.0, num_rows: int = 4) -> LoraConfig:
    """Of rank 8, in `num_rows` modules; its weights are all `value`."""
    rows = [[module, layer, 8] for layer in range(num_rows // 2) for module in (1, 2)]
    return LoraConfig(
        task_id=task_id,
        weights=TensorData.of(np.full((num_rows, ROW_SIZE), value, dtype=np.float16)),
        config=TensorData.of(np.array(rows, dtype=np.int32)),
    )


ADAPTER = adapter(7)
ADAPTER_BYTES = 4 * ROW_SIZE * 2
"""Of its weights, in 16 bits."""


def by_id(task_id: int) -> LoraConfig:
    """The same one, as later requests name it."""
    return LoraConfig(task_id=task_id)


def lora_settings(prefetch_dir: Path | str = "") -> dict[str, Any]:
    """Every setting of the LoRA cache, none at its default."""
    return {
        "lora_cache_optimal_adapter_size": 4,
        "lora_cache_max_adapter_size": 16,
        "lora_cache_gpu_memory_fraction": 0.05,
        "lora_cache_host_memory_bytes": 1 << 20,
        "lora_prefetch_dir": str(prefetch_dir),
    }
