"""The adapter in the engine's process: configuration to tokens, its end, its loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.client import Client
from tests.trtllm.conftest import LIMITS, POOL, without_tensorrt_llm
from tests.trtllm_double.__main__ import ROOT, SITE
from tests.trtllm_double.folder import FAIL_FILE, Behind, write_engine
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, EngineLostError
from tokenflow.executor.factory import start_engine
from tokenflow.executor.lora import LoraConfig
from tokenflow.executor.remote import RemoteExecutor


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine's process finds the double, and keeps its locks to itself."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT)]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def engine(environment: None, tmp_path: Path) -> Iterator[tuple[RemoteExecutor, Path]]:
    folder = write_engine(tmp_path / "e", Behind(step_s=0.005), **LIMITS)
    config = ServingConfig(
        **{**LIMITS, **POOL, "engine": "trtllm", "gpt_model_path": str(folder),
           "kv_cache_host_memory_bytes": 1 << 20}
    )  # fmt: skip
    executor = start_engine(config)
    assert isinstance(executor, RemoteExecutor)
    yield executor, folder
    executor.shutdown()


def test_tokens_pauses_and_events_come_over_the_channel(
    engine: tuple[RemoteExecutor, Path],
) -> None:
    executor, _ = engine
    assert (executor.info.num_host_blocks, executor.info.vocab_size) == (128, 256)
    client = Client(executor)
    first = client.enqueue((1, 2, 3), 100)
    client.wait_tokens(first, 10)
    executor.cancel_request(first)
    streamed = client.wait(first).token_ids
    assert streamed == list(range(4, 4 + len(streamed)))
    rest = client.run((1, 2, 3, *streamed), 5)
    assert rest.token_ids == list(range(4 + len(streamed), 9 + len(streamed)))
    manager = executor.get_kv_cache_event_manager()
    assert manager is not None
    assert [event.event_id for event in manager.get_latest_events(0)][:2] == [0, 1]
    assert client.stats[-1].kv_tier_stats is not None


def test_what_the_engine_does_not_have_ends_only_who_asks_for_it(
    engine: tuple[RemoteExecutor, Path],
) -> None:
    client = Client(engine[0])
    first, last = client.request((1, 2, 3), 2), client.request((5, 6), 2)
    adapted = client.request((4,), 2, lora_config=LoraConfig(task_id=7))
    ids = client.enqueue_together([first, adapted, last])
    client.wait(*ids)
    outputs = [client.outputs[request_id] for request_id in ids]
    assert [output.token_ids for output in outputs] == [[4, 5], [], [7, 8]]
    assert [output.error for output in outputs] == [
        None, "lora_task_id: the engine was built without LoRA", None
    ]  # fmt: skip


def test_a_killed_engine_is_lost(engine: tuple[RemoteExecutor, Path]) -> None:
    executor, _ = engine
    client = Client(executor)
    request_id = client.enqueue((1, 2), 200)
    client.wait_tokens(request_id, 3)
    os.kill(executor.pid, signal.SIGKILL)
    assert "SIGKILL" in str(client.wait(request_id).error)
    assert not executor.can_enqueue_requests()


def test_a_step_that_fails_for_good_ends_the_process(engine: tuple[RemoteExecutor, Path]) -> None:
    """The supervisor starts another engine where the process has ended."""
    executor, folder = engine
    client = Client(executor)
    (folder / FAIL_FILE).touch()
    assert "CUDA error" in str(client.run((1, 2), 5).error)
    assert not executor.can_enqueue_requests()

    def pump() -> None:
        while True:
            client.pump(0.1)

    with pytest.raises(EngineLostError):
        pump()


def test_a_refused_engine_says_why(environment: None, tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind(), **LIMITS)
    config = ServingConfig(
        **{**LIMITS, **POOL, "engine": "trtllm", "gpt_model_path": str(folder), "max_seq_len": 300}
    )
    with pytest.raises(EngineError, match="max_seq_len: the engine was built for 256, got 300"):
        start_engine(config)


PROGRAM = (
    "import sys\n"
    "from tokenflow.config import parse_parameters\n"
    "from tokenflow.executor.factory import create_engine\n"
    "create_engine(parse_parameters({'engine': 'trtllm', 'gpt_model_path': sys.argv[1]}))\n"
)


def _start_in_a_process(tmp_path: Path, **environment: str) -> str:
    """What it says at its end."""
    folder = write_engine(tmp_path / "e", Behind(), **LIMITS)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), **environment},
    )
    return found.stderr


@without_tensorrt_llm
def test_a_machine_without_tensorrt_llm_says_so(tmp_path: Path) -> None:
    message = _start_in_a_process(tmp_path)
    assert "ConfigError: engine: trtllm needs TensorRT-LLM: ModuleNotFoundError" in message


def test_a_version_without_an_executor_is_named(tmp_path: Path) -> None:
    package = tmp_path / "site" / "tensorrt_llm"
    (package / "bindings").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.3.0rc21'\n")
    (package / "bindings" / "__init__.py").touch()
    (package / "bindings" / "executor.py").write_text("class Request: pass\n")
    message = _start_in_a_process(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert "engine: TensorRT-LLM 1.3.0rc21 has no Executor any more: trtllm needs 1.2.1" in message
