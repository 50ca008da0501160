"""Weights in safetensors files, judged by their headers.

Owns the format's rules (an 8-byte little-endian length, a JSON header, then the data without gaps;
source: the format's specification) and what a Llama-like decoder must have in it. A file that is
cut off, a shard that is missing, a tensor of another shape: each is a ConfigError that names the
file or the tensor. No weight is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.model_shapes import ModelShape
from tokenflow.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_MAX_NAME = 200
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Buffers that old checkpoints carry; they follow from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One entry of a header."""

    dtype: str
    shape: tuple[int, ...]
    file_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """header_sha256: of the length and the header, which name every tensor and its place."""

    path: Path
    size_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """All weights of a folder. tensors: by name. files: in order of their names."""

    files: tuple[WeightFile, ...]
    tensors: Mapping[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Of the files."""
        return sum(file.size_bytes for file in self.files)


def read_weights(folder: Path) -> WeightFiles:
    """Every header of the folder's weights. Raises ConfigError("weights", …)."""
    names, wanted = _file_names(folder)
    files: list[WeightFile] = []
    tensors: dict[str, Tensor] = {}
    for name in names:
        file, found = _read_file(folder / name)
        files.append(file)
        for tensor_name, tensor in found.items():
            if tensor_name in tensors:
                raise _refusal(
                    f"{tensor_name} is in {tensors[tensor_name].file_name} and in {name}"
                )
            tensors[tensor_name] = tensor
    for tensor_name, name in wanted.items():
        if tensor_name not in tensors or tensors[tensor_name].file_name != name:
            raise _refusal(f"{INDEX_NAME} says {tensor_name} is in {name}; it is not")
    return WeightFiles(files=tuple(files), tensors=tensors)


def require_tensors(weights: WeightFiles, shape: ModelShape) -> None:
    """The weights are those of a decoder of this shape, all of them and nothing else.

    Raises ConfigError("weights", …) with the first tensor that is missing, odd or not known.
    """
    wanted = dict(_expected(shape))
    for name, dimensions in wanted.items():
        tensor = weights.tensors.get(name)
        if tensor is None:
            raise _refusal(f"{name} is missing")
        if tensor.shape != dimensions:
            raise _refusal(f"{name} has shape {list(tensor.shape)}, not {list(dimensions)}")
    for name in weights.tensors:
        # A tied head may be stored all the same.
        is_tied_head = name == "lm_head.weight" and shape.tied_embeddings
        if name not in wanted and not name.endswith(_IGNORED_SUFFIX) and not is_tied_head:
            raise _refusal(f"{name} is not a tensor of this architecture")


def _file_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files, and the index: tensor -> file (empty without one)."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME], {}
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {others[0]} must be saved as safetensors first" if others else ""
        raise _refusal(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map must be an object that is not empty")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(f"{INDEX_NAME} cannot be used: {error!r}") from error
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not 0 < len(name) <= _MAX_NAME or name == ".." or Path(name).name != name:
            shown = name[:_MAX_NAME]
            raise _refusal(f"{INDEX_NAME} names {shown!r}, which is not a file of the folder")
        if not (folder / name).is_file():
            raise _refusal(f"{name} is missing; {INDEX_NAME} names it ({len(names)} files)")
    return names, weight_map


def _read_file(path: Path) -> tuple[WeightFile, dict[str, Tensor]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix.startswith(b"version "):
                raise _refusal(f"{path.name} is a Git LFS pointer; run `git lfs pull` there")
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _refusal(
                    f"{path.name} has {size} bytes and a header of {length}: cut off, or no "
                    "safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise _refusal(f"{path.name} cannot be read: {error}") from error
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise _refusal(f"{path.name}: the header is no JSON object: {error}") from error
    tensors = _tensors(path.name, entries, size - 8 - length)
    digest = hashlib.sha256(prefix + raw).hexdigest()
    return WeightFile(path=path, size_bytes=size, header_sha256=digest), tensors


def _tensors(file_name: str, entries: Mapping[str, Any], num_bytes: int) -> dict[str, Tensor]:
    """The tensors of one header; the data must be `num_bytes` long without gaps or overlaps."""
    if not entries:
        raise _refusal(f"{file_name} holds no tensor")
    found, spans = {}, []
    for name, entry in entries.items():
        try:
            dtype, shape = str(entry["dtype"]), _whole_numbers(entry["shape"])
            begin, end = _whole_numbers(entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _refusal(f"{file_name}: the entry of {name} is malformed: {error!r}") from error
        if dtype not in DTYPE_BYTES:
            raise _refusal(f"{name} is {dtype}; must be one of {', '.join(DTYPE_BYTES)}")
        if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise _refusal(f"{file_name}: {name} has {end - begin} bytes, not those of its shape")
        found[name] = Tensor(dtype=dtype, shape=shape, file_name=file_name)
        spans.append((begin, end))
    reached = 0
    for begin, end in sorted(spans):
        if begin != reached:
            raise _refusal(f"{file_name}: tensors overlap or leave a gap at byte {reached}")
        reached = end
    if reached != num_bytes:
        raise _refusal(
            f"{file_name} has {num_bytes} bytes of data, its header names {reached}: "
            "cut off, or still being written"
        )
    return found


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Raises ValueError for anything but a list of numbers from 0 on."""
    if type(values) is not list or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"not a list of whole numbers: {values!r}")
    return tuple(values)


def _expected(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as transformers stores them (matrices are [out, in])."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query = shape.num_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
            if shape.qkv_bias:
                yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)


def _refusal(message: str) -> ConfigError:
    return ConfigError("weights", message)
