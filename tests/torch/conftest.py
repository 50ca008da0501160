"""Checkpoints for the torch tests: tiny ones made on the spot, SmolLM2 where it was fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is loaded: waiting OpenMP threads must not spin on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.importorskip("torch")
pytest.importorskip("transformers")

from build_engines.fetch import default_model_path
from build_engines.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return path


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """Folder of SmolLM2-135M-Instruct. `make test` fetches it first; a bare pytest run on a machine
    without it skips, since a test must not download."""
    path = default_model_path()
    if not (path / "manifest.json").is_file():
        pytest.skip(f"no checkpoint in {path}: run `tokenflow model fetch`")
    return path
