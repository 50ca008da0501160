"""Runs a build plan: one command after the other, each with its log, and none of them twice.

Owns the output folder while it works:

    manifest.json   what was asked, found and built; which steps are done (manifest.py)
    converted/      the checkpoint in TensorRT-LLM's form; may be deleted once the engine is there
    engine/         the engine: what `gpt_model_path` names
    tokenizer/      the tokenizer's files, and config.json: what `tokenizer_dir` names
    logs/           one file per step: everything that its command printed

Invariants: one build at a time in a folder (the lock is held by the running command too, so that it
outlives a builder that was killed); a step starts in an empty folder and is recorded only after its
command ended with 0 and its output is as asked; what ends the build ends its command (commands.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from build_engines import manifest as records
from build_engines.build_plan import BUILD, LOG_DIR, BuildPlan, Step
from build_engines.checkpoint import Checkpoint
from build_engines.commands import BuildError, Progress, run_command
from build_engines.memory_budget import gb
from build_engines.toolchain import Toolchain, find_toolchain
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_engine import LIMITS, read_built_engine

TOKENIZER_DIR = "tokenizer"
LOCK_NAME = ".lock"


def run_build(plan: BuildPlan, checkpoint: Checkpoint, progress: Progress) -> Path:
    """Build what is not built yet; returns the output folder.

    Raises ConfigError for what can be said before a command runs or is wrong with what it left,
    and BuildError when a command fails.
    """
    output = plan.request.output
    assert output is not None, "the caller names the folder"
    if checkpoint.path.resolve() == output.resolve():
        raise ConfigError("output", "must not be the checkpoint's folder")
    if checkpoint.path.resolve().is_relative_to(output.resolve()):
        raise ConfigError("output", "must not hold the checkpoint: its folders are emptied")
    try:
        with _claimed(output) as lock:
            return _build(plan, checkpoint, output, lock, progress)
    except OSError as error:
        raise ConfigError("output", f"{output} cannot be written: {error}") from error


def _build(
    plan: BuildPlan, checkpoint: Checkpoint, output: Path, lock: int, progress: Progress
) -> Path:
    known = (output / records.MANIFEST_NAME).exists()
    before = records.read_manifest(output) if known else {}
    toolchain = find_toolchain(plan)
    manifest = _new_manifest(plan, checkpoint, toolchain)
    keys = _keys(plan, manifest, toolchain)
    steps: dict[str, Any] = manifest["steps"]
    for step in plan.steps:
        entry = before.get("steps", {}).get(step.name)
        if records.is_done(entry, keys[step.name], output / step.output):
            steps[step.name] = entry
    missing = _missing(plan.steps, steps)
    _check_disk(plan, missing, output)
    records.write_manifest(output, manifest)
    for step in missing:
        started = time.monotonic()
        _run(step, output, lock, progress)
        if step.name == BUILD:
            _require_engine(output / step.output, plan)
        steps[step.name] = {
            "key": keys[step.name],
            "command": list(step.argv),
            "seconds": round(time.monotonic() - started, 1),
            "log": f"{LOG_DIR}/{step.name}.log",
            "output": records.describe_output(output / step.output),
        }
        records.write_manifest(output, manifest)
    _copy_tokenizer(checkpoint, output / TOKENIZER_DIR)
    manifest["engine"] = {"folder": plan.steps[-1].output, "files": steps[BUILD]["output"]}
    manifest["state"] = records.COMPLETE
    records.write_manifest(output, manifest)
    return output


def _missing(steps: tuple[Step, ...], done: Mapping[str, Any]) -> tuple[Step, ...]:
    """The steps to run: those behind the last one that is done. What came before it was only
    needed to make it."""
    for index in range(len(steps), 0, -1):
        if steps[index - 1].name in done:
            return steps[index:]
    return steps


def _new_manifest(
    plan: BuildPlan, checkpoint: Checkpoint, toolchain: Toolchain
) -> dict[str, Any]:  # fmt: skip
    try:
        own = version("tokenflow-triton")
    except PackageNotFoundError:  # a checkout that was never installed
        own = "unknown"
    shape = {name: value for name, value in asdict(plan.shape).items() if name != "name"}
    return {
        "format": records.FORMAT,
        "state": records.BUILDING,
        **plan.to_record(),
        "shape": shape,
        "versions": {"tokenflow": own, **toolchain.versions},
        "checkpoint": records.describe_checkpoint(checkpoint),
        "tokenizer": TOKENIZER_DIR,
        "steps": {},
    }


def _keys(plan: BuildPlan, manifest: Mapping[str, Any], toolchain: Toolchain) -> dict[str, str]:
    """A step's key covers the keys of those before it."""
    keys: dict[str, str] = {}
    inputs: Any = manifest["checkpoint"]
    for step in plan.steps:
        inputs = keys[step.name] = records.step_key(step.argv, inputs, toolchain.versions)
    return keys


def _run(step: Step, output: Path, lock: int, progress: Progress) -> None:
    _empty(output / step.output)
    (output / LOG_DIR).mkdir(exist_ok=True)
    log_path = output / LOG_DIR / f"{step.name}.log"
    run_command(step, log_path, lock, progress)
    if not records.describe_output(output / step.output):
        raise BuildError(f"{step.name}: the command ended, but left nothing; see {log_path}")


def _require_engine(folder: Path, plan: BuildPlan) -> None:
    """The engine can pause and resume, and is what was asked for. Raises ConfigError."""
    built = read_built_engine(str(folder))
    found = {name: getattr(built, name) for name in LIMITS}
    wanted = {name: getattr(plan.limits, name) for name in LIMITS}
    found |= {"tp_size": built.world_size, "kv_bytes_per_token": built.kv_bytes_per_token}
    wanted |= {
        "tp_size": plan.request.tp,
        "kv_bytes_per_token": plan.budget.kv_bytes_per_token,
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise ConfigError(
                "engine", f"{folder / 'config.json'}: {name} is {found[name]}, asked was {value}"
            )


@contextlib.contextmanager
def _claimed(output: Path) -> Iterator[int]:
    """Hold the folder: a descriptor that the commands inherit. Raises ConfigError("output", …)."""
    output.mkdir(parents=True, exist_ok=True)
    # A build that was killed before its first manifest was whole leaves these two at most.
    early = (LOCK_NAME, records.PARTIAL_NAME)
    strangers = sorted(path.name for path in output.iterdir() if path.name not in early)
    if strangers and records.MANIFEST_NAME not in strangers:
        raise ConfigError(
            "output",
            f"{output} holds {strangers[0]} and no {records.MANIFEST_NAME}; it is not ours",
        )
    lock = os.open(output / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("output", f"another build works in {output}") from None
        yield lock
    finally:
        os.close(lock)


def _check_disk(plan: BuildPlan, missing: tuple[Step, ...], output: Path) -> None:
    """For the steps that are run, an even part for each. What is there of them already is
    replaced, so its room counts as free."""
    wanted = plan.disk_bytes * len(missing) // len(plan.steps)
    held = sum(sum(records.describe_output(output / step.output).values()) for step in missing)
    free = shutil.disk_usage(output).free
    if free + held < wanted:
        raise ConfigError("output", f"{output} has {gb(free)} free, {gb(wanted - held)} are needed")


def _empty(folder: Path) -> None:
    """Remove the folder, whatever is in it. Raises OSError, also for a link: what it leads to is
    not ours."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Everything that says which tokens end an answer, config.json too: it may be the only one."""
    _empty(folder)
    folder.mkdir()
    for path in checkpoint.small_files:
        shutil.copyfile(path, folder / path.name)
