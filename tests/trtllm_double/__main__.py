"""`python -m tests.trtllm_double -- command …`: run a command with the double importable.

The command and everything that it starts find `tensorrt_llm.bindings.executor`; engine folders are
those of `tests.trtllm_double.folder.write_engine`. A command `python` is this interpreter.

A model of Triton's Python backend runs in a stub that may ignore PYTHONPATH (that of the
nvidia-pytriton wheel does): `--link FOLDER` in front of the command puts a link to the double into
the folder of its model.py, where every stub looks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SITE = Path(__file__).with_name("site")
ROOT = Path(__file__).resolve().parents[2]


def environment_with_double(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the double in front of PYTHONPATH, and what it needs behind it."""
    paths = [str(SITE), str(ROOT), base.get("PYTHONPATH", "")]
    return {**base, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def link_into(folder: Path) -> None:
    """Make the double importable for a Triton model: a link beside its model.py. Idempotent."""
    for package in SITE.iterdir():
        link = folder / package.name
        if package.is_dir() and package.name != "__pycache__" and not link.exists():
            link.symlink_to(package)


def main(arguments: Sequence[str]) -> int:
    """Become the command; returns only where there is none."""
    command = list(arguments)
    while command[:1] == ["--link"] and len(command) > 1:
        link_into(Path(command[1]))
        command = command[2:]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    return os.execvpe(command[0], command, environment_with_double(os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
