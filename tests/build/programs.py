"""Stand-ins for the programs of TensorRT-LLM, at the seam where a build meets them: PATH and the
examples' folder.

They take the same arguments as the real ones, print progress, and write what those would; a file
beside them says how they misbehave. Nothing of TensorRT-LLM is in them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "1.2.1"
GPU = ["NVIDIA H200", 150 * 10**9]

# Shared by all: records the call, then does what behaviour.json says of this program.
_COMMON = """
import json, os, pathlib, signal, sys, time
home = pathlib.Path({home!r})
name = {name!r}
behaviour = json.loads((home / "behaviour.json").read_text()).get(name, {{}})
if not (name == "python3" and sys.argv[1] != "-c"):
    with (home / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps([name, os.getpid(), sys.argv[1:]]) + "\\n")
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
def misbehave(output):
    for step in range(3):
        print(f"{{name}}: part {{step}} of 3", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    if behaviour.get("half"):
        (output / "half-written").write_text("half")
    if behaviour.get("hang"):
        (home / f"{{name}}.hangs").touch()
        time.sleep(600)
    if "signal" in behaviour:
        os.kill(os.getpid(), behaviour["signal"])
    if "exit" in behaviour:
        print("RuntimeError: something in there went wrong", file=sys.stderr)
        sys.exit(behaviour["exit"])
"""
_PYTHON = """
if sys.argv[1] == "-c":
    if "exit" in behaviour:
        print("ModuleNotFoundError: No module named 'tensorrt_llm'", file=sys.stderr)
        sys.exit(behaviour["exit"])
    print("[TensorRT-LLM] TensorRT-LLM version")
    print(json.dumps(behaviour["answer"]) if "answer" in behaviour else "")
    sys.exit(0)
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
_CONVERT = """
output = pathlib.Path(value("--output_dir"))
source = pathlib.Path(value("--model_dir"))
assert (source / "config.json").exists() and value("--dtype") == "bfloat16"
misbehave(output)
if not behaviour.get("nothing"):
    tp = int(value("--tp_size"))
    for rank in range(tp):
        (output / f"rank{{rank}}.safetensors").write_bytes(b"w" * 1000)
    model = json.loads((source / "config.json").read_text())
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size",
             "vocab_size")
    quantization = {{"kv_cache_quant_algo": "FP8"}} if "--kv_cache_dtype" in sys.argv else {{}}
    (output / "config.json").write_text(json.dumps({{
        **{{key: model[key] for key in names}}, "dtype": "bfloat16", "quantization": quantization,
        "mapping": {{"tp_size": tp, "pp_size": 1}},
    }}))
"""
_BUILD = """
output = pathlib.Path(value("--output_dir"))
converted = pathlib.Path(value("--checkpoint_dir"))
pretrained = json.loads((converted / "config.json").read_text())
misbehave(output)
numbers = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
config = {{
    "version": "1.2.1",
    "pretrained_config": pretrained,
    "build_config": {{
        **{{number: int(value(f"--{{number}}")) for number in numbers}},
        "kv_cache_type": value("--kv_cache_type").upper(),
        "gather_context_logits": "--gather_context_logits" in sys.argv,
        "plugin_config": {{
            "tokens_per_block": int(value("--tokens_per_block")),
            "use_paged_context_fmha": value("--use_paged_context_fmha") == "enable",
            "remove_input_padding": value("--remove_input_padding") == "enable",
        }},
    }},
}}
for path, changed in behaviour.get("config", {{}}).items():
    part, *keys = config, *path.split(".")
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = changed
(output / "config.json").write_text(json.dumps(config))
for rank in range(pretrained["mapping"]["tp_size"] - behaviour.get("missing_ranks", 0)):
    (output / f"rank{{rank}}.engine").write_bytes(b"e" * 2000)
"""
_SCRIPTS = (
    "models/core/llama/convert_checkpoint.py",
    "models/core/qwen/convert_checkpoint.py",
    "quantization/quantize.py",
)


@dataclass(frozen=True)
class Programs:
    """A folder with the stand-ins: `bin` for PATH, `examples` for --examples."""

    home: Path

    @property
    def examples(self) -> Path:
        return self.home / "examples"

    @property
    def environment(self) -> dict[str, str]:
        """In which `tokenflow build` finds them."""
        path = os.pathsep.join([str(self.home / "bin"), os.environ.get("PATH", os.defpath)])
        return {**os.environ, "PATH": path}

    def behave(self, **behaviour: dict[str, Any]) -> None:
        """Programs: convert, trtllm_build, python3 (the probe). Keys: exit, signal, hang, half,
        nothing, config, missing_ranks; answer, of the probe."""
        probe = {"version": VERSION, "has_executor": True, "python": "3.12.3", "gpus": [GPU]}
        told = {"python3": {"answer": probe}, **behaviour}
        (self.home / "behaviour.json").write_text(json.dumps(told))

    def calls(self) -> list[str]:
        """Names of the programs that ran, in order, without the probe."""
        return [name for name, _, _ in self._records() if name != "python3"]

    def pids(self) -> list[int]:
        return [pid for _, pid, _ in self._records()]

    def forget_calls(self) -> None:
        (self.home / "calls.jsonl").unlink(missing_ok=True)

    def hangs(self, name: str) -> bool:
        return (self.home / f"{name}.hangs").exists()

    def _records(self) -> list[Any]:
        path = self.home / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def install(home: Path) -> Programs:
    """Write the stand-ins into `home`; they behave well until told otherwise."""
    programs = Programs(home)
    _write(home / "bin" / "python3", "python3", _PYTHON, home)
    _write(home / "bin" / "trtllm-build", "trtllm_build", _BUILD, home)
    for script in _SCRIPTS:
        _write(programs.examples / script, "convert", _CONVERT, home)
    programs.behave()
    return programs


def _write(path: Path, name: str, body: str, home: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (_COMMON + body).format(home=str(home), name=name, python=sys.executable)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
