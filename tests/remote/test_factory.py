"""Engines by configuration, in this process and in their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from tests.remote.helpers import collect, tokens
from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError, EngineError
from tokenflow.executor.api import Executor, OutputConfig, Request, SamplingConfig
from tokenflow.executor.factory import (
    DEFAULT_SCRIPTED_VOCAB_SIZE,
    create_engine,
    create_executor,
    start_engine,
)
from tokenflow.executor.remote import RemoteExecutor

SCRIPTED = ServingConfig(engine="scripted", engine_process=False)


def _stream(
    executor: Executor,
) -> list[tuple[list[list[int]], list[list[float]] | None, list[int]]]:
    """What a client sees of two requests that run together."""
    requests = [
        Request(
            input_token_ids=tuple(range(start, start + 40)),
            max_tokens=6,
            end_id=start + 44,
            output_config=OutputConfig(return_log_probs=True),
            sampling_config=SamplingConfig(min_tokens=2),
        )
        for start in (1, 100)
    ]
    ids = executor.enqueue_requests(requests)
    waiting, seen = set(ids), []
    while waiting:
        for response in executor.await_responses(timedelta(seconds=5)):
            result = response.result
            place = ids.index(response.request_id)
            seen.append((place, result.output_token_ids, result.log_probs, result.finish_reasons))
            if result.is_final:
                waiting.discard(response.request_id)
    executor.shutdown()
    return sorted(seen, key=lambda entry: entry[0])


def test_scripted_engine_is_the_same_in_both_places() -> None:
    near = start_engine(SCRIPTED)
    far = start_engine(ServingConfig(engine="scripted"))
    assert isinstance(far, RemoteExecutor)
    assert not isinstance(near, RemoteExecutor)
    assert _stream(near) == _stream(far)


def test_engine_says_what_it_is() -> None:
    config = ServingConfig(
        engine="scripted",
        max_tokens_in_paged_kv_cache=100,
        tokens_per_block=16,
        max_batch_size=3,
        max_seq_len=77,
    )
    executor, info = create_engine(config)
    executor.shutdown()
    assert (info.num_blocks, info.tokens_per_block) == (6, 16)
    assert (info.max_batch_size, info.max_seq_len) == (3, 77)
    assert info.vocab_size == DEFAULT_SCRIPTED_VOCAB_SIZE


def test_scripted_engine_speaks_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 400}}, "added_tokens": [{"id": 512}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    executor, info = create_engine(ServingConfig(engine="scripted", tokenizer_dir=str(tmp_path)))
    executor.shutdown()
    assert info.vocab_size == 513
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="tokenizer_dir"):
        create_engine(ServingConfig(engine="scripted", tokenizer_dir=str(tmp_path)))


def test_missing_checkpoint_is_named_here_and_over_there() -> None:
    with pytest.raises(ConfigError, match="gpt_model_path"):
        create_executor(ServingConfig())
    with pytest.raises(EngineError, match=r"^gpt_model_path"):
        start_engine(ServingConfig())


def test_each_step_waits_at_the_gate() -> None:
    gate = threading.Semaphore(3)
    executor, _ = create_engine(SCRIPTED, before_step=gate.acquire)
    id = executor.enqueue_request(Request(input_token_ids=(0,), max_tokens=5))
    received = []
    while len(received) < 3:
        received += executor.await_responses(timedelta(seconds=5))
    assert executor.await_responses(timedelta(milliseconds=100)) == []
    gate.release(100)
    received += collect(executor, [id])
    executor.shutdown()
    assert tokens(received, id) == [1, 2, 3, 4, 5]


def test_server_process_does_not_import_torch() -> None:
    code = "import sys, tokenflow.executor.factory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
