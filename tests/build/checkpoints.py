"""Tiny checkpoints made on the spot, without torch, and ways to break them.

Weights are noise: what is judged is names, shapes, sizes and files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}


def write_checkpoint(folder: Path, *, num_shards: int = 2, **changes: Any) -> Path:
    """A checkpoint with the fields of CONFIG changed; returns its folder."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
    )
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    tensors = list(tensors_of(config).items())
    per_shard = -(-len(tensors) // num_shards)
    weight_map = {}
    for index in range(num_shards):
        name = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(tensors[index * per_shard : (index + 1) * per_shard])
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", key), ("v", key)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                found[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        found[f"{prefix}self_attn.o_proj.weight"] = (hidden, hidden)
        found[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        found[f"{prefix}input_layernorm.weight"] = (hidden,)
        found[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return found


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, num = end, BYTES[dtype]
        for size in shape:
            num *= size
        end += num
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    write_raw(path, header, os.urandom(end))


def write_raw(path: Path, header: Any, data: bytes) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Let `change` alter the value that the file holds."""
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def change_header(path: Path, change: Callable[[Any], object]) -> None:
    """Let `change` alter the header of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_raw(path, header, raw[8 + length :])
