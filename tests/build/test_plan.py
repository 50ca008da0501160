"""Plans: golden texts of every recipe, memory by hand and by what engines have logged, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_engines.build_plan import BuildRequest, make_plan
from build_engines.gpu_memory import GPU_MEMORY
from build_engines.memory_budget import (
    EngineLimits,
    activation_bytes,
    buffer_bytes,
    kv_bytes_per_token_and_gpu,
    weight_bytes_per_gpu,
)
from build_engines.model_shapes import LLAMA3_8B, QWEN25_7B, QWEN25_32B, ModelShape
from build_engines.recipes import NUMBER_TYPES, PAUSE_RESUME_FLAGS, RECIPES, TP_SIZES
from tests.build import golden_plans
from tokenflow.cli import main
from tokenflow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BF16, FP8 = NUMBER_TYPES["bf16"], NUMBER_TYPES["fp8"]
MIB = 1024**2
LLAMA31_8B = LLAMA3_8B  # the same layers
LLAMA2_7B = ModelShape(
    name="llama2-7b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11_008,
    vocab_size=32_000,
)
QWEN25_05B = ModelShape(
    name="qwen2.5-0.5b",
    num_layers=24,
    hidden_size=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    vocab_size=151_936,
    tied_embeddings=True,
    qkv_bias=True,
)


@pytest.mark.parametrize(("model", "tp", "dtype"), golden_plans.CASES)
def test_the_plan_of_every_recipe_is_the_golden_one(model: str, tp: int, dtype: str) -> None:
    golden = golden_plans.path_of(model, tp, dtype).read_text()
    assert golden_plans.text_of(model, tp, dtype) == golden


def test_no_golden_plan_is_left_over() -> None:
    kept = {path.name for path in golden_plans.FOLDER.iterdir()}
    assert kept == {golden_plans.path_of(*case).name for case in golden_plans.CASES}


@pytest.mark.parametrize(
    ("shape", "num_params", "kv_bytes"),
    [
        (LLAMA3_8B, 8_030_261_248, 131_072),
        (QWEN25_7B, 7_615_616_512, 57_344),
        (QWEN25_32B, 32_763_876_352, 262_144),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_weights_and_kv_are_those_of_the_named_models(
    shape: ModelShape, num_params: int, kv_bytes: int
) -> None:
    """Counts of parameters and KV sizes as published for these checkpoints."""
    assert shape.num_params == num_params
    assert weight_bytes_per_gpu(shape, BF16, 1) == 2 * num_params
    assert kv_bytes_per_token_and_gpu(shape, BF16, 1) == kv_bytes
    assert kv_bytes_per_token_and_gpu(shape, BF16, 4) == kv_bytes // 4
    assert kv_bytes_per_token_and_gpu(shape, FP8, 2) == kv_bytes // 4
    # FP8: the layers' matrices are halved, embedding and head are not.
    tables = 2 * shape.vocab_size * shape.hidden_size
    fp8 = weight_bytes_per_gpu(shape, FP8, 1)
    assert num_params + tables <= fp8 <= num_params + tables + 0.001 * num_params


@pytest.mark.parametrize(
    ("shape", "max_num_tokens", "logged_mib"),
    [(LLAMA31_8B, 128_000, 37_812.51), (LLAMA2_7B, 8192, 928.77), (QWEN25_05B, 8192, 773.51)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_activations_are_bounded_from_above(
    shape: ModelShape, max_num_tokens: int, logged_mib: float
) -> None:
    """By what TensorRT-LLM logged as its execution context for engines of others."""
    bound = activation_bytes(shape, max_num_tokens, 1)
    assert logged_mib * MIB <= bound <= 3 * logged_mib * MIB


@pytest.mark.parametrize(
    ("shape", "batch", "seq_len", "logged_gib"),
    [(LLAMA2_7B, 4096, 4098, 1.14 + 4.35), (QWEN25_05B, 2048, 32_768, 2.66 + 5.76)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_buffers_are_bounded_from_above(
    shape: ModelShape, batch: int, seq_len: int, logged_gib: float
) -> None:
    """By what TensorRT-LLM logged for runtime buffers and decoder of engines of others."""
    limits = EngineLimits(max_batch_size=batch, max_num_tokens=8192, max_seq_len=seq_len)
    bound = buffer_bytes(shape, limits)
    assert logged_gib * 1024**3 <= bound <= 2.5 * logged_gib * 1024**3


def test_the_budget_of_llama_on_an_h200_by_hand() -> None:
    budget = make_plan(BuildRequest(model="llama-3-8b", gpu="h200", host_bytes=10**10)).budget
    assert budget.weight_bytes == 16_060_522_496
    assert budget.activation_bytes == 3 * 2 * (3 * 4096 + 48 * 128 + 3 * 14_336) * 8192
    assert budget.buffer_bytes == (48 * 128_256 + 32 * 8192) * 512
    left = 141 * 10**9 - budget.fixed_bytes
    assert budget.pool_bytes == int(0.9 * left)
    assert budget.num_blocks == budget.pool_bytes // (131_072 * 32)
    assert budget.num_device_readers == budget.num_blocks // (2048 // 32)
    assert budget.num_running_readers == budget.num_device_readers < 512
    assert budget.num_host_blocks == 10**10 // 4_194_304


@given(
    model=st.sampled_from(sorted(RECIPES)),
    gpu=st.sampled_from(sorted(GPU_MEMORY)),
    tp=st.sampled_from(TP_SIZES),
    dtype=st.sampled_from(sorted(NUMBER_TYPES)),
    batch=st.integers(1, 1024),
    num_tokens=st.integers(16, 32_768),
    seq_len=st.integers(2, 32_768),
    fraction=st.floats(0.01, 0.99),
    host_bytes=st.integers(0, 10**12),
)
def test_what_is_planned_fits(
    model: str,
    gpu: str,
    tp: int,
    dtype: str,
    batch: int,
    num_tokens: int,
    seq_len: int,
    fraction: float,
    host_bytes: int,
) -> None:
    request = BuildRequest(
        model=model,
        gpu=gpu,
        tp=tp,
        dtype=dtype,
        max_batch_size=batch,
        max_num_tokens=num_tokens,
        max_seq_len=seq_len,
        free_fraction=fraction,
        host_bytes=host_bytes,
        context_tokens=min(seq_len, 2048),
    )
    try:
        plan = make_plan(request)
    except ConfigError:
        return
    assert make_plan(request) == plan
    budget = plan.budget
    assert budget.fixed_bytes + budget.num_blocks * budget.block_bytes <= budget.gpu_bytes
    assert budget.num_blocks * budget.tokens_per_block >= seq_len
    assert budget.num_device_readers * budget.blocks_per_reader <= budget.num_blocks
    assert budget.num_running_readers <= batch
    assert budget.num_host_blocks * budget.block_bytes <= host_bytes
    assert plan.disk_bytes >= 2 * budget.weight_bytes * tp
    argv = plan.steps[-1].argv
    for flag, value, _ in PAUSE_RESUME_FLAGS:
        assert argv[argv.index(flag) + 1] == value
    assert "--gather_context_logits" not in argv


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "gpt-5"}, "model: must be one of llama-3-8b, qwen2.5-7b, qwen2.5-32b, from-"),
        ({"model": "from-checkpoint"}, "checkpoint: --model from-checkpoint needs --checkpoint"),
        ({"gpu": "tpu"}, "gpu: must be one of h200, h100, a100, l40s, a6000, 4090, got 'tpu'"),
        ({"dtype": "int4"}, "dtype: must be one of bf16, fp8, got 'int4'"),
        ({"gpu": "a6000", "dtype": "fp8"}, "dtype: a6000 has no FP8 tensor cores"),
        ({"tp": 3}, "tp: must be one of 1, 2, 4, got 3"),
        ({"model": "qwen2.5-32b", "gpu": "4090"}, r"gpu: .* are needed before any KV \(65.53 GB"),
        (
            {"gpu": "4090", "max_num_tokens": 8192, "max_batch_size": 256},
            "max_seq_len: the KV pool holds 7,",
        ),
        ({"max_seq_len": 8193}, "max_seq_len: 8193 is more than the 8192 that the positions reach"),
        ({"max_seq_len": 1}, r"max_seq_len: must be in \[2, "),
        ({"max_batch_size": 0}, r"max_batch_size: must be in \[1, 4096\], got 0"),
        ({"max_num_tokens": 256}, "max_num_tokens: 256 tokens hold no step of 512 streams"),
        (
            {"max_num_tokens": 16, "max_batch_size": 4},
            r"max_num_tokens: must be at least tokens_per_block \(32\), got 16",
        ),
        (
            {"max_batch_size": 2, "max_seq_len": 1000},
            "max_num_tokens: 8192 is more than 2 streams of 1000 tokens have: at most 2000",
        ),
        ({"tokens_per_block": 48}, "tokens_per_block: must be one of 8, 16, 32, 64, 128, got 48"),
        ({"free_fraction": 1.5}, r"free_fraction: must be in \[0.01, 0.99\], got 1.5"),
        ({"context_tokens": 9000}, r"context: must be in \[1, 8192\], got 9000"),
        ({"host_bytes": 1000}, r"host_gb: 1000 bytes hold no KV block \(4194304 bytes\)"),
        ({"gpu_bytes": 5}, r"gpu_memory_gb: must be in \[1, 1000\]"),
        ({"calib_size": 0}, "calib_size: must be in"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict, reason: str) -> None:
    request = {"model": "llama-3-8b", "gpu": "h200", **changes}
    with pytest.raises(ConfigError, match=reason):
        make_plan(BuildRequest(**request))


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", "--plan", "--model", "llama-3-8b", "--gpu", "h200", "--host-gb", "64"]
    assert main.main(arguments) == 0
    golden = golden_plans.path_of("llama-3-8b", 1, "bf16").read_text()
    assert capsys.readouterr().out == golden


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", "--plan", "--json", "--model", "qwen2.5-7b", "--gpu", "l40s", "--tp", "2"]
    assert main.main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["memory"]["kv_bytes_per_token"] == 57_344 // 2
    assert record["limits"]["max_num_tokens"] == 2048
    assert record["flags"]["--use_paged_context_fmha"] == "enable"
    assert [command["step"] for command in record["commands"]] == ["convert", "build"]
    assert record["memory"]["num_device_readers"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "llama-3-8b"], "checkpoint: is needed to build"),
        (["--model", "llama-3-8b", "--checkpoint", "/nowhere"], "checkpoint: /nowhere is not a"),
        (["--model", "llama-3-8b", "--plan", "--host-gb", "nan"], "host_gb: must be at most"),
        (["--model", "llama-3-8b", "--plan", "--gpu-memory-gb", "inf"], "gpu_memory_gb: must be"),
        (["--model", "llama-3-8b", "--plan", "--host-gb", "-1"], "host_gb: must be in [0,"),
    ],
)
def test_the_command_says_what_is_missing(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["build", "--gpu", "h200", *arguments]) == 1
    assert f"tokenflow: error: {reason}" in capsys.readouterr().err


def test_planning_needs_neither_torch_nor_tensorrt_llm() -> None:
    code = (
        "import sys; from tokenflow.cli.main import main;"
        "main(['build', '--plan', '--model', 'llama-3-8b', '--gpu', 'h200']);"
        "print([m for m in ('torch', 'transformers', 'tensorrt_llm', 'safetensors')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip().endswith("[]")
