"""Models to measure the KV tiers with: a checkpoint, or a shape with random weights.

Owns the shapes. A decoder is loaded or made once; every section has runners of its own on it, each
with pools of its size. Invariant: a runner that `Engines` made is let go before it ends.
"""

from __future__ import annotations

import os

# OpenMP reads this when torch is loaded: waiting threads must not spin on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig

from build_engines.fetch import default_model_path
from tokenflow.errors import ConfigError
from tokenflow.inflight.torch_loading import Decoder, load_decoder, random_decoder
from tokenflow.inflight.torch_runner import TorchRunner, set_threads

SMOLLM = "smollm2"
TOKENS_PER_BLOCK = 32

_MAX_POSITIONS = 8192
_SHAPES: dict[str, Callable[[], Any]] = {
    "tiny-random": lambda: LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
    ),
    "llama-3-8b-random": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
    ),
}
RANDOM_MODELS = tuple(_SHAPES)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder on its device. name: what the command line called it."""

    name: str
    decoder: Decoder
    device: str
    dtype: str
    num_threads: int

    def runner(self) -> TorchRunner:
        """A runner without pools. Whoever allocates a host pool closes its transport."""
        return TorchRunner(self.decoder, self.device, self.dtype, self.num_threads)

    def describe(self) -> dict[str, Any]:
        """Model, machine, versions and date, for the results."""
        is_cuda = self.device.startswith("cuda")
        return {
            "model": self.name,
            "dtype": self.dtype,
            "device": self.device,
            "device_name": torch.cuda.get_device_name(self.device) if is_cuda else _cpu_name(),
            "num_cores": len(os.sched_getaffinity(0)),
            "num_threads": torch.get_num_threads(),
            "tokens_per_block": TOKENS_PER_BLOCK,
            "block_bytes": self.runner().kv_block_bytes(TOKENS_PER_BLOCK),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def open_model(name: str, device: str, dtype: str, num_threads: int) -> Model:
    """Load `name` (a checkpoint folder, `smollm2`, or one of RANDOM_MODELS) on `device`.

    Raises ConfigError when there is no such checkpoint or device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no CUDA device")
    if not device.startswith("cuda"):
        set_threads(num_threads, os.environ)
    where, kind = torch.device(device), getattr(torch, dtype)
    if name in _SHAPES:
        decoder = random_decoder(_SHAPES[name](), device=where, dtype=kind)
    else:
        folder = default_model_path() if name == SMOLLM else Path(name)
        with torch.inference_mode():
            decoder = load_decoder(folder, device=where, dtype=kind, progress=lambda done: None)
    return Model(name, decoder, device, dtype, num_threads)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
