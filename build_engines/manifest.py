"""What was built, from what, with what: `manifest.json` of an output folder.

Owns the format and the rules by which a finished step counts. Invariants: the file is replaced as a
whole, never half written; a step is in it only after its command ended with 0 and its output was
looked at; an entry counts as long as its key (command, inputs, versions) and its output's files are
the same.

Inputs are known by content where that is cheap (small files) and by size, time and header where it
is not (weights): a weight file that is written anew is seen, one whose bytes are changed under the
same time stamp is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from build_engines.checkpoint import Checkpoint, read_json
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_engine import LIMITS

MANIFEST_NAME, PARTIAL_NAME = "manifest.json", "manifest.partial"
FORMAT = 1
COMPLETE, BUILDING = "complete", "building"


_SIZES = (
    "tp_size", *(f"limits.{name}" for name in LIMITS),
    "memory.gpu_bytes", "memory.fixed_bytes", "memory.block_bytes",
)  # fmt: skip
_READ_FIELDS: dict[str, Callable[[Any], bool]] = {
    "state": lambda value: isinstance(value, str),
    "steps": lambda value: isinstance(value, dict),
    "checkpoint.path": lambda value: isinstance(value, str),
    "memory.host_bytes": lambda value: type(value) is int and value >= 0,
    "memory.free_fraction": lambda value: type(value) in (int, float) and 0 < value < 1,
    **dict.fromkeys(_SIZES, lambda value: type(value) is int and value > 0),
}
"""What is read of every manifest, by path, and when it can be used."""


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the checkpoint lies and by what its files are known again. Raises ConfigError."""
    files: dict[str, Any] = {}
    try:
        for path in checkpoint.small_files:
            files[path.name] = {"size_bytes": path.stat().st_size, "sha256": sha256(path)}
        for file in checkpoint.weights.files:
            files[file.path.name] = {
                "size_bytes": file.size_bytes,
                "mtime_ns": file.path.stat().st_mtime_ns,
                "header_sha256": file.header_sha256,
            }
    except OSError as error:
        raise ConfigError("checkpoint", f"cannot be read: {error}") from error
    return {"path": str(checkpoint.path), "files": files}


def step_key(argv: tuple[str, ...], inputs: Any, versions: Mapping[str, str]) -> str:
    """What a step depends on, as one digest; another key means that it has to be done again."""
    text = json.dumps([argv, inputs, dict(versions)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_output(folder: Path) -> dict[str, int]:
    """Sizes of all files below the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_done(entry: Any, key: str, output: Path) -> bool:
    """True if this entry stands for the step with this key and its output is still there."""
    if not isinstance(entry, dict) or entry.get("key") != key:
        return False
    return entry.get("output") == describe_output(output) and bool(entry.get("output"))


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the folder's manifest. Raises OSError."""
    path, partial = folder / MANIFEST_NAME, folder / PARTIAL_NAME
    with partial.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest of a folder or a file. Raises ConfigError("manifest", …)."""
    file = path / MANIFEST_NAME if path.is_dir() else path
    manifest = read_json(file, "manifest")
    if manifest.get("format") != FORMAT:
        raise ConfigError(
            "manifest", f"{file} has format {manifest.get('format')!r}, this version reads {FORMAT}"
        )
    for key, is_usable in _READ_FIELDS.items():
        value: Any = manifest
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not is_usable(value):
            raise ConfigError("manifest", f"{file}: {key} cannot be {value!r}; was it edited?")
    return manifest


def find_engine(manifest: Mapping[str, Any], folder: Path) -> Path:
    """The engine of the build in `folder`. Raises ConfigError unless the build ended and the engine
    is as it was left."""
    if manifest["state"] != COMPLETE:
        raise ConfigError("manifest", "the build has not ended; run the same command again")
    entry = manifest.get("engine")
    match entry:
        case {"folder": str(below), "files": dict(wanted)} if wanted:
            engine = folder / below
        case _:
            raise ConfigError("manifest", f"engine cannot be {entry!r}; was it edited?")
    for name, size in wanted.items():
        found = None
        with contextlib.suppress(OSError):
            found = (engine / name).stat().st_size
        if found != size:
            raise ConfigError(
                "engine_dir",
                f"{engine / name} "
                + ("is missing" if found is None else f"has {found} bytes, not {size}"),
            )
    return engine


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
