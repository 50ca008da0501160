"""`tokenflow build`: a TensorRT-LLM engine from a Hugging Face checkpoint, or the plan for one.

Owns its flags and what progress looks like. Invariant: `build_engines` is imported when the command
runs, not when it is declared; it judges the values.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenflow.cli.signals import termination_as_ctrl_c
from tokenflow.errors import ConfigError

if TYPE_CHECKING:
    from build_engines.build_plan import BuildRequest

_DESCRIPTION = """\
Converts a checkpoint and builds an engine with TensorRT-LLM 1.2.1's own commands, with every flag
that pausing and resuming needs, and writes manifest.json. Run again, it goes on where it stopped.
--plan prints the commands and the memory budget instead; that needs neither TensorRT-LLM nor a GPU,
nor a checkpoint."""
_GB = 1e9
_MAX_GB = 1e6
_SHOWN = 80


def add_parser(commands: Any) -> None:
    """Add `build` to the subcommands."""
    parser = commands.add_parser(
        "build", help="a TensorRT-LLM engine from a checkpoint", description=_DESCRIPTION
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="llama-3-8b, qwen2.5-7b, qwen2.5-32b, or from-checkpoint",
    )
    what.add_argument(
        "--gpu", required=True, metavar="NAME", help="h200, h100, a100, l40s, a6000, 4090"
    )
    what.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs: 1, 2 or 4 (1)")
    what.add_argument("--dtype", default="bf16", metavar="NAME", help="bf16 or fp8 (bf16)")
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="Hugging Face checkpoint")
    what.add_argument("--output", type=Path, metavar="DIR", help="folder to build in")
    _add_limits(parser)
    _add_tools(parser)
    parser.add_argument("--plan", action="store_true", help="print the plan, run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or build and print the folder. Raises ConfigError and BuildError."""
    from build_engines.build_plan import make_plan
    from build_engines.checkpoint import read_checkpoint
    from build_engines.plan_text import plan_text

    request = _request(arguments)
    checkpoint = None if request.checkpoint is None else read_checkpoint(request.checkpoint)
    plan = make_plan(request, checkpoint)
    if arguments.plan:
        print(json.dumps(plan.to_record(), indent=1) if arguments.json else plan_text(plan))
        return 0
    if checkpoint is None:
        raise ConfigError("checkpoint", "is needed to build; --plan goes without")
    if request.output is None:
        raise ConfigError("output", "is needed to build; --plan goes without")
    from build_engines.builder import run_build
    from build_engines.manifest import read_manifest

    if not arguments.json:
        print(plan_text(plan), file=sys.stderr)
    with termination_as_ctrl_c(), _Progress() as progress:
        output = run_build(plan, checkpoint, progress)
    print(json.dumps(read_manifest(output), indent=1) if arguments.json else output)
    return 0


class _Progress:
    """One line on stderr per step: seconds and the last thing that its command printed."""

    def __init__(self) -> None:
        self._step = ""

    def __call__(self, step: str, seconds: float, line: str) -> None:
        terminal = sys.stderr.isatty()
        if step != self._step:
            self._end()
            self._step = step
            if not terminal:
                print(f"tokenflow: {step} …", file=sys.stderr, flush=True)
        if terminal:
            shown = f"{step} … {seconds:.0f} s  {line}"[:_SHOWN]
            sys.stderr.write(f"\r{shown:<{_SHOWN}}")
            sys.stderr.flush()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._step and sys.stderr.isatty():
            sys.stderr.write("\n")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits and memory")
    _number(group, "--max-batch-size", int, None, "streams in a step (by GPU)")
    _number(group, "--max-num-tokens", int, None, "tokens in a step (by GPU)")
    _number(group, "--max-seq-len", int, None, "prompt and output of a stream (by model)")
    _number(group, "--tokens-per-block", int, 32, "tokens in a KV block (32)")
    _number(group, "--free-fraction", float, 0.9, "of what the engine leaves free, for KV (0.9)")
    _number(group, "--host-gb", float, 0.0, "host memory for KV behind each GPU, 10^9 bytes (0)")
    _number(group, "--gpu-memory-gb", float, None, "memory of a GPU, 10^9 bytes (data sheet)")
    _number(group, "--context", int, None, "tokens of a stream, for the count of readers (2048)")


def _add_tools(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("programs and calibration")
    group.add_argument(
        "--examples",
        default=None,
        metavar="DIR",
        help="TensorRT-LLM's examples (/app/examples, where Triton's images have them)",
    )
    group.add_argument(
        "--python", default="python3", metavar="PROGRAM", help="runs the converter (%(default)s)"
    )
    group.add_argument(
        "--calib-dataset",
        default="cnn_dailymail",
        metavar="NAME",
        help="fp8: a folder, or a name that is downloaded (%(default)s)",
    )
    _number(group, "--calib-size", int, 512, "fp8: samples of it (512)")


def _request(arguments: argparse.Namespace) -> BuildRequest:
    from build_engines.build_plan import EXAMPLES, BuildRequest

    measured = arguments.gpu_memory_gb
    return BuildRequest(
        model=arguments.model,
        gpu=arguments.gpu,
        tp=arguments.tp,
        dtype=arguments.dtype,
        checkpoint=_absolute(arguments.checkpoint),
        output=_absolute(arguments.output),
        max_batch_size=arguments.max_batch_size,
        max_num_tokens=arguments.max_num_tokens,
        max_seq_len=arguments.max_seq_len,
        tokens_per_block=arguments.tokens_per_block,
        free_fraction=arguments.free_fraction,
        host_bytes=_bytes("host_gb", arguments.host_gb),
        gpu_bytes=None if measured is None else _bytes("gpu_memory_gb", measured),
        context_tokens=arguments.context,
        examples=EXAMPLES
        if arguments.examples is None
        else str(_absolute(Path(arguments.examples))),
        python=arguments.python,
        calib_dataset=arguments.calib_dataset,
        calib_size=arguments.calib_size,
    )


def _bytes(key: str, gigabytes: float) -> int:
    if not abs(gigabytes) <= _MAX_GB:
        raise ConfigError(key, f"must be at most {_MAX_GB:g}, got {gigabytes}")
    return int(gigabytes * _GB)


def _absolute(path: Path | None) -> Path | None:
    """Commands run from anywhere; the path in a plan must say the same there."""
    return None if path is None else path.absolute()


def _number(
    group: argparse._ArgumentGroup, flag: str, kind: type, default: float | None, words: str
) -> None:
    group.add_argument(flag, type=kind, default=default, metavar="N", help=words)
