"""Our values <-> the bindings' values, one at a time; no state, no engine.

Owns what of TensorRT-LLM's objects is written and read. Facts that matter here:
- None is refused where a default would do, so what is unset is left out;
- durations are `timedelta`, and KvCacheRetentionConfig is given all five arguments: the default of
  `directory` does not fit its own type;
- what only some versions have (`cache_salt_id`, `prompt_ignore_length`, …) is looked for, and a
  request that asks for it elsewhere is refused by the field's name before anything is enqueued;
- requests always stream: one that does not loses all its tokens when it is cancelled;
- an embedding bias is a tensor of the vocabulary's size; torch is imported for the first one;
- weights of a LoRA adapter are taken in the model's own dtype only, so they are converted to it; an
  engine that was built without LoRA would ignore the adapter, so such a request is refused.
"""

from __future__ import annotations

from typing import Any

from tokenflow.errors import InvalidRequestError
from tokenflow.executor.api import (
    FinishReason,
    InflightBatchingStats,
    KvCacheMetrics,
    KvCacheRetentionConfig,
    KvCacheStats,
    Request,
    SamplingConfig,
)
from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tokenflow.executor.lora import LoraConfig
from tokenflow.executor.trtllm_engine import LoraBuild

_SAMPLING_FIELDS = tuple(SamplingConfig.__struct_fields__)
_BATCHING_FIELDS = tuple(InflightBatchingStats.__struct_fields__)
_KV_FIELDS = tuple(KvCacheStats.__struct_fields__)
_METRICS_FIELDS = tuple(KvCacheMetrics.__struct_fields__)
_NUM_RETENTION_PRIORITIES = 101


class RequestMaker:
    """Makes the binding's Request.

    vocab_size, logits_dtype: of the engine, for a bias of the logits. lora: what adapters it was
    built for; None = for none.
    """

    def __init__(
        self, bindings: Any, vocab_size: int, logits_dtype: str, lora: LoraBuild | None = None
    ) -> None:
        self._bindings = bindings
        self._vocab_size = vocab_size
        self._logits_dtype = logits_dtype
        self._lora = lora
        self._sampling_fields = frozenset(
            name for name in _SAMPLING_FIELDS if hasattr(bindings.SamplingConfig, name)
        )
        self._request_fields = frozenset(
            name for name in ("cache_salt_id", "lora_config") if hasattr(bindings.Request, name)
        )

    def make(self, request: Request) -> Any:
        """The binding's Request. Raises InvalidRequestError naming the field that this version of
        TensorRT-LLM, or its Executor, does not have or does not take."""
        salt = self._probed("cache_salt_id", request.cache_salt_id)
        sampling, bias = self._sampling(request.sampling_config), self._bias(request)
        lora = self._lora_config(request.lora_config)
        try:
            optional: dict[str, Any] = {
                "end_id": request.end_id,
                "pad_id": request.pad_id,
                "bad_words": [list(word) for word in request.bad_words] or None,
                "stop_words": [list(word) for word in request.stop_words] or None,
                "embedding_bias": bias,
                "kv_cache_retention_config": self._retention(request.kv_cache_retention_config),
                "client_id": request.client_id,
                "cache_salt_id": salt,
                "lora_config": lora,
            }
            return self._bindings.Request(
                list(request.input_token_ids),
                request.max_tokens,
                streaming=True,
                sampling_config=sampling,
                output_config=self._bindings.OutputConfig(
                    return_log_probs=request.output_config.return_log_probs,
                    exclude_input_from_output=True,
                    return_perf_metrics=request.output_config.return_perf_metrics,
                ),
                priority=request.priority,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except (TypeError, RuntimeError) as error:
            raise InvalidRequestError("request", _first_line(error)) from error

    def _sampling(self, sampling: SamplingConfig) -> Any:
        num_sequences = sampling.num_return_sequences or 1
        if num_sequences > 1:  # their tokens would come under one id, and be taken for one's
            raise InvalidRequestError(
                "sampling_config.num_return_sequences", f"only 1 is supported, got {num_sequences}"
            )
        fields = {}
        for name in _SAMPLING_FIELDS:
            value = getattr(sampling, name)
            if value is None:
                continue
            if name not in self._sampling_fields:
                raise InvalidRequestError(
                    f"sampling_config.{name}", "this version of TensorRT-LLM does not have it"
                )
            fields[name] = value
        try:
            return self._bindings.SamplingConfig(**fields)
        except (TypeError, RuntimeError) as error:
            names = ", ".join(fields)
            raise InvalidRequestError(
                "sampling_config", f"TensorRT-LLM refuses ({names}): {_first_line(error)}"
            ) from error

    def _probed(self, name: str, value: Any) -> Any:
        if value is not None and name not in self._request_fields:
            raise InvalidRequestError(name, "this version of TensorRT-LLM does not have it")
        return value

    def _lora_config(self, given: LoraConfig | None) -> Any:
        if given is None:
            return None
        if self._lora is None:
            raise InvalidRequestError("lora_task_id", "the engine was built without LoRA")
        self._probed("lora_config", given)
        if not hasattr(self._bindings, "LoraConfig"):
            raise InvalidRequestError(
                "lora_config", "this version of TensorRT-LLM does not have it"
            )
        try:
            tensors = _lora_tensors(given, self._lora)
            return self._bindings.LoraConfig(given.task_id, **tensors)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError("lora_config", _first_line(error)) from error

    def _retention(self, retention: KvCacheRetentionConfig | None) -> Any:
        if retention is None:
            return None
        kind = self._bindings.KvCacheRetentionConfig
        ranges = retention.token_range_retention_configs
        priorities = [r.priority for r in ranges] + [retention.decode_retention_priority]
        for priority in priorities:
            if not 0 <= priority < _NUM_RETENTION_PRIORITIES:
                raise InvalidRequestError(
                    "kv_cache_retention_config", f"priorities are in [0, 100], got {priority}"
                )
        return kind(
            [
                kind.TokenRangeRetentionConfig(
                    r.token_start, r.token_end, r.priority, r.duration_ms
                )
                for r in ranges
            ],
            retention.decode_retention_priority,
            retention.decode_duration_ms,
            self._bindings.KvCacheTransferMode.DRAM,
            "",
        )

    def _bias(self, request: Request) -> Any:
        """float [vocab_size], 0 where nothing is added."""
        if not request.embedding_bias:
            return None
        import torch

        bias = torch.zeros(self._vocab_size, dtype=getattr(torch, self._logits_dtype))
        for token_id, value in request.embedding_bias:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    "embedding_bias",
                    f"token ids are in [0, {self._vocab_size}), got {token_id}",
                )
            bias[token_id] = value
        return bias


