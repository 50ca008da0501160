"""What a report says of the machine: card and driver, versions, the engine that was built.

Everything that cannot be found out is None. Neither names nor addresses of the machine, nor who
works on it, nor where folders lie, are in it: a report is made to be sent.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenflow.executor.trtllm_engine import read_built_engine

_TOOL_LIMIT_S = 60.0
_CARD_FIELDS = (
    "name", "driver_version", "memory.total", "memory.used", "compute_cap", "mig.mode.current",
    "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
_PACKAGES = ("tokenflow-triton", "tensorrt-llm", "tensorrt", "torch", "numpy", "msgspec", "mpi4py")
_VARIABLES = ("NVIDIA_TRITON_SERVER_VERSION", "TRITON_SERVER_VERSION", "CUDA_VERSION",
              "TRT_VERSION", "CUDA_VISIBLE_DEVICES")  # fmt: skip
_TRITON_VERSION = Path("/opt/tritonserver/TRITON_VERSION")
_IS_DOUBLE = "+double"
_WITH_PATHS = ("checkpoint", "tokenizer", "commands", "steps", "engine")
"""Entries of a manifest that name folders, or list files."""


def run_tool(command: list[str], limit_s: float = _TOOL_LIMIT_S) -> str | None:
    """A program's output; None where there is none, or it fails."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def describe_cards() -> list[dict[str, str]]:
    """The GPUs, as nvidia-smi tells them; [] where it does not."""
    query = run_tool(
        ["nvidia-smi", f"--query-gpu={','.join(_CARD_FIELDS)}", "--format=csv,noheader"]
    )
    cards = []
    for line in (query or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_CARD_FIELDS):
            cards.append(dict(zip(_CARD_FIELDS, values, strict=True)))
    return cards


def describe_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Cards, cores, memory, system. environment: this process's variables."""
    return {
        "cards": describe_cards(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "variables": {name: environment[name] for name in _VARIABLES if name in environment},
    }


def describe_versions() -> dict[str, str | None]:
    """Of everything that takes part. tensorrt_llm is what it says of itself; see `is_double`."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["tensorrt_llm"] = _bindings_version()
    versions["tritonserver"] = (
        _TRITON_VERSION.read_text().strip() if _TRITON_VERSION.is_file() else None
    )
    return versions


def _bindings_version() -> str | None:
    """Asked in a process of its own: importing the library starts MPI, and may fail in any way."""
    code = "import tensorrt_llm as t; print('version:', t.__version__)"
    said = run_tool([sys.executable, "-c", code], limit_s=300.0)
    found = [line for line in (said or "").splitlines() if line.startswith("version: ")]
    return found[-1].removeprefix("version: ") if found else None


def is_double(versions: Mapping[str, str | None]) -> bool:
    """True if it is the double of the bindings that runs, and no TensorRT-LLM."""
    return _IS_DOUBLE in (versions.get("tensorrt_llm") or "")


def describe_engine(folder: Path) -> dict[str, Any]:
    """What the engine was built for; with its manifest, where `tokenflow build` left one. Raises
    ConfigError for an engine that cannot serve."""
    built = read_built_engine(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = config["pretrained_config"]
    quantization = model.get("quantization") or {}
    algorithms = [quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")]
    return {
        "built_with": built.version,
        "architecture": model.get("architecture"),
        "dtype": model.get("dtype"),
        "quantization": algorithms,
        "is_quantized": any(algorithms),
        "num_layers": model.get("num_hidden_layers"),
        "hidden_size": model.get("hidden_size"),
        "vocab_size": built.vocab_size,
        "world_size": built.world_size,
        "tokens_per_block": built.tokens_per_block,
        "block_bytes": built.block_bytes,
        "max_batch_size": built.max_batch_size,
        "max_num_tokens": built.max_num_tokens,
        "max_seq_len": built.max_seq_len,
        "manifest": _manifest(folder),
    }


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Without the lists of files, and where they lie."""
    for path in (folder / "manifest.json", folder.parent / "manifest.json"):
        if path.is_file():
            try:
                manifest = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return None
            return {key: value for key, value in manifest.items() if key not in _WITH_PATHS}
    return None
