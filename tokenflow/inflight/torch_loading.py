"""Hugging Face decoder checkpoints, read from safetensors into transformers' model classes.

Owns the list of what the torch runner can run. Invariants: a model is returned whole (every
parameter filled from the checkpoint, nothing left over) or ConfigError says what is wrong with
the folder; no weight is read twice; no code from the checkpoint runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel

from tokenflow.errors import ConfigError
from tokenflow.inflight.torch_attention import ATTENTION_NAME

logger = logging.getLogger(__name__)

SUPPORTED_MODEL_TYPES = ("llama", "qwen2")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles depend on the position alone, not on what else is in the batch."""

_RANDOM_STD = 0.02
"""Of random weights; what decoders are initialised with."""

LoadProgress = Callable[[float], None]
"""Called with the fraction of the weights' bytes that is loaded, in [0, 1]."""


@dataclass(frozen=True)
class Decoder:
    """A loaded model. `model` maps tokens to hidden states; `head_weight` is [vocab, hidden] in
    float32, whatever the dtype of the model, so that rounding does not tie the best two tokens."""

    model: torch.nn.Module
    head_weight: torch.Tensor
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int


def load_decoder(
    model_path: Path, *, device: torch.device, dtype: torch.dtype, progress: LoadProgress
) -> Decoder:
    """Load a checkpoint folder (config.json, *.safetensors).

    Raises ConfigError (key gpt_model_path) when the folder is missing or incomplete, or holds an
    architecture that the paged attention does not cover.
    """
    start = time.perf_counter()
    config = _read_config(model_path)
    model = _build_empty(config, device, dtype)
    head_weight = _fill(model, model_path, config, device, progress)
    logger.info(
        "loaded %s (%s, %.0f M parameters, %s on %s) in %.1f s",
        model_path,
        config.model_type,
        sum(p.numel() for p in model.parameters()) / 1e6,
        dtype,
        device,
        time.perf_counter() - start,
    )
    return _decoder(model, head_weight, config)


@torch.inference_mode()
def random_decoder(
    config: Any, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Decoder:
    """A model of the shape of `config` (transformers') whose weights are random and made where it
    runs: what a checkpoint of that shape costs, without the checkpoint. Its words mean nothing.
    """
    generator = torch.Generator(device).manual_seed(seed)
    model = _build_empty(config, device, dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _RANDOM_STD, generator=generator)
    shape = (config.vocab_size, config.hidden_size)
    head_weight = torch.empty(shape, device=device).normal_(0.0, _RANDOM_STD, generator=generator)
    return _decoder(model, head_weight, config)


def _decoder(model: torch.nn.Module, head_weight: torch.Tensor, config: Any) -> Decoder:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Decoder(
        model=model,
        head_weight=head_weight,
        vocab_size=head_weight.shape[0],
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )


def _refuse(model_path: Path, why: str) -> ConfigError:
    return ConfigError("gpt_model_path", f"{model_path}: {why}")


def _read_config(model_path: Path) -> Any:
    if not (model_path / "config.json").is_file():
        raise _refuse(
            model_path, "holds no config.json (a Hugging Face checkpoint folder is needed)"
        )
    try:
        model_type = json.loads((model_path / "config.json").read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise _refuse(model_path, f"config.json is not readable: {error}") from error
    if model_type not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise _refuse(model_path, f"model type {model_type!r} is not supported (known: {known})")
    config = AutoConfig.from_pretrained(model_path)
    if getattr(config, "quantization_config", None) is not None:
        raise _refuse(model_path, "quantised checkpoints are not supported")
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        raise _refuse(model_path, "sliding-window attention is not supported")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise _refuse(model_path, f"rope type {rope_type!r} is not supported")
    return config


def _build_empty(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model without its head, parameters allocated but not filled."""
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    model.to_empty(device=device)
    # Rotary frequencies are buffers that no checkpoint holds; compute them where they live.
    model.rotary_emb = type(model.rotary_emb)(config=config).to(device)
    strange = [name for name, _ in model.named_buffers() if not name.startswith("rotary_emb.")]
    assert not strange, strange
    return model.eval().requires_grad_(False)


def _fill(
    model: torch.nn.Module,
    model_path: Path,
    config: Any,
    device: torch.device,
    progress: LoadProgress,
) -> torch.Tensor:
    """Copy every tensor of the checkpoint into the model; returns the head in float32."""
    missing = dict(model.named_parameters())
    embedding = missing["embed_tokens.weight"]
    head: torch.Tensor | None = None
    for name, tensor in _read_tensors(model_path, progress):
        key = name.removeprefix("model.")
        if key == "lm_head.weight":
            head = tensor.to(device, torch.float32)
            continue
        if key.endswith("rotary_emb.inv_freq"):  # kept by old checkpoints; it is computed
            continue
        parameter = missing.pop(key, None)
        if parameter is None:
            raise _refuse(model_path, f"holds an unexpected tensor {name}")
        if parameter.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, config.json says {list(parameter.shape)}"
            raise _refuse(model_path, f"tensor {name} is {shapes}")
        parameter.copy_(tensor)
    if missing:
        raise _refuse(model_path, f"lacks {len(missing)} tensors, first {min(missing)}")
    if config.tie_word_embeddings:
        return embedding.float()
    if head is None:
        raise _refuse(model_path, "lacks lm_head.weight")
    return head


def _read_tensors(model_path: Path, progress: LoadProgress) -> Iterator[tuple[str, torch.Tensor]]:
    shards = sorted(model_path.glob("*.safetensors"))
    if not shards:
        raise _refuse(model_path, "holds no *.safetensors")
    total = sum(shard.stat().st_size for shard in shards)
    done = 0
    progress(0.0)
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    done += tensor.numel() * tensor.element_size()
                    progress(min(done / total, 1.0))
        except SafetensorError as error:
            raise _refuse(model_path, f"{shard.name} is damaged: {error}") from error
    progress(1.0)
