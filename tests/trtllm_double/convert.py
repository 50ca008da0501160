"""Values of the double <-> values of the in-flight core.

Nothing that the binding does not have comes out of here: the core's own extras (tokens reused, KV
tiers, instants) stay behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from tokenflow.executor import api, kv_api

Classes = Mapping[str, type]

_UNSUPPORTED = (
    "position_ids", "external_draft_tokens_config", "prompt_tuning_config", "multimodal_input",
    "multimodal_embedding", "mrope_config", "lookahead_config", "logits_post_processor_name",
    "logits_post_processor", "encoder_input_token_ids", "context_phase_params",
    "encoder_input_features", "encoder_output_length", "cross_attention_mask", "eagle_config",
    "skip_cross_attn_blocks", "guided_decoding_params", "language_adapter_uid",
)  # fmt: skip
_SAMPLING = tuple(api.SamplingConfig.__struct_fields__)
_FORWARD_ERROR = "Encountered an error in forward function: "


def core_request(request: Any, vocab_size: int) -> api.Request:
    """What the core is given. Raises RuntimeError for what the double does not compute."""
    for name in _UNSUPPORTED:
        if request._values[name] is not None:
            raise RuntimeError(f"the double does not compute {name}")
    if request._values["return_all_generated_tokens"] or request._values["allotted_time_ms"]:
        raise RuntimeError("the double has no return_all_generated_tokens and allotted_time_ms")
    output = request.get("output_config")
    for name in ("return_context_logits", "return_generation_logits", "return_encoder_output"):
        if output.get(name):
            raise RuntimeError(f"the double does not compute {name}")
    sampling = request.get("sampling_config")
    retention = request._values["kv_cache_retention_config"]
    return api.Request(
        input_token_ids=tuple(request.get("input_token_ids")),
        max_tokens=request.get("max_tokens"),
        streaming=request.get("streaming"),
        sampling_config=api.SamplingConfig(**{n: sampling._values.get(n) for n in _SAMPLING}),
        output_config=api.OutputConfig(
            return_log_probs=output.get("return_log_probs"),
            exclude_input_from_output=output.get("exclude_input_from_output"),
            return_perf_metrics=output.get("return_perf_metrics"),
        ),
        end_id=request._values["end_id"],
        pad_id=request._values["pad_id"],
        bad_words=_words(request._values["bad_words"]),
        stop_words=_words(request._values["stop_words"]),
        embedding_bias=_bias(request._values["embedding_bias"], vocab_size),
        kv_cache_retention_config=None if retention is None else _retention(retention),
        client_id=request._values["client_id"],
        priority=request._values["priority"],
        cache_salt_id=request._values.get("cache_salt_id"),
    )


def _words(words: list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word) for word in words or ())


def _bias(tensor: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if tensor is None:
        return ()
    if tuple(tensor.shape) != (vocab_size,) or str(tensor.dtype) != "torch.float32":
        raise RuntimeError(
            f"embedding_bias must be float32 [{vocab_size}], got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    values = tensor.tolist()
    return tuple((i, value) for i, value in enumerate(values) if value)


def _retention(retention: Any) -> api.KvCacheRetentionConfig:
    return api.KvCacheRetentionConfig(
        token_range_retention_configs=tuple(
            api.TokenRangeRetentionConfig(
                token_start=r.get("token_start"),
                token_end=r.get("token_end"),
                priority=r.get("priority"),
                duration_ms=r.get("duration_ms"),
            )
            for r in retention.get("token_range_retention_configs")
        ),
        decode_retention_priority=retention.get("decode_retention_priority"),
        decode_duration_ms=retention.get("decode_duration_ms"),
    )


def engine_message(message: str) -> str:
    """An error of the core in TensorRT-LLM's words."""
    _, found, reason = message.partition(_FORWARD_ERROR)
    return f"Encountered an error in forwardAsync function: {reason}" if found else message


class Stamps:
    """Instants of one request, for its timing metrics, and its log-probs so far."""

    def __init__(self) -> None:
        self.arrival = self.first = self.last = time.monotonic()
        self.has_token = False
        self.log_probs: list[float] = []

    def note(self) -> None:
        """A response goes out."""
        self.last = time.monotonic()
        if not self.has_token:
            self.has_token, self.first = True, self.last


