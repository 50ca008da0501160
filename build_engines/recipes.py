"""What can be built: models, number types, and the flags that pause and resume need.

Owns the recipes as data. A recipe names the family that TensorRT-LLM 1.2.1 has a converter for, the
shape that a checkpoint of that name must have, and the context its positions reach.

Flags are those of `trtllm-build` and of the examples' converters in TensorRT-LLM 1.2 (sources:
tensorrt_llm/commands/build.py, tensorrt_llm/plugin/plugin.py, examples/models/core/*/
convert_checkpoint.py, examples/quantization/quantize.py). Defaults that matter here are written out
all the same: an engine must not change its nature with the version of the program that builds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from build_engines.model_shapes import LLAMA3_8B, QWEN25_7B, QWEN25_32B, ModelShape

FROM_CHECKPOINT = "from-checkpoint"
"""Instead of a recipe's name: family and shape are those of the checkpoint."""

TP_SIZES = (1, 2, 4)
TOKENS_PER_BLOCK = (8, 16, 32, 64, 128)
"""Powers of two that the paged attention kernels take; 32 is the program's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family with a converter of its own.

    architecture: in config.json. model_type: likewise. converter: below the examples' folder.
    qkv_bias: its attention has biases.
    """

    name: str
    architecture: str
    model_type: str
    converter: str
    qkv_bias: bool


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    converter="models/core/llama/convert_checkpoint.py",
    qkv_bias=False,
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    converter="models/core/qwen/convert_checkpoint.py",
    qkv_bias=True,
)
FAMILIES = {family.architecture: family for family in (LLAMA, QWEN2)}
QUANTIZER = "quantization/quantize.py"
"""Calibrates a checkpoint to FP8 and converts it, whatever the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named model. max_seq_len: the context that its positions reach as published."""

    name: str
    family: Family
    shape: ModelShape
    max_seq_len: int


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="llama-3-8b", family=LLAMA, shape=LLAMA3_8B, max_seq_len=8192),
        Recipe(name="qwen2.5-7b", family=QWEN2, shape=QWEN25_7B, max_seq_len=32_768),
        Recipe(name="qwen2.5-32b", family=QWEN2, shape=QWEN25_32B, max_seq_len=32_768),
    )
}
"""By name. Sources: the config.json files of the published (Instruct) checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberType:
    """How weights and KV are stored.

    matrix_bytes: of a value of the layers' matrices. kv_bytes: of a value of keys and values.
    Embedding, head and norms stay bfloat16, whatever the layers are. flags: of `trtllm-build`.
    """

    name: str
    matrix_bytes: int
    kv_bytes: int
    flags: tuple[tuple[str, str], ...]


OTHER_BYTES = 2
"""Of a value of the embedding, the head and the norms."""

NUMBER_TYPES: dict[str, NumberType] = {
    kind.name: kind
    for kind in (
        NumberType(name="bf16", matrix_bytes=2, kv_bytes=2, flags=(("--gemm_plugin", "bfloat16"),)),
        # The GEMM plugin helps small batches only when the matrices are FP8, so it stays off. KV in
        # FP8 together with paged context FMHA needs the FP8 kernels of context FMHA.
        NumberType(
            name="fp8",
            matrix_bytes=1,
            kv_bytes=1,
            flags=(("--gemm_plugin", "disable"), ("--use_fp8_context_fmha", "enable")),
        ),
    )
}

PAUSE_RESUME_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("--kv_cache_type", "paged", "blocks that outlive their request"),
    ("--use_paged_context_fmha", "enable", "a resume finds its KV: block reuse, chunked context"),
    ("--context_fmha", "enable", "paged context FMHA builds on it"),
    ("--remove_input_padding", "enable", "in-flight batching: prefills and decodes in one step"),
    ("--gpt_attention_plugin", "bfloat16", "the attention that writes paged KV"),
    ("--max_beam_width", "1", "beams are never paused, and their blocks not reused"),
)
"""Flag, value, and what pausing and resuming need it for. Context logits are not gathered: the flag
for it (`--gather_context_logits`) is left out, because an engine that gathers them reuses no
blocks."""
