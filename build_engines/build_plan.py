"""From what is asked to the exact commands and the memory budget, without running anything.

Owns the checks of a request and the argument lists. Invariants: the same request gives the same
plan, on any machine; a plan that is returned has a model whose heads divide by its GPUs, lengths
that its positions reach, and a budget that fits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_engines.checkpoint import Checkpoint
from build_engines.gpu_memory import GPU_MEMORY, GpuMemory
from build_engines.memory_budget import Budget, EngineLimits, make_budget
from build_engines.model_shapes import ModelShape
from build_engines.recipes import (
    FROM_CHECKPOINT,
    NUMBER_TYPES,
    PAUSE_RESUME_FLAGS,
    QUANTIZER,
    RECIPES,
    TOKENS_PER_BLOCK,
    TP_SIZES,
    Family,
    NumberType,
)
from tokenflow.errors import ConfigError

EXAMPLES = "/app/examples"
"""Where Triton's TensorRT-LLM images keep the examples, converters among them."""
CONVERTED_DIR, ENGINE_DIR, LOG_DIR = "converted", "engine", "logs"
CONVERT, BUILD = "convert", "build"
_CONTEXT_TOKENS = 2048
_ENGINE_OVERHEAD = 1.05
"""An engine file is its weights and a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What is asked. None: the recipe's or the GPU's own value.

    model: a recipe's name or from-checkpoint. gpu: a name in GPU_MEMORY. dtype: bf16 or fp8.
    context_tokens: of a stream, for the count of readers (2,048, or what the engine takes).
    gpu_bytes: memory of one GPU instead of the data sheet's. host_bytes: for KV, behind each GPU.
    examples: the folder of TensorRT-LLM's examples. python: what runs the converters.
    calib_dataset: a folder or a hub's name; fp8 only.
    """

    model: str
    gpu: str
    tp: int = 1
    dtype: str = "bf16"
    checkpoint: Path | None = None
    output: Path | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    tokens_per_block: int = 32
    free_fraction: float = 0.9
    host_bytes: int = 0
    gpu_bytes: int | None = None
    context_tokens: int | None = None
    examples: str = EXAMPLES
    python: str = "python3"
    calib_dataset: str = "cnn_dailymail"
    calib_size: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command. argv: as it is run. output: the folder that it fills."""

    name: str
    argv: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What is done, in order, and what the engine will need. disk_bytes: that the steps write."""

    request: BuildRequest
    family: Family
    shape: ModelShape
    gpu: GpuMemory
    kind: NumberType
    limits: EngineLimits
    steps: tuple[Step, ...]
    budget: Budget
    disk_bytes: int

    def to_record(self) -> dict[str, Any]:
        """The plan for JSON and the manifest: names, limits, flags, sizes, commands."""
        return {
            "model": self.request.model,
            "architecture": self.family.architecture,
            "num_params": self.shape.num_params,
            "gpu": self.gpu.name,
            "tp_size": self.request.tp,
            "dtype": self.kind.name,
            "limits": asdict(self.limits),
            "flags": dict(_engine_flags(self.kind, self.limits, self.request.tp)),
            "memory": self.budget.to_record(),
            "disk_bytes": self.disk_bytes,
            "commands": [{"step": step.name, "argv": list(step.argv)} for step in self.steps],
        }


