"""The LoRA inputs of a request: lora_task_id, lora_weights, lora_config.

Owns their checks. Pure. Names, shapes and types are those of tensorrtllm_backend: UINT64 [1, 1],
FP16 [1, num_rows, row_size] and INT32 [1, num_rows, 3] (module id, layer, adapter size). The first
request of an adapter brings all three; later ones need the id alone. Weights stay FP16 up to the
engine, which gets them in the type it was built with. An empty array is as good as none.
"""

from __future__ import annotations

import numpy as np

from tokenflow.config import ServingConfig
from tokenflow.errors import InvalidRequestError
from tokenflow.executor.lora import MAX_WEIGHT_BYTES, LoraConfig, TensorData
from triton_backend.fields import Fields, Tensor

_NAMES = ("lora_task_id", "lora_weights", "lora_config")
_COLUMNS = ("module id", "layer", "adapter size")


def read_lora(fields: Fields, config: ServingConfig) -> LoraConfig | None:
    """The adapter that a request asks for, or None. Raises InvalidRequestError for an engine that
    has no LoRA, for inputs without those they need, and for shapes and values out of range."""
    given = [name for name in _NAMES if fields.size(name)]
    if not given:
        return None
    if config.engine != "trtllm":
        raise InvalidRequestError(given[0], f"the {config.engine} engine has no LoRA; leave it out")
    task_id = fields.unsigned("lora_task_id") if "lora_task_id" in given else None
    if task_id is None:
        raise InvalidRequestError(given[0], "needs lora_task_id")
    if len(given) == 1:
        return LoraConfig(task_id=task_id)
    if len(given) < len(_NAMES):
        missing = next(name for name in _NAMES if name not in given)
        raise InvalidRequestError(given[1], f"needs {missing}")
    weights = fields.matrix("lora_weights", "e")
    rows = fields.matrix("lora_config", "i", num_columns=len(_COLUMNS))
    _check_weights(weights)
    _check_rows(rows, len(weights), config.lora_cache_max_adapter_size)
    return LoraConfig(task_id=task_id, weights=TensorData.of(weights), config=TensorData.of(rows))


def _check_weights(weights: Tensor) -> None:
    if weights.nbytes > MAX_WEIGHT_BYTES:
        raise InvalidRequestError(
            "lora_weights",
            f"{weights.nbytes} bytes, at most {MAX_WEIGHT_BYTES} come with a request; larger "
            "adapters come from the server's lora_prefetch_dir",
        )
    if not np.isfinite(weights).all():
        raise InvalidRequestError("lora_weights", "must hold finite numbers")


def _check_rows(rows: Tensor, num_weight_rows: int, max_adapter_size: int) -> None:
    if len(rows) != num_weight_rows:
        raise InvalidRequestError(
            "lora_config", f"{len(rows)} rows for {num_weight_rows} rows of lora_weights"
        )
    lows = (0, 0, 1)
    for column, (name, low) in enumerate(zip(_COLUMNS, lows, strict=True)):
        smallest = int(rows[:, column].min())
        if smallest < low:
            raise InvalidRequestError("lora_config", f"{name} must be >= {low}, got {smallest}")
    largest = int(rows[:, -1].max())
    if largest > max_adapter_size:
        raise InvalidRequestError(
            "lora_config",
            f"adapter size {largest}; lora_cache_max_adapter_size is {max_adapter_size}",
        )
