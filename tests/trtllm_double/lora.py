"""LoRA in the double: which adapters its engine has, and whose KV is whose.

Owns the adapter cache (by task id, bounded by the bytes of `PeftCacheConfig.host_cache_size`) and
what TensorRT-LLM says when an adapter is not in it. The core computes no adapters: tokens are those
of the plain model. But it keeps the KV of each (adapter, salt) apart, under a salt of its own, and
events name the adapter of each block.

Read in TensorRT-LLM's sources: the message of a miss; weights in the model's own dtype only; config
rows of three numbers; adapter sizes up to `max_lora_rank`. An engine that was built without LoRA
ignores the adapter without a word there; the double refuses it, so that no caller gets away with
it. Inferred: weights under an id that is there are ignored, the adapter that was not used longest
goes first, and what `lora_prefetch_dir` looks like (a folder per id). Not modelled: adapters in use
stay, and a cache that is full of those is an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenflow.executor.kv_api import KVCacheEvent, KVCacheRemovedData, KVCacheStoredData
from tokenflow.inflight.kv_events import block_hash
from tokenflow.inflight.reuse_tree import TreeNode

_DEFAULT_HOST_BYTES = 1 << 30
_PREFETCHED_BYTES = 1


class LoraCache:
    """built: config.json of the engine. peft: the PeftCacheConfig that it was started with."""

    def __init__(self, built: Mapping[str, Any], peft: Any) -> None:
        build = built["build_config"]
        self._has_lora = bool(build["plugin_config"].get("lora_plugin"))
        self._max_rank = (build.get("lora_config") or {}).get("max_lora_rank", 64)
        self._dtype = built["pretrained_config"]["dtype"]
        self._max_bytes = peft._values["host_cache_size"] or _DEFAULT_HOST_BYTES
        self._sizes: OrderedDict[int, int] = OrderedDict()
        folder = peft._values["lora_prefetch_dir"]
        if folder:
            self._sizes.update((int(p.name), _PREFETCHED_BYTES) for p in Path(folder).iterdir())
        self._salts: dict[tuple[int, int | None], int] = {}
        self._owners: dict[int, int] = {}  # adapter of each block by its hash

    def take(self, lora: Any) -> str | None:
        """A request came with this LoraConfig (None: without one); its error, or None."""
        if lora is None:
            return None
        task_id, weights, config = (lora._values[n] for n in ("task_id", "weights", "config"))
        if not self._has_lora:
            return "the engine was not built with LoRA"
        if (weights is None) != (config is None):
            return "Expected lora weights and lora config together"
        if task_id in self._sizes:
            self._sizes.move_to_end(task_id)
            return None if weights is None else self._refusal(weights, config)
        if weights is None:
            return f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
        error = self._refusal(weights, config)
        if error is None:
            self._sizes[task_id] = weights.nbytes
            while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
                self._sizes.popitem(last=False)
        return error

    def _refusal(self, weights: Any, config: Any) -> str | None:
        if str(weights.dtype) != f"torch.{self._dtype}":
            return "Expected lora weights to be the same data type as base model"
        if str(config.dtype) != "torch.int32" or config.ndim != 2 or config.shape[1] != 3:
            return "Expected lora config to be int32 [rows, 3]"
        if weights.ndim != 2 or len(weights) != len(config):
            return "Expected lora weights and lora config to have the same number of rows"
        if int(config[:, 2].max()) > self._max_rank:
            return f"Expected adapter sizes up to {self._max_rank}"
        return None

    def salt(self, lora: Any, cache_salt_id: int | None) -> int | None:
        """What the core keeps the KV of such a request under."""
        if lora is None:
            return cache_salt_id
        key = (lora._values["task_id"], cache_salt_id)
        return self._salts.setdefault(key, -1 - len(self._salts))

    def mark(self, event: KVCacheEvent) -> KVCacheEvent:
        """`event` of the core, with the adapter of each block."""
        data = event.data
        if isinstance(data, KVCacheRemovedData):
            for name in data.block_hashes:
                self._owners.pop(name, None)
        if not isinstance(data, KVCacheStoredData) or not data.blocks:
            return event
        if data.parent_hash is None:
            owner = self._owner_of_root(data.blocks[0])
        else:
            owner = self._owners.get(data.parent_hash)
        if owner is None:
            return event
        self._owners.update(dict.fromkeys((block.block_hash for block in data.blocks), owner))
        blocks = [msgspec.structs.replace(block, lora_id=owner) for block in data.blocks]
        return msgspec.structs.replace(event, data=KVCacheStoredData(data.parent_hash, blocks))

    def _owner_of_root(self, block: Any) -> int | None:
        """The salt is a part of the hash."""
        for (task_id, _), salt in self._salts.items():
            if block_hash(TreeNode(), tuple(block.tokens), salt) == block.block_hash:
                return task_id
        return None
