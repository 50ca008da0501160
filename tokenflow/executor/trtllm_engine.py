"""A TensorRT-LLM engine folder: what it was built for, and whether that serves here.

Owns the reading of `config.json` as `trtllm-build` of TensorRT-LLM 1.x writes it (`build_config`
and `pretrained_config`), and every refusal that can be told from it before gigabytes are loaded.
Pure but for the files it reads; needs no TensorRT-LLM.

Pause and resume live on block reuse and on prompts that are computed in chunks. Both need a paged
KV cache and the paged context FMHA, which TensorRT-LLM otherwise switches off with a warning; an
engine that gathers context logits loses block reuse the same way. Beams are never kept for reuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenflow.errors import ConfigError

_KEY = "gpt_model_path"
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_QUANTIZED_BYTES = {"FP8": 1.0, "INT8": 1.0, "NVFP4": 0.5625}
"""Bytes of one KV number; 4-bit ones share an 8-bit scale among 16."""
_NO_SPECULATION = (None, 0, 1, "NONE", "SPECULATIVEDECODINGMODE.NONE")
_NO_PLUGIN = ("none", "", "false", "disable")
LIMITS = ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block")
"""Parameters that a built engine fixes or bounds."""


@dataclass(frozen=True, kw_only=True)
class LoraBuild:
    """dtype: torch dtype of the model, in which TensorRT-LLM takes weights of adapters.
    max_adapter_size: largest rank of one, 0 where the folder does not say."""

    dtype: str
    max_adapter_size: int


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """What the engine in `folder` was built for.

    world_size: ranks, each with an engine file. kv_bytes_per_token: of one rank. logits_dtype: the
    name of the torch dtype in which a bias of the logits is taken. lora: None = built without.
    """

    folder: Path
    version: str
    vocab_size: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    world_size: int
    kv_bytes_per_token: float
    logits_dtype: str
    lora: LoraBuild | None = None

    @property
    def block_bytes(self) -> int:
        """KV of one block of all layers of one rank, bytes."""
        return int(self.kv_bytes_per_token * self.tokens_per_block)


def read_built_engine(path: str) -> BuiltEngine:
    """The engine in the folder `path`.

    Raises ConfigError, for gpt_model_path, when there is none, when files of ranks are missing, or
    when it was built without what pause and resume need.
    """
    if not path:
        raise ConfigError(_KEY, "the trtllm engine needs the folder of a built engine")
    folder = Path(path)
    whole = _read(folder / "config.json")
    try:
        build, model = whole["build_config"], whole["pretrained_config"]
        plugins, mapping = build["plugin_config"], model["mapping"]
        _check_build(build, plugins)
        world_size = _world_size(mapping)
        built = BuiltEngine(
            folder=folder,
            version=str(whole.get("version", "")),
            vocab_size=_number(model, "vocab_size"),
            tokens_per_block=_number(plugins, "tokens_per_block"),
            max_batch_size=_number(build, "max_batch_size"),
            max_num_tokens=_number(build, "max_num_tokens"),
            max_seq_len=_number(build, "max_seq_len"),
            world_size=world_size,
            kv_bytes_per_token=_kv_bytes_per_token(model, mapping),
            logits_dtype=str(model.get("logits_dtype", "float32")),
            lora=_lora_build(build, plugins, model),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            _KEY, f"{folder / 'config.json'} is not that of a built TensorRT-LLM engine: {error!r}"
        ) from None
    missing = [r for r in range(world_size) if not (folder / f"rank{r}.engine").is_file()]
    if missing:
        raise ConfigError(
            _KEY, f"{folder} was built for {world_size} ranks and lacks rank{missing[0]}.engine"
        )
    return built


def check_limits(built: BuiltEngine, values: Mapping[str, int]) -> None:
    """Raises ConfigError for a limit that is more than the engine was built for; `values` has all
    of LIMITS."""
    for name in LIMITS[:-1]:
        limit = getattr(built, name)
        if values[name] > limit:
            raise ConfigError(name, f"the engine was built for {limit}, got {values[name]}")
    if values["tokens_per_block"] != built.tokens_per_block:
        raise ConfigError(
            "tokens_per_block",
            f"the engine was built with {built.tokens_per_block}, got {values['tokens_per_block']}",
        )


def built_limits(path: str) -> dict[str, int]:
    """LIMITS of the engine in the folder `path`: what a configuration that leaves them out gets."""
    built = read_built_engine(path)
    return {name: getattr(built, name) for name in LIMITS}


def _read(path: Path) -> dict[str, Any]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(_KEY, f"no built engine there: {error}") from None
    except ValueError as error:
        raise ConfigError(_KEY, f"{path} is no JSON: {error}") from None
    if not isinstance(whole, dict) or "build_config" not in whole:
        raise ConfigError(
            _KEY, f"{path} has no build_config: it is a checkpoint, not an engine built from one"
        )
    return whole


def _check_build(build: Mapping[str, Any], plugins: Mapping[str, Any]) -> None:
    """Raises ConfigError for an engine that cannot keep the KV of what is paused."""
    kv_cache_type = str(build.get("kv_cache_type", "PAGED")).upper().rpartition(".")[2]
    if kv_cache_type != "PAGED" or plugins.get("paged_kv_cache") is False:
        raise _rebuild("kv_cache_type", kv_cache_type.lower(), "--kv_cache_type paged")
    if not plugins["use_paged_context_fmha"] or plugins.get("context_fmha") is False:
        raise _rebuild("use_paged_context_fmha", "off", "--use_paged_context_fmha enable")
    if plugins.get("remove_input_padding") is False:
        raise _rebuild("remove_input_padding", "off", "--remove_input_padding enable")
    if build.get("gather_context_logits"):
        raise _rebuild("gather_context_logits", "on", "no --gather_context_logits")
    if int(build.get("max_beam_width", 1)) != 1:
        raise _rebuild("max_beam_width", build["max_beam_width"], "--max_beam_width 1")
    mode = build.get("speculative_decoding_mode")
    if (mode.upper() if isinstance(mode, str) else mode) not in _NO_SPECULATION:
        raise _rebuild("speculative_decoding_mode", mode, "--speculative_decoding_mode none")


def _rebuild(name: str, value: object, flag: str) -> ConfigError:
    return ConfigError(
        _KEY,
        f"the engine was built with {name} {value}, and so cannot keep the KV of paused requests: "
        f"build it with {flag}",
    )


def _lora_build(
    build: Mapping[str, Any], plugins: Mapping[str, Any], model: Mapping[str, Any]
) -> LoraBuild | None:
    """An engine without the LoRA plugin computes requests with an adapter as if they had none."""
    if str(plugins.get("lora_plugin")).lower() in _NO_PLUGIN:
        return None
    max_rank = (build.get("lora_config") or {}).get("max_lora_rank") or 0
    return LoraBuild(dtype=str(model["dtype"]), max_adapter_size=int(max_rank))


def _world_size(mapping: Mapping[str, Any]) -> int:
    return (
        _number(mapping, "tp_size") * _number(mapping, "pp_size") * int(mapping.get("cp_size", 1))
    )


def _kv_bytes_per_token(model: Mapping[str, Any], mapping: Mapping[str, Any]) -> float:
    """Keys and values of the layers and heads of one rank; heads that are fewer than ranks are
    repeated."""
    algorithm = (model.get("quantization") or {}).get("kv_cache_quant_algo")
    size = _QUANTIZED_BYTES[algorithm] if algorithm else _BYTES[model["dtype"]]
    num_heads = _number(model, "num_attention_heads")
    num_kv_heads = int(model.get("num_key_value_heads") or num_heads)
    head_size = int(model.get("head_size") or _number(model, "hidden_size") // num_heads)
    num_layers = -(-_number(model, "num_hidden_layers") // _number(mapping, "pp_size"))
    num_local_heads = max(1, num_kv_heads // _number(mapping, "tp_size"))
    return 2 * num_layers * num_local_heads * head_size * size


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}")
    return value