def make_plan(request: BuildRequest, checkpoint: Checkpoint | None = None) -> BuildPlan:
    """Judge the request and lay out the commands.

    checkpoint: what was found in request.checkpoint; without it paths stand as CHECKPOINT, OUTPUT.
    Raises ConfigError with the first thing that cannot be.
    """
    gpu = _choice("gpu", GPU_MEMORY, request.gpu)
    kind = _choice("dtype", NUMBER_TYPES, request.dtype)
    if kind.name == "fp8" and not gpu.has_fp8:
        raise ConfigError("dtype", f"{gpu.name} has no FP8 tensor cores; use bf16")
    family, shape, positions = _model(request, checkpoint)
    _check_group(request.tp, shape)
    limits = _limits(request, gpu, positions)
    _check_range("free_fraction", request.free_fraction, 0.01, 0.99)
    _check_range("host_gb", request.host_bytes / 1e9, 0, 10_000)
    _check_range("calib_size", request.calib_size, 1, 1 << 20)
    budget = make_budget(
        shape,
        kind,
        limits,
        tp=request.tp,
        gpu_bytes=_gpu_bytes(request, gpu),
        free_fraction=request.free_fraction,
        host_bytes=request.host_bytes,
        context_tokens=_context_tokens(request, limits),
    )
    return BuildPlan(
        request=request,
        family=family,
        shape=shape,
        gpu=gpu,
        kind=kind,
        limits=limits,
        steps=_steps(request, family, kind, limits),
        budget=budget,
        # The converted checkpoint and the engine: every GPU's weights in each of them.
        disk_bytes=int(2 * _ENGINE_OVERHEAD * budget.weight_bytes * request.tp),
    )


def _model(
    request: BuildRequest, checkpoint: Checkpoint | None
) -> tuple[Family, ModelShape, int]:  # fmt: skip
    """Family, shape and the tokens that positions reach."""
    if request.model == FROM_CHECKPOINT:
        if checkpoint is None:
            raise ConfigError("checkpoint", f"--model {FROM_CHECKPOINT} needs --checkpoint")
        return checkpoint.family, checkpoint.shape, checkpoint.max_position_embeddings
    recipe = RECIPES.get(request.model)
    if recipe is None:
        known = ", ".join((*RECIPES, FROM_CHECKPOINT))
        raise ConfigError("model", f"must be one of {known}, got {request.model!r}")
    if checkpoint is None:
        return recipe.family, recipe.shape, recipe.max_seq_len
    if checkpoint.family != recipe.family:
        raise ConfigError(
            "architectures",
            f"{recipe.name} is a {recipe.family.architecture}, the checkpoint a "
            f"{checkpoint.family.architecture}",
        )
    wanted, found = asdict(recipe.shape), asdict(checkpoint.shape)
    for key, value in wanted.items():
        if key != "name" and found[key] != value:
            raise ConfigError(
                key,
                f"{recipe.name} has {value}, the checkpoint {found[key]}; for another model use "
                f"--model {FROM_CHECKPOINT}",
            )
    return recipe.family, recipe.shape, checkpoint.max_position_embeddings


