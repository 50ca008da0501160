"""Tests on TensorRT-LLM itself: `make test-trtllm ENGINE=folder`, or the environment's
TOKENFLOW_TRTLLM_ENGINE. Without an engine they are left out, whatever else is selected.

The marker is `trtllm`. They run what `perf/verify_trtllm.sh` runs, a section a test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.trtllm_suite.command import find_tokenizer
from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.values import Settings

ENGINE_VARIABLE = "TOKENFLOW_TRTLLM_ENGINE"
SHORT_VARIABLE = "TOKENFLOW_TRTLLM_SHORT"
LIMIT_S = 1800.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ours get the marker and a time limit, or are deselected."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.trtllm)
        item.add_marker(pytest.mark.timeout(LIMIT_S))
        item.add_marker(pytest.mark.xdist_group("trtllm"))
    if ours and not os.environ.get(ENGINE_VARIABLE):
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = Path(os.environ[ENGINE_VARIABLE]).resolve()
    settings = Settings(
        engine=folder,
        is_short=bool(os.environ.get(SHORT_VARIABLE)),
        tokenizer=find_tokenizer(folder),
    )
    engines = Engines(settings, tmp_path_factory.mktemp("trtllm"))
    yield engines
    engines.close()
