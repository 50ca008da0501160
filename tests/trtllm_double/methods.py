"""What the methods of the double's values do, and what their constructors refuse."""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tests.trtllm_double.objects import Body, Bound


class RequestBase(Bound):
    """Refuses what the C++ constructor refuses."""

    def _check(self) -> None:
        if not self.get("input_token_ids"):
            raise RuntimeError("Assertion failed: !mInputTokenIds.empty()")
        if self.get("max_tokens") <= 0:
            raise RuntimeError("Assertion failed: mMaxNewTokens > 0")
        if self._values["logits_post_processor_name"] and self._values["logits_post_processor"]:
            raise RuntimeError("Only one logits post processor may be given")
        sampling = self.get("sampling_config")
        if self._values["guided_decoding_params"] is not None and sampling.get("beam_width") > 1:
            raise RuntimeError("Guided decoding is not supported with beam search")


Ranges = Mapping[str, tuple[float, float, bool]]
"""Of a C++ class: (low, high, whether low is taken)."""

_SAMPLING_RANGES: Ranges = {
    "beam_width": (0, 2**31, False),
    "top_k": (0, 2**31, True),
    "top_p": (0, 1, False),
    "top_p_min": (0, 1, True),
    "top_p_reset_ids": (0, 2**31, True),
    "top_p_decay": (0, 1, False),
    "temperature": (0, float("inf"), True),
    "min_tokens": (0, 2**31, True),
    "beam_search_diversity_rate": (0, float("inf"), True),
    "repetition_penalty": (0, float("inf"), False),
    "length_penalty": (0, float("inf"), True),
    "early_stopping": (0, 2**31, True),
    "no_repeat_ngram_size": (0, 2**31, True),
    "num_return_sequences": (0, 2**31, False),
    "min_p": (0, 1, True),
}

_BELOW_ONE = math.nextafter(1.0, 0.0)
_KV_RANGES: Ranges = {
    "max_tokens": (0, 2**31, False),
    "max_attention_window": (0, 2**31, False),
    "sink_token_length": (0, 2**31, False),
    "free_gpu_memory_fraction": (0, _BELOW_ONE, False),
    "cross_kv_cache_fraction": (0, _BELOW_ONE, False),
}
_EXECUTOR_RANGES: Ranges = {
    "max_beam_width": (0, 2**31, False),
    "iter_stats_max_iterations": (0, 2**31, True),
    "request_stats_max_iterations": (0, 2**31, True),
    "max_seq_idle_microseconds": (0, 2**64, False),
}


class RangedBase(Bound):
    """Checks ranges, also of what is set later; None has none."""

    _ranges: ClassVar[Ranges]

    def _check(self) -> None:
        for name, (low, high, takes_low) in self._ranges.items():
            given = self._values.get(name)
            for value in given if isinstance(given, list) else [given]:
                if value is not None and not (low <= value <= high and (takes_low or value > low)):
                    raise RuntimeError(f"Assertion failed: {name} is {value}")

    def _check_set(self) -> None:
        self._check()


class SamplingBase(RangedBase):
    _ranges = _SAMPLING_RANGES


class KvCacheBase(RangedBase):
    _ranges = _KV_RANGES


class ExecutorConfigBase(RangedBase):
    _ranges = _EXECUTOR_RANGES


class RetentionBase(Bound):
    """Ranges must not overlap."""

    def _check(self) -> None:
        ranges = sorted(
            self.get("token_range_retention_configs"), key=lambda r: r.get("token_start")
        )
        for before, after in itertools.pairwise(ranges):
            end = before.get("token_end")
            if end is None or end > after.get("token_start"):
                raise RuntimeError("token ranges overlap")


class ResponseBase(Bound):
    """Holds either a result or an error; reading the other one raises."""

    def _get_error_msg(self) -> str:
        if "error_msg" not in self._values:
            raise RuntimeError("Response holds a result, not an error")
        return self._values["error_msg"]

    def _get_result(self) -> Any:
        if "result" not in self._values:
            raise RuntimeError(self._values["error_msg"])
        return self._values["result"]

    def _get_client_id(self) -> int | None:
        return self._values.get("client_id")


class DecodingModeBase(Bound):
    """Named by its factory."""


BASES: Mapping[str, type[Bound]] = {
    "Request": RequestBase,
    "SamplingConfig": SamplingBase,
    "KvCacheConfig": KvCacheBase,
    "ExecutorConfig": ExecutorConfigBase,
    "KvCacheRetentionConfig": RetentionBase,
    "Response": ResponseBase,
    "DecodingMode": DecodingModeBase,
}


def _plain(value: Any) -> Any:
    if isinstance(value, Bound):
        return {name: _plain(value.get(name)) for name in value._spec.properties}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def _same(self: Bound, other: Bound) -> bool:
    return bool(_plain(self) == _plain(other))


def _mode(name: str) -> Body:
    def make(cls: type[Bound]) -> Any:
        return cls.make(name=name)

    return make


def _is_mode(*names: str) -> Body:
    return lambda self: self.get("name") in names


_MODES = (
    "Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Medusa", "Lookahead",
    "ExplicitDraftTokens", "Eagle",
)  # fmt: skip

BODIES: dict[str, dict[str, Body]] = {
    "": {"to_json_str": lambda self: json.dumps(_plain(self), default=str)},
    "KvCacheRetentionConfig": {"__eq__": _same},
    "KvCacheRetentionConfig.TokenRangeRetentionConfig": {"__eq__": _same},
    "Response": {
        "has_error": lambda self: "error_msg" in self._values,
        "clear_context_logits": lambda self: None,
        "clear_generation_logits": lambda self: None,
    },
    "DecodingMode": {
        **{name: _mode(name) for name in _MODES},
        "isAuto": _is_mode("Auto"),
        "isTopK": _is_mode("TopK"),
        "isTopP": _is_mode("TopP"),
        "isTopKorTopP": _is_mode("TopK", "TopP", "TopKTopP"),
        "isTopKandTopP": _is_mode("TopKTopP"),
        "isBeamSearch": _is_mode("BeamSearch"),
        "isMedusa": _is_mode("Medusa"),
        "isLookahead": _is_mode("Lookahead"),
        "isExplicitDraftTokens": _is_mode("ExplicitDraftTokens"),
        "isEagle": _is_mode("Eagle"),
    },
}