class Converter:
    """Makes responses, statistics and events of the double's classes.

    log_probs: see `folder.Behind`.
    """

    def __init__(self, classes: Classes, log_probs: str) -> None:
        self._classes = classes
        self._gives_all_log_probs = log_probs == "all"

    def _make(self, name: str, **values: Any) -> Any:
        return self._classes[name].make(**values)  # type: ignore[attr-defined]

    def error(self, request_id: int, message: str, client_id: int | None) -> Any:
        return self._response(request_id, client_id, error_msg=engine_message(message))

    def _response(self, request_id: int, client_id: int | None, **variant: Any) -> Any:
        response = self._classes["Response"].__new__(self._classes["Response"])
        response._values = {"request_id": request_id, "client_id": client_id, **variant}
        return response

    def response(self, given: api.Response, stamps: Stamps) -> Any:
        if given.has_error():
            return self.error(given.request_id, given.error_msg, given.client_id)
        stamps.note()
        result = given.result
        log_probs = result.log_probs
        if log_probs is not None:
            stamps.log_probs += log_probs[0]
            if self._gives_all_log_probs:
                log_probs = [list(stamps.log_probs)]
        reasons = self._classes["FinishReason"]
        made = self._make(
            "Result",
            is_final=result.is_final,
            output_token_ids=result.output_token_ids,
            finish_reasons=[reasons[reason.name] for reason in result.finish_reasons],  # type: ignore[index]
            log_probs=log_probs,
            cum_log_probs=result.cum_log_probs,
            sequence_index=result.sequence_index,
            is_sequence_final=result.is_sequence_final,
            decoding_iter=result.decoding_iter,
            avg_decoded_tokens_per_iter=1.0,
            request_perf_metrics=self._perf(result.request_perf_metrics, stamps),
        )
        return self._response(given.request_id, given.client_id, result=made)

    def _perf(self, given: api.RequestPerfMetrics | None, stamps: Stamps) -> Any:
        if given is None:
            return None
        kv = given.kv_cache_metrics
        looked = kv.num_reused_blocks + kv.num_missed_blocks
        return self._make(
            "RequestPerfMetrics",
            timing_metrics=self._make(
                "TimingMetrics",
                arrival_time=timedelta(seconds=stamps.arrival),
                first_scheduled_time=timedelta(seconds=stamps.arrival),
                first_token_time=timedelta(seconds=stamps.first),
                last_token_time=timedelta(seconds=stamps.last),
                kv_cache_transfer_start=timedelta(0),
                kv_cache_transfer_end=timedelta(0),
            ),
            kv_cache_metrics=self._make(
                "KvCacheMetrics",
                num_total_allocated_blocks=kv.num_total_allocated_blocks,
                num_new_allocated_blocks=kv.num_new_allocated_blocks,
                num_reused_blocks=kv.num_reused_blocks,
                num_missed_blocks=kv.num_missed_blocks,
                kv_cache_hit_rate=kv.num_reused_blocks / looked if looked else 0.0,
            ),
            speculative_decoding=self._make("SpeculativeDecodingMetrics"),
            first_iter=given.first_iter,
            last_iter=given.last_iter,
            iter=given.last_iter,
        )

    def stats(self, given: api.IterationStats) -> Any:
        kv, batch = given.kv_cache_stats, given.inflight_batching_stats
        return self._make(
            "IterationStats",
            timestamp=datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
            iter=given.iter,
            iter_latency_ms=given.iter_latency_ms,
            num_active_requests=given.num_active_requests,
            num_queued_requests=given.num_queued_requests,
            num_completed_requests=given.num_completed_requests,
            max_num_active_requests=given.max_num_active_requests,
            kv_cache_stats=self._make(
                "KvCacheStats", **{n: getattr(kv, n) for n in kv.__struct_fields__}
            ),
            inflight_batching_stats=self._make(
                "InflightBatchingStats",
                micro_batch_id=0,
                **{n: getattr(batch, n) for n in batch.__struct_fields__},
            ),
        )

    def event(self, given: kv_api.KVCacheEvent, window_size: int) -> Any:
        return self._make(
            "kv_cache.KVCacheEvent",
            event_id=given.event_id,
            data=self._event_data(given.data),
            window_size=window_size,
            attention_dp_rank=None,
        )

    def _event_data(self, data: kv_api.KVCacheEventData) -> Any:
        if isinstance(data, kv_api.KVCacheCreatedData):
            return self._make(
                "kv_cache.KVCacheCreatedData",
                num_blocks_per_cache_level=data.num_blocks_per_cache_level,
            )
        if isinstance(data, kv_api.KVCacheStoredData):
            blocks = [self._stored(block) for block in data.blocks]
            return self._make(
                "kv_cache.KVCacheStoredData", parent_hash=data.parent_hash, blocks=blocks
            )
        if isinstance(data, kv_api.KVCacheRemovedData):
            return self._make("kv_cache.KVCacheRemovedData", block_hashes=data.block_hashes)
        return self._make(
            "kv_cache.KVCacheUpdatedData",
            block_hash=data.block_hash,
            cache_level=self._diff(data.cache_level),
            priority=self._diff(data.priority),
        )

    def _stored(self, block: kv_api.KVCacheStoredBlockData) -> Any:
        tokens = [self._make("UniqueToken", token_id=t, token_extra_id=0) for t in block.tokens]
        return self._make(
            "kv_cache.KVCacheStoredBlockData",
            block_hash=block.block_hash,
            tokens=tokens,
            lora_id=block.lora_id,
            cache_level=block.cache_level,
            priority=block.priority,
            mm_keys=[],
        )

    def _diff(self, diff: kv_api.KVCacheEventDiffInt | None) -> Any:
        if diff is None:
            return None
        return self._make(
            "kv_cache.KVCacheEventDiffInt", old_value=diff.old_value, new_value=diff.new_value
        )