def _check_group(tp: int, shape: ModelShape) -> None:
    if tp not in TP_SIZES:
        raise ConfigError("tp", f"must be one of {', '.join(map(str, TP_SIZES))}, got {tp}")
    for key, value in (
        ("num_attention_heads", shape.num_heads),
        ("num_key_value_heads", shape.num_kv_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if value % tp:
            raise ConfigError("tp", f"{key} {value} is not divisible by {tp}")


def _limits(request: BuildRequest, gpu: GpuMemory, positions: int) -> EngineLimits:
    batch = gpu.max_batch_size if request.max_batch_size is None else request.max_batch_size
    num_tokens = gpu.max_num_tokens if request.max_num_tokens is None else request.max_num_tokens
    seq_len = positions if request.max_seq_len is None else request.max_seq_len
    _check_range("max_batch_size", batch, 1, 4096)
    _check_range("max_num_tokens", num_tokens, 16, 1 << 20)
    _check_range("max_seq_len", seq_len, 2, 1 << 24)
    if seq_len > positions:
        raise ConfigError(
            "max_seq_len", f"{seq_len} is more than the {positions} that the positions reach"
        )
    if num_tokens < batch:
        raise ConfigError(
            "max_num_tokens", f"{num_tokens} tokens hold no step of {batch} streams"
        )  # fmt: skip
    if request.tokens_per_block not in TOKENS_PER_BLOCK:
        known = ", ".join(map(str, TOKENS_PER_BLOCK))
        raise ConfigError(
            "tokens_per_block", f"must be one of {known}, got {request.tokens_per_block}"
        )
    limits = EngineLimits(
        max_batch_size=batch,
        max_num_tokens=num_tokens,
        max_seq_len=seq_len,
        tokens_per_block=request.tokens_per_block,
    )
    _check_step(limits)
    return limits


def _check_step(limits: EngineLimits) -> None:
    """`trtllm-build` moves max_num_tokens into these bounds with a warning (source:
    tensorrt_llm/_common.py, check_max_num_tokens), and the engine would not be the one asked for.
    """
    num_tokens, batch, seq_len = limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len
    if num_tokens < limits.tokens_per_block:
        raise ConfigError(
            "max_num_tokens",
            f"must be at least tokens_per_block ({limits.tokens_per_block}), got {num_tokens}",
        )
    if num_tokens > batch * seq_len:
        raise ConfigError(
            "max_num_tokens",
            f"{num_tokens} is more than {batch} streams of {seq_len} tokens have: at most "
            f"{batch * seq_len}",
        )


def _gpu_bytes(request: BuildRequest, gpu: GpuMemory) -> int:
    num_bytes = gpu.memory_bytes if request.gpu_bytes is None else request.gpu_bytes
    _check_range("gpu_memory_gb", num_bytes / 1e9, 1, 1000)
    return num_bytes


def _context_tokens(request: BuildRequest, limits: EngineLimits) -> int:
    if request.context_tokens is None:
        return min(_CONTEXT_TOKENS, limits.max_seq_len)
    _check_range("context", request.context_tokens, 1, limits.max_seq_len)
    return request.context_tokens


def _steps(
    request: BuildRequest, family: Family, kind: NumberType, limits: EngineLimits
) -> tuple[Step, ...]:
    source = "CHECKPOINT" if request.checkpoint is None else str(request.checkpoint)
    output = "OUTPUT" if request.output is None else str(request.output)
    converted, engine = f"{output}/{CONVERTED_DIR}", f"{output}/{ENGINE_DIR}"
    script = family.converter if kind.name == "bf16" else QUANTIZER
    convert = [request.python, f"{request.examples}/{script}", "--model_dir", source]
    convert += ["--output_dir", converted, "--dtype", "bfloat16", "--tp_size", str(request.tp)]
    if kind.name == "fp8":
        convert += ["--qformat", "fp8", "--kv_cache_dtype", "fp8"]
        convert += ["--calib_size", str(request.calib_size)]
        convert += ["--calib_dataset", request.calib_dataset]
    build = ["trtllm-build", "--checkpoint_dir", converted, "--output_dir", engine]
    for flag, value in _engine_flags(kind, limits, request.tp):
        build += [flag, value]
    return (
        Step(name=CONVERT, argv=tuple(convert), output=CONVERTED_DIR),
        Step(name=BUILD, argv=tuple(build), output=ENGINE_DIR),
    )


def _engine_flags(kind: NumberType, limits: EngineLimits, tp: int) -> tuple[tuple[str, str], ...]:
    """Of `trtllm-build`, in the order of the command line.

    max_input_len is a token less than max_seq_len: with chunked context the runtime takes prompts
    up to there, and a resume's prompt is prompt and output together. One worker for each GPU
    (`--workers`), as far as the machine has them.
    """
    return (
        ("--max_batch_size", str(limits.max_batch_size)),
        ("--max_num_tokens", str(limits.max_num_tokens)),
        ("--max_seq_len", str(limits.max_seq_len)),
        ("--max_input_len", str(limits.max_seq_len - 1)),
        ("--tokens_per_block", str(limits.tokens_per_block)),
        *((flag, value) for flag, value, _ in PAUSE_RESUME_FLAGS),
        *kind.flags,
        ("--workers", str(tp)),
    )


def _choice(key: str, known: Any, name: str) -> Any:
    if name not in known:
        raise ConfigError(key, f"must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(key, f"must be in [{low}, {high}], got {value}")
