"""One engine to a GPU, unless the memory was divided on purpose.

Owns a lock per GPU, held for the life of an engine's process. An engine whose KV pool is a share of
the GPU's free memory takes all that the next one would need, so it must be alone there; engines
whose pools have a size (`max_tokens_in_paged_kv_cache`) may share a GPU, their memory is planned.

Invariants: the kernel gives a lock back when its process ends, however it ends; nobody's file is
removed while somebody else may hold a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenflow.errors import ConfigError


class GpuLocks:
    """Locks of `device_ids`, as this process numbers them; exclusive or shared with others that are
    shared. Raises ConfigError, for gpu_device_ids, when another engine is in the way."""

    def __init__(
        self,
        device_ids: Sequence[int],
        *,
        exclusive: bool,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self._locks: list[tuple[Path, int]] = []
        for device_id in device_ids:
            name = _device_name(device_id, environment)
            path = (folder or Path(tempfile.gettempdir())) / f"tokenflow-gpu-{name}.lock"
            fd = _lock(path, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            if fd is None:
                self.release()
                raise ConfigError(
                    "gpu_device_ids",
                    f"GPU {device_id} has an engine already ({path}): give each engine its own "
                    "GPU, or every engine there its max_tokens_in_paged_kv_cache",
                )
            self._locks.append((path, fd))

    def release(self) -> None:
        """Give them back. Idempotent."""
        while self._locks:
            path, fd = self._locks.pop()
            with contextlib.suppress(OSError):  # held by others too: the file stays
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            os.close(fd)


def _device_name(device_id: int, environment: Mapping[str, str]) -> str:
    """The GPU's number or name on this machine, where CUDA_VISIBLE_DEVICES renumbers them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else []
    name = names[device_id] if device_id < len(names) else str(device_id)
    return "".join(c if c.isalnum() or c == "-" else "_" for c in name)


def _open(path: Path) -> int:
    """Made if missing. One that another user made may be read only, which is enough for a lock, and
    may not be opened as if it were to be made."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _lock(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock on the file that is at `path`; None when it is taken."""
    while True:
        fd = _open(path)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)  # it was removed meanwhile by who held it before
