"""A Hugging Face checkpoint folder, looked at before hours of work are spent on it.

Owns what is asked of config.json and of the folder, and the shape that follows. Weights are judged
by `weight_files`, the tokenizer here. Nothing is loaded: headers and JSON only. Invariant: each
refusal is a ConfigError that names the field and the limit, or the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.model_shapes import ModelShape
from build_engines.recipes import FAMILIES, Family
from build_engines.rotary import require_older_names
from build_engines.weight_files import WeightFiles, read_weights, require_tensors
from tokenflow.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""What the server's tokenizer reads; only the first must be there."""

_ROPE_TYPES = ("default", "llama3", "linear")
_MAX_SIZES = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1024,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 1 << 24,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that can be converted.

    max_position_embeddings: tokens that its positions reach, scaling included. weights: its files.
    """

    path: Path
    family: Family
    shape: ModelShape
    max_position_embeddings: int
    weights: WeightFiles

    @property
    def small_files(self) -> tuple[Path, ...]:
        """config.json and the tokenizer's files that are there."""
        names = ("config.json", *TOKENIZER_FILES)
        return tuple(self.path / name for name in names if (self.path / name).is_file())


def read_checkpoint(path: Path) -> Checkpoint:
    """Look at the folder; raises ConfigError with the first thing that is wrong."""
    try:
        return _read_checkpoint(path)
    except OSError as error:
        raise ConfigError("checkpoint", f"{path} cannot be read: {error}") from error


def _read_checkpoint(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise ConfigError("checkpoint", f"{path} is not a folder")
    config = read_json(path / "config.json", "checkpoint")
    family = _family(config)
    _refuse_unservable(config)
    shape = _shape(config, family, path.name)
    positions = _positions(config)
    _check_tokenizer(path, shape.vocab_size)
    weights = read_weights(path)
    require_tensors(weights, shape)
    return Checkpoint(
        path=path,
        family=family,
        shape=shape,
        max_position_embeddings=positions,
        weights=weights,
    )


def read_json(path: Path, key: str) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError(key, …)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(key, f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, f"{path} cannot be read: {error}") from error
    if text.startswith("version https://git-lfs"):
        raise ConfigError(key, f"{path} is a Git LFS pointer; run `git lfs pull` there")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(key, f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ConfigError(
            "architectures", f"config.json must name one of {known}, got {architectures!r}"
        )
    family = FAMILIES.get(str(architectures[0]))
    if family is None:
        raise ConfigError("architectures", f"must be one of {known}, got {architectures[0]!r}")
    if config.get("model_type", family.model_type) != family.model_type:
        raise ConfigError(
            "model_type", f"{family.architecture} has {family.model_type!r}, "
            f"got {config['model_type']!r}",
        )  # fmt: skip
    return family


def _refuse_unservable(config: Mapping[str, Any]) -> None:
    """What the converter would take, or take silently, and pause and resume cannot use."""
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            "quantization_config",
            f"the checkpoint is quantized already ({method}); build from the original one",
        )
    if config.get("use_sliding_window", False):
        raise ConfigError(
            "use_sliding_window", "must be false: blocks of a sliding window are not kept for reuse"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError("hidden_act", f"must be 'silu', got {config['hidden_act']!r}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise ConfigError(key, "must be false: the recipes know no such biases")


def _shape(config: Mapping[str, Any], family: Family, name: str) -> ModelShape:
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is None:  # as transformers reads it
        num_kv_heads = num_heads
    if type(num_kv_heads) is not int or not 1 <= num_kv_heads <= num_heads:
        raise ConfigError(
            "num_key_value_heads", f"must be in [1, {num_heads}], got {num_kv_heads!r}"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            "num_key_value_heads",
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly",
        )
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                "hidden_size", f"{hidden_size} is not divisible by {num_heads} attention heads"
            )
        head_dim = hidden_size // num_heads
    if type(head_dim) is not int or not 1 <= head_dim <= 256:
        raise ConfigError("head_dim", f"must be in [1, 256], got {head_dim!r}")
    return ModelShape(
        name=name,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
    )


def _positions(config: Mapping[str, Any]) -> int:
    """Tokens that the positions reach. `rope_scaling` is the older name of `rope_parameters`."""
    positions = _size(config, "max_position_embeddings")
    rope = config.get("rope_scaling")
    if rope is None:
        rope = config.get("rope_parameters")
    if rope is None:
        rope = {}
    if not isinstance(rope, dict):
        raise ConfigError("rope_scaling", f"must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ConfigError(
            "rope_scaling", f"type must be one of {', '.join(_ROPE_TYPES)}, got {kind!r}"
        )
    require_older_names(config)
    if kind == "linear":
        factor = rope.get("factor")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 64:
            raise ConfigError("rope_scaling", f"factor must be in [1, 64], got {factor!r}")
        return int(positions * factor)
    return positions  # of llama3, config.json gives the scaled reach already


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise ConfigError(key, f"must be true or false, got {value!r}")
    return bool(value)


def _size(config: Mapping[str, Any], key: str) -> int:
    value, high = config.get(key), _MAX_SIZES[key]
    if type(value) is not int or not 1 <= value <= high:
        raise ConfigError(key, f"must be a whole number in [1, {high}], got {value!r}")
    return value


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    tokenizer = read_json(path / "tokenizer.json", "tokenizer.json")
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise ConfigError("tokenizer.json", "has no model; is it a tokenizer?")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # pieces with their scores; the id is the place
        ids: list[Any] = list(range(len(vocabulary)))
    elif isinstance(vocabulary, dict):
        ids = list(vocabulary.values())
    else:
        raise ConfigError("tokenizer.json", "its model has no vocab")
    added = tokenizer.get("added_tokens") or []
    try:
        ids += [token["id"] for token in added]
    except (TypeError, KeyError) as error:
        raise ConfigError("tokenizer.json", f"added_tokens is malformed: {error!r}") from error
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ConfigError("tokenizer.json", f"has the id {token_id!r}")
    if ids and max(ids) >= vocab_size:
        raise ConfigError(
            "vocab_size",
            f"config.json says {vocab_size}, but tokenizer.json has the id {max(ids)}",
        )
