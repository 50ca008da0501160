"""One engine to a GPU, unless the memory was divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trtllm.conftest import Starter
from tokenflow.errors import ConfigError
from tokenflow.executor.trtllm_gpus import GpuLocks


def _lock(folder: Path, *ids: int, exclusive: bool = True, visible: str = "") -> GpuLocks:
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    return GpuLocks(ids, exclusive=exclusive, environment=environment, folder=folder)


def test_a_gpu_is_taken_until_it_is_given_back(tmp_path: Path) -> None:
    first = _lock(tmp_path, 0, 1)
    for exclusive in (True, False):
        with pytest.raises(ConfigError, match="gpu_device_ids: GPU 1 has an engine already"):
            _lock(tmp_path, 2, 1, exclusive=exclusive)
    second = _lock(tmp_path, 2)  # what the refused ones had is free
    first.release()
    first.release()
    third = _lock(tmp_path, 1)
    for locks in (second, third):
        locks.release()
    assert list(tmp_path.iterdir()) == []


def test_planned_engines_share(tmp_path: Path) -> None:
    pair = [_lock(tmp_path, 0, exclusive=False) for _ in range(2)]
    with pytest.raises(ConfigError):
        _lock(tmp_path, 0)
    pair[0].release()
    with pytest.raises(ConfigError):
        _lock(tmp_path, 0)
    pair[1].release()
    _lock(tmp_path, 0).release()
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_known_by_their_own_names(tmp_path: Path) -> None:
    first = _lock(tmp_path, 0, visible="3,5")
    other = _lock(tmp_path, 0, visible="GPU-1a/b,3")
    with pytest.raises(ConfigError, match="GPU 1 has"):
        _lock(tmp_path, 1, visible="GPU-9,3")
    with pytest.raises(ConfigError, match="GPU 3 has"):
        _lock(tmp_path, 3)
    for locks in (first, other):
        locks.release()


def test_an_engine_that_cannot_start_gives_its_gpu_back(start: Starter) -> None:
    folder = start.folder()
    (folder / "double.json").unlink()
    with pytest.raises(Exception, match="cannot start the engine"):
        start.executor(folder=folder)
    start.executor(max_tokens_in_paged_kv_cache=0)
