"""Engines of the double, started through the adapter, and a clean machine afterwards."""

from __future__ import annotations

import importlib.util
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.contract.client import Client
from tests.trtllm_double.bindings import make_module
from tests.trtllm_double.folder import Behind, write_engine
from tokenflow.config import ServingConfig
from tokenflow.executor.trtllm import create_trtllm_engine
from tokenflow.executor.trtllm_executor import TrtllmExecutor
from tokenflow.inflight.scripts import script_by_name

LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 256, "tokens_per_block": 8}
POOL = {"max_tokens_in_paged_kv_cache": 320, "batch_scheduler_policy": "guaranteed_no_evict"}
VOCAB = 256

without_tensorrt_llm = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed"
)


@pytest.fixture
def double() -> types.ModuleType:
    """Bindings of a test's own, with a record of what was used."""
    return make_module()


class Starter:
    """Makes engine folders, and executors on them."""

    def __init__(self, folder: Path, double: types.ModuleType) -> None:
        self._folder = folder
        self._double = double
        self.executors: list[TrtllmExecutor] = []

    def folder(self, behind: Behind | None = None, **build: Any) -> Path:
        """An engine built for LIMITS, unless `build` says otherwise."""
        number = len(list(self._folder.iterdir()))
        return write_engine(
            self._folder / f"engine{number}",
            behind or Behind(vocab_size=VOCAB, step_s=0.001),
            **{**LIMITS, **build},
        )

    def config(self, folder: Path, **settings: Any) -> ServingConfig:
        return ServingConfig(
            **{**LIMITS, **POOL, "engine": "trtllm", "gpt_model_path": str(folder), **settings}
        )

    def executor(
        self,
        behind: Behind | None = None,
        *,
        bindings: types.ModuleType | None = None,
        folder: Path | None = None,
        max_queue_size: int | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> TrtllmExecutor:
        folder = folder or self.folder(behind)
        config = self.config(folder, **settings)
        executor = create_trtllm_engine(
            config,
            lambda fraction, text: None,
            bindings=bindings or self._double,
            limits=msgspec.structs.replace(config.executor_config(), max_queue_size=max_queue_size),
            environment=environment or {},
            lock_folder=self._folder,
        )
        self.executors.append(executor)
        return executor

    def client(self, behind: Behind | None = None, **settings: Any) -> Client:
        """A client of a new executor; it knows what a scripted one says."""
        behind = behind or Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.001)
        script = script_by_name(behind.script, behind.vocab_size)
        return Client(self.executor(behind, **settings), script)


def _engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "inflight-engine"}


@pytest.fixture
def start(tmp_path: Path, double: types.ModuleType) -> Iterator[Starter]:
    folder = tmp_path / "engines"
    folder.mkdir()
    others = _engine_threads()  # of other tests' engines, which live for a session
    starter = Starter(folder, double)
    yield starter
    for executor in starter.executors:
        executor.shutdown()
    assert not _engine_threads() - others
    assert not list(folder.glob("*.lock"))
