"""The script that runs the benchmark of the KV tiers on a GPU: its commands and what it brings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "perf" / "gpu_kv_tiers.sh"


def _fake_python(folder: Path, lacking: str = "") -> tuple[Path, Path]:
    """An interpreter that cannot find `lacking`, and the file in which it logs the rest."""
    python, log = folder / "python", folder / "log"
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then shift 2; for name in "$@"; do\n'
        f'case " {lacking} " in *" $name "*) echo "$name";; esac; done; exit; fi\n'
        f'echo "$@" >> {log}\n'
    )
    python.chmod(0o755)
    return python, log


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "--device cpu --model tiny-random --quick --runs 1"),
        ("cuda", "--device cuda --model llama-3-8b-random --runs 5"),
    ],
)
def test_the_script_runs_the_same_command(tmp_path: Path, device: str, expected: str) -> None:
    python, log = _fake_python(tmp_path)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "DEVICE": device}
    subprocess.run([SCRIPT], env=environment, check=True, timeout=30)
    tests, command = log.read_text().splitlines()
    assert tests.startswith("-m pytest")
    head, tail = command.split(" --limit-s ")
    limit_s, output = tail.split(" --output ")
    assert head == f"-m perf.kv_tiers {expected}"
    assert output == f"{tmp_path}/kv_tiers_{device}.json"
    assert 400 < int(limit_s) <= 440


def test_the_script_brings_what_is_missing_from_wheels_and_goes_on_without_pytest(
    tmp_path: Path,
) -> None:
    python, log = _fake_python(tmp_path, "msgspec tqdm pytest")
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path), "WHEELS": "some/dir"}
    subprocess.run([SCRIPT], env=environment, check=True, timeout=30)
    install, command = log.read_text().splitlines()
    assert install.startswith("-m pip install --quiet --no-index --no-deps --find-links some/dir ")
    assert install.endswith(" msgspec tqdm")
    assert command.startswith("-m perf.kv_tiers")
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo msgspec && exit\nexit 1\n')
    failed = subprocess.run([SCRIPT], env=environment, capture_output=True, timeout=30)
    assert failed.returncode == 1
    assert b"lacks msgspec, some/dir too" in failed.stderr
