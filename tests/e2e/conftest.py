"""A real server with the scripted engine, once per worker, and a clean machine afterwards.

The scripted engine counts: the token after id n is n + 1. Its tokenizer has a token per byte.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_engines.tiny import make_tiny_model
from tests.e2e.clients import descendants, is_alive, metric, num_active, post, shm_files, wait_until
from tests.triton.fakes import EOS, byte_level_tokenizer
from tokenflow.config import ServingConfig
from triton_backend.launcher import TritonServer
from triton_backend.repository import render_repository

STEP_S = 0.01


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer(["�", " the", "😀"])._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


@pytest.fixture(scope="session")
def scripted_config(tokenizer_dir: Path) -> ServingConfig:
    return ServingConfig(
        engine="scripted",
        tokenizer_dir=str(tokenizer_dir),
        scripted_step_s=STEP_S,
        max_batch_size=4,
        max_seq_len=512,
        max_queue_size=32,
        min_quantum_s=0.1,
        slack_margin_s=0.1,
        cancellation_check_period_ms=50,
        stats_check_period_ms=50,
    )


@pytest.fixture(scope="session")
def server(
    scripted_config: ServingConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("server")
    repository = render_repository(scripted_config, folder / "repository")
    log_path = folder / "server.log"
    server = TritonServer(repository, log_path=log_path, exit_timeout_s=5)
    with server:
        pids = [server.pid or 0, *descendants(server.pid or 0)]
        assert len(pids) >= 3, "server, stub and engine"
        yield server
    assert not [pid for pid in pids if is_alive(pid)]
    assert not shm_files(server.shm_prefix)
    log = log_path.read_text()
    assert "tokenflow INFO unloaded" in log
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :]
    shutil.rmtree(folder)


@pytest.fixture
def alive(server: TritonServer) -> Iterator[TritonServer]:
    """The server; afterwards it must answer, and nothing may be left running in it."""
    yield server
    body = {"text_input": "alive?", "max_tokens": 4, "end_id": -1}
    assert post(server, "generate", body)[0] == 200
    wait_until(lambda: num_active(server) == 0)
    wait_until(lambda: metric(server, "tokenflow_kv_blocks", state="used") == 0)


@pytest.fixture
def other_server(scripted_config: ServingConfig, tmp_path: Path) -> Iterator[Factory]:
    """Makes servers of a test's own; stops them."""
    factory = Factory(scripted_config, tmp_path)
    try:
        yield factory
    finally:
        for server in factory.servers:
            server.stop(timeout_s=5.0)
            assert not shm_files(server.shm_prefix)


class Factory:
    """Servers that differ from the session's in some settings; `start` with `**changes`."""

    def __init__(self, config: ServingConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self.servers: list[TritonServer] = []

    def make(self, *, exit_timeout_s: int = 5, **changes: object) -> TritonServer:
        config = dataclasses.replace(self._config, **changes)
        number = len(self.servers)
        server = TritonServer(
            render_repository(config, self._folder / f"repository{number}"),
            log_path=self._folder / f"server{number}.log",
            exit_timeout_s=exit_timeout_s,
        )
        self.servers.append(server)
        return server

    def start(self, *, exit_timeout_s: int = 5, **changes: object) -> TritonServer:
        server = self.make(exit_timeout_s=exit_timeout_s, **changes)
        server.start()
        server.wait_ready(90)
        return server
