"""The engine folder of the double: what `trtllm-build` leaves, and what stands behind it.

`write_engine` makes a folder with `config.json` (build_config and pretrained_config with the names
of TensorRT-LLM 1.2.x), `rank<N>.engine` for each rank, and `double.json`, which says what computes.
A file `fail` in the folder makes every step fail while it is there, as a sticky device error does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tokenflow.executor.api import Request
from tokenflow.inflight.runner import Runner, SequenceChunk, StepOutput
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import script_by_name

FAIL_FILE = "fail"
KV_BYTES_PER_TOKEN = 1024
"""Of the shapes that `write_engine` writes: 2 layers, 2 KV heads of 64, two bytes, keys and values;
what the scripted runner says a token takes."""


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """double.json.

    runner: `scripted` (a script by name, its vocabulary and seconds of a step), `logits` (scripted
        logits and the real sampler) or `torch` (checkpoint, a Hugging Face folder, and dtype).
    free_gpu_memory_bytes: what a pool that is given as a fraction is a fraction of.
    on_hazard: `raise` lets a use that TensorRT-LLM 1.2 does not forgive fail at once, `record`
        writes it to `hazards.txt` in the folder and goes on.
    log_probs: whether a streaming response carries those of all tokens so far (`all`) or of its own
        (`new`): callers must take both.
    """

    runner: str = "scripted"
    script: str = "counting"
    vocab_size: int = 256
    step_s: float = 0.0
    checkpoint: str = ""
    dtype: str = "float32"
    free_gpu_memory_bytes: int = 64 << 20
    on_hazard: str = "raise"
    log_probs: str = "all"


def write_engine(
    folder: Path,
    behind: Behind,
    *,
    max_batch_size: int = 8,
    max_num_tokens: int = 512,
    max_seq_len: int = 2048,
    tokens_per_block: int = 32,
    tp_size: int = 1,
    pp_size: int = 1,
    build: dict[str, Any] | None = None,
    plugins: dict[str, Any] | None = None,
    pretrained: dict[str, Any] | None = None,
) -> Path:
    """Write the folder and return it. build, plugins, pretrained: entries of config.json that
    differ from those of an engine that pause and resume can use."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": "float32",
            "vocab_size": behind.vocab_size,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 256,
            "head_size": 64,
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            "mapping": {
                "world_size": tp_size * pp_size,
                "tp_size": tp_size,
                "pp_size": pp_size,
                "cp_size": 1,
                "gpus_per_node": 8,
            },
            **(pretrained or {}),
        },
        "build_config": {
            "max_input_len": max_seq_len - 1,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "speculative_decoding_mode": 1,
            "plugin_config": {
                "gpt_attention_plugin": "auto",
                "remove_input_padding": True,
                "context_fmha": True,
                "use_paged_context_fmha": True,
                "paged_kv_cache": True,
                "tokens_per_block": tokens_per_block,
                **(plugins or {}),
            },
            **(build or {}),
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for rank in range(tp_size * pp_size):
        (folder / f"rank{rank}.engine").write_bytes(b"double")
    (folder / "double.json").write_bytes(msgspec.json.encode(behind))
    return folder


def read_behind(folder: Path) -> Behind:
    """What `write_engine` was given. Raises RuntimeError for a folder that it did not write."""
    try:
        return msgspec.json.decode((folder / "double.json").read_bytes(), type=Behind)
    except (OSError, msgspec.DecodeError) as error:
        raise RuntimeError(f"{folder} is no engine of the double: {error}") from None


def make_runner(folder: Path, behind: Behind) -> Runner:
    """The runner that computes for the engine in `folder`."""
    if behind.runner == "torch":
        from tokenflow.inflight.torch_runner import TorchRunner

        runner: Runner = TorchRunner(behind.checkpoint, "cpu", behind.dtype, 1)
    elif behind.runner == "logits":
        from tests.support.logits_runner import LogitsRunner

        runner = LogitsRunner(behind.vocab_size, step_s=behind.step_s)
    elif behind.runner == "scripted":
        script = script_by_name(behind.script, behind.vocab_size)
        runner = ScriptedRunner(script, behind.vocab_size, step_s=behind.step_s)
    else:
        raise RuntimeError(f"double.json: runner {behind.runner!r}")
    return FailingRunner(runner, folder / FAIL_FILE)


class FailingRunner:
    """A runner whose steps fail while a file is there."""

    def __init__(self, runner: Runner, fail_path: Path) -> None:
        self._runner = runner
        self._fail_path = fail_path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def add_request(self, request_id: int, request: Request) -> None:
        self._runner.add_request(request_id, request)

    def forward(self, chunks: list[SequenceChunk]) -> StepOutput:
        if self._fail_path.exists():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._runner.forward(chunks)
