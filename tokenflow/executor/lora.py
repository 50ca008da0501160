"""LoRA adapters of requests, as values that can be sent to an engine's process.

Owns `LoraConfig` (the binding's, with tensors as bytes) and how large the weights of one may be.

What callers rely on (TensorRT-LLM behaviour, restated):
- the engine keeps adapters in a cache of its own, by `task_id`. A request with weights puts its
  adapter there unless one of that id is there already; a request without needs it to be there, and
  else ends with an error response that says so (`is_cache_miss`);
- the cache forgets adapters that nobody uses when it needs the room, so that an id which was there
  once may be missing later;
- `task_id` is a part of the key of every KV block: KV of one adapter is never found by another.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

MAX_WEIGHT_BYTES = 48 << 20
"""Of one adapter: it travels in one message with its request (`channel.MAX_MESSAGE_BYTES`). Larger
ones come from `lora_prefetch_dir`."""


class TensorData(msgspec.Struct, frozen=True):
    """An array. dtype: its numpy name. data: its numbers in C order, little-endian."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[np.generic]) -> TensorData:
        """A copy of `array`."""
        return cls(tuple(array.shape), array.dtype.name, array.tobytes())

    def array(self) -> npt.NDArray[np.generic]:
        """The array, read-only. Raises ValueError for data of another size than the shape says."""
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)

    def __repr__(self) -> str:
        """Without the data: it is megabytes."""
        return f"TensorData(shape={self.shape}, dtype={self.dtype!r}, {len(self.data)} bytes)"


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a request; weights and config come together, or neither does.

    task_id: uint64 by which the engine knows the adapter.
    weights: float16 [num_rows, row_size], a row for each adapted module of each layer: its two
        matrices one behind the other, padded to the longest row.
    config: int32 [num_rows, 3]: module id, layer, adapter size (rank) of each row.
    """

    task_id: int
    weights: TensorData | None = None
    config: TensorData | None = None

    @property
    def has_weights(self) -> bool:
        """False for an adapter that the engine must have already."""
        return self.weights is not None


def is_cache_miss(message: str) -> bool:
    """True for the error of a request without weights whose adapter the engine does not have."""
    return "LoRA task" in message and "not found in cache" in message