def _lora_tensors(given: LoraConfig, built: LoraBuild) -> dict[str, Any]:
    """`weights` and `config` as tensors; none for an adapter that is named by its id alone. Raises
    InvalidRequestError for one that is larger than the engine was built for."""
    if given.weights is None or given.config is None:
        if given.weights is not given.config:
            raise InvalidRequestError("lora_config", "weights and config come together")
        return {}
    import torch

    rows = given.config.array()
    largest = int(rows[:, 2].max())
    if built.max_adapter_size and largest > built.max_adapter_size:
        raise InvalidRequestError(
            "lora_config",
            f"adapter size {largest}, the engine was built for {built.max_adapter_size}",
        )
    weights = torch.from_numpy(given.weights.array().copy())
    return {
        "weights": weights.to(getattr(torch, built.dtype)),
        "config": torch.from_numpy(rows.copy()),
    }


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def finish_reason(reason: Any) -> FinishReason:
    """Ours, by name: the binding's enum is no number."""
    return FinishReason[reason.name]


def kv_cache_stats(given: Any) -> KvCacheStats:
    """Ours: the same fields, with TensorRT-LLM's ways of counting."""
    return KvCacheStats(**{name: getattr(given, name) for name in _KV_FIELDS})


def batching_stats(given: Any) -> InflightBatchingStats:
    """Ours: the same fields."""
    return InflightBatchingStats(**{name: getattr(given, name) for name in _BATCHING_FIELDS})


def kv_cache_metrics(given: Any) -> KvCacheMetrics:
    """Ours: the same fields."""
    return KvCacheMetrics(**{name: getattr(given, name) for name in _METRICS_FIELDS})


class EventReader:
    """Makes our KV events of the binding's. The kind of data is known by its class."""

    def __init__(self, bindings: Any) -> None:
        self._kinds = bindings.kv_cache

    def read(self, event: Any) -> KVCacheEvent:
        """The same event, as a value of ours."""
        return KVCacheEvent(
            event.event_id, self._data(event.data), event.window_size, event.attention_dp_rank
        )

    def _data(self, data: Any) -> KVCacheEventData:
        kinds = self._kinds
        if isinstance(data, kinds.KVCacheStoredData):
            return KVCacheStoredData(data.parent_hash, [_stored(block) for block in data.blocks])
        if isinstance(data, kinds.KVCacheRemovedData):
            return KVCacheRemovedData(list(data.block_hashes))
        if isinstance(data, kinds.KVCacheCreatedData):
            return KVCacheCreatedData(list(data.num_blocks_per_cache_level))
        return KVCacheUpdatedData(data.block_hash, _diff(data.cache_level), _diff(data.priority))


def _stored(block: Any) -> KVCacheStoredBlockData:
    return KVCacheStoredBlockData(
        block.block_hash,
        [token.token_id for token in block.tokens],
        block.cache_level,
        block.priority,
        block.lora_id,
    )


def _diff(diff: Any) -> KVCacheEventDiffInt | None:
    return None if diff is None else KVCacheEventDiffInt(diff.old_value, diff.new_value)
