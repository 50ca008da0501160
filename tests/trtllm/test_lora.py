"""LoRA on the adapter: what TensorRT-LLM is given, whose KV is reused, and adapters it forgot."""

from __future__ import annotations

import json
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Client
from tests.trtllm import changed
from tests.trtllm.adapters import (
    ADAPTER,
    ADAPTER_BYTES,
    LORA_BUILD,
    LORA_PLUGIN,
    adapter,
    by_id,
    lora_settings,
)
from tests.trtllm.conftest import VOCAB, Starter
from tests.trtllm_double.folder import Behind
from tokenflow.errors import ConfigError, InvalidRequestError
from tokenflow.executor.api import FinishReason, OutputConfig, Request
from tokenflow.executor.lora import LoraConfig, TensorData, is_cache_miss
from tokenflow.executor.trtllm_config import _LORA_SETTINGS
from tokenflow.executor.trtllm_engine import LoraBuild, read_built_engine
from tokenflow.executor.trtllm_executor import TrtllmExecutor
from tokenflow.executor.trtllm_values import RequestMaker
from tokenflow.inflight.scripts import expected, script_by_name
from tokenflow.kv_mirror import KvMirror
from tokenflow.runtime import Runtime
from tokenflow.types import EndReason, GenerateRequest, TokenEvent

torch = pytest.importorskip("torch")

BF16 = LoraBuild(dtype="bfloat16", max_adapter_size=16)
BEHIND = Behind(vocab_size=VOCAB, script="pseudo_random", step_s=0.001)
METRICS = OutputConfig(return_perf_metrics=True)
PROMPT = tuple(range(1, 42))  # five whole blocks


def make(bindings: Any, lora: LoraConfig | None, built: LoraBuild | None = BF16) -> Any:
    request = Request(input_token_ids=(1,), max_tokens=1, lora_config=lora)
    return RequestMaker(bindings, 16, "float32", built).make(request)


def lora_folder(start: Starter, behind: Behind = BEHIND) -> Path:
    return start.folder(behind, plugins=LORA_PLUGIN, build=LORA_BUILD)


def lora_client(start: Starter, **settings: Any) -> Client:
    return Client(start.executor(folder=lora_folder(start), **settings))


def num_reused(output: Any) -> int:
    return int(output.final.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks)


# -- what is given -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_come_in_the_dtype_of_the_model(double: types.ModuleType, dtype: str) -> None:
    lora = adapter(2**64 - 1, 0.5)
    made = make(double, lora, LoraBuild(dtype=dtype, max_adapter_size=0)).lora_config
    assert made.task_id == 2**64 - 1
    assert made.weights.dtype is getattr(torch, dtype)
    assert torch.equal(made.weights.float(), torch.full((4, 24), 0.5))
    assert made.config.dtype is torch.int32
    assert made.config.tolist() == [[1, 0, 8], [2, 0, 8], [1, 1, 8], [2, 1, 8]]


def test_the_id_alone_brings_no_tensors(double: types.ModuleType) -> None:
    made = make(double, by_id(7)).lora_config
    assert (made.task_id, made.weights, made.config) == (7, None, None)
    assert "LoraConfig(weights)" not in double.usage.names
    assert make(double, None).lora_config is None


def test_what_the_engine_or_its_version_has_not_is_named(double: types.ModuleType) -> None:
    big = adapter(7)
    assert big.config is not None
    wide = big.config.array().copy()
    wide[1, 2] = 17
    incomplete = LoraConfig(task_id=7, weights=ADAPTER.weights)
    oversized = LoraConfig(task_id=7, weights=ADAPTER.weights, config=TensorData.of(wide))
    torn = LoraConfig(
        task_id=7, weights=TensorData((4, 24), "float16", b"xx"), config=ADAPTER.config
    )
    for bindings, lora, built, words in (
        (double, ADAPTER, None, "lora_task_id: the engine was built without LoRA"),
        (double, by_id(7), None, "lora_task_id: the engine was built without LoRA"),
        (double, oversized, BF16, "lora_config: adapter size 17, the engine was built for 16"),
        (double, incomplete, BF16, "lora_config: weights and config come together"),
        (double, torn, BF16, "lora_config: "),
        (double, by_id(-1), BF16, "lora_config: LoraConfig.__init__"),
        (changed.without_argument("Request", "lora_config"), by_id(7), BF16,
         "lora_config: this version"),
        (changed.without_class("LoraConfig"), by_id(7), BF16, "lora_config: this version"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=f"^{words}"):
            make(bindings, lora, built)
        assert make(bindings, None, built).max_tokens == 1


def test_the_cache_is_as_configured(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "3").mkdir(parents=True)
    settings = lora_settings(tmp_path / "adapters")
    executor = start.executor(folder=lora_folder(start), **settings)
    peft = executor._executor._config.get("peft_cache_config")
    assert {name: peft.get(name) for name in (
        "optimal_adapter_size", "max_adapter_size", "device_cache_percent", "host_cache_size",
        "lora_prefetch_dir",
    )} == {
        "optimal_adapter_size": 4, "max_adapter_size": 16, "device_cache_percent": 0.05,
        "host_cache_size": 1 << 20, "lora_prefetch_dir": str(tmp_path / "adapters"),
    }  # fmt: skip
    assert Client(executor).run(PROMPT, 4, lora_config=by_id(3)).reason is FinishReason.LENGTH


def test_what_is_not_set_is_left_to_tensorrt_llm(start: Starter, double: types.ModuleType) -> None:
    start.executor(folder=lora_folder(start)).shutdown()
    given = {name for name in double.usage.names if name.startswith("PeftCacheConfig(")}
    assert given == {
        "PeftCacheConfig(optimal_adapter_size)",
        "PeftCacheConfig(max_adapter_size)",
    }


@pytest.mark.parametrize("name", _LORA_SETTINGS)
def test_settings_for_an_engine_without_lora_are_refused(
    start: Starter, double: types.ModuleType, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: the engine was built without LoRA"):
        start.executor(**{name: lora_settings("adapters")[name]})
    start.executor().shutdown()
    assert "ExecutorConfig(peft_cache_config)" not in double.usage.names


@pytest.mark.parametrize(
    ("plugins", "build", "expected_build"),
    [
        ({}, {}, None),
        ({"lora_plugin": None}, LORA_BUILD, None),
        ({"lora_plugin": "disable"}, {}, None),
        ({"lora_plugin": "auto"}, LORA_BUILD, BF16),
        ({"lora_plugin": "float16"}, {"lora_config": {"max_lora_rank": 16}}, BF16),
        ({"lora_plugin": "auto"}, {}, LoraBuild(dtype="bfloat16", max_adapter_size=0)),
    ],
)
def test_a_folder_tells_whether_it_has_lora(
    start: Starter,
    plugins: dict[str, Any],
    build: dict[str, Any],
    expected_build: LoraBuild | None,
) -> None:
    folder = start.folder(plugins=plugins, build=build)
    assert read_built_engine(str(folder)).lora == expected_build
    assert json.loads((folder / "config.json").read_text())["build_config"]["plugin_config"]


# -- whose KV ----------------------------------------------------------------------------------


def test_kv_is_reused_within_an_adapter_only(start: Starter) -> None:
    client = lora_client(start)
    run = lambda lora: client.run(PROMPT, 4, lora_config=lora, output_config=METRICS)  # noqa: E731
    assert num_reused(run(None)) == 0
    assert num_reused(run(adapter(7))) == 0
    assert num_reused(run(adapter(8))) == 0
    assert num_reused(run(by_id(7))) == num_reused(run(by_id(8))) == num_reused(run(None)) == 5


def test_the_mirror_finds_the_kv_of_an_adapter_for_it_alone(start: Starter) -> None:
    client = lora_client(start)
    mirror = KvMirror(8)
    for lora in (adapter(7), None):
        client.run(PROMPT, 20, lora_config=lora)
    manager = client.executor.get_kv_cache_event_manager()
    assert manager is not None
    client.until(lambda: client.stats and not client.stats[-1].num_active_requests)
    mirror.apply(manager.get_latest_events(0))
    assert mirror.locate(PROMPT, 7).num_tokens >= 40
    assert mirror.locate(PROMPT).num_tokens >= 40
    assert mirror.locate(PROMPT, 8).num_tokens == 0


def test_a_pause_and_a_resume_by_the_id(start: Starter) -> None:
    client = lora_client(start)
    whole = client.run(PROMPT, 60, lora_config=adapter(8)).token_ids
    first = client.enqueue(PROMPT, 60, lora_config=adapter(7))
    client.wait_tokens(first, 20)
    client.executor.cancel_request(first)
    streamed = client.wait(first).token_ids
    rest = client.run(
        (*PROMPT, *streamed), 60 - len(streamed), lora_config=by_id(7), output_config=METRICS
    )
    assert streamed + rest.token_ids == whole
    assert num_reused(rest) >= (len(PROMPT) + len(streamed) - 1) // 8
    assert client.executor._executor.hazards == []


def test_requests_in_the_engine_hold_no_weights(start: Starter) -> None:
    client = lora_client(start)
    request_id = client.enqueue(PROMPT, 100, lora_config=adapter(7))
    assert client.executor._live._live[request_id].request.lora_config is None
    client.wait(request_id)


# -- adapters that are not there ---------------------------------------------------------------


def test_a_miss_is_an_error_of_its_request_alone(start: Starter) -> None:
    client = lora_client(start)
    requests = [
        client.request((n, 2), 5, lora_config=lora)
        for n, lora in enumerate((None, by_id(9), adapter(7), None))
    ]
    ids = client.enqueue_together(requests)
    client.wait(*ids)
    outputs = [client.outputs[i] for i in ids]
    assert is_cache_miss(str(outputs[1].error))
    assert [o.reason for o in outputs] == [FinishReason.LENGTH, None] + [FinishReason.LENGTH] * 2


class Noted:
    """An executor with a memory: what each enqueue said of its adapter."""

    def __init__(self, executor: TrtllmExecutor) -> None:
        self._executor = executor
        self.sent: list[LoraConfig] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        self.sent += [r.lora_config for r in requests if r.lora_config is not None]
        return self._executor.enqueue_requests(requests)


def test_streams_survive_a_cache_that_holds_one_adapter(start: Starter) -> None:
    """Each lease is an enqueue, and the adapters of three streams push each other out."""
    settings = {
        "lora_cache_host_memory_bytes": ADAPTER_BYTES, "lease_tokens": 8, "plan_interval_s": 0.005,
        "enable_chunked_context": True,
    }  # fmt: skip
    folder = lora_folder(start)
    executor = Noted(start.executor(folder=folder, **settings))
    ends: dict[int, TokenEvent] = {}
    tokens: dict[int, list[int]] = {}
    all_ended = threading.Event()

    def emit(event: TokenEvent) -> None:
        tokens.setdefault(event.handle, []).extend(event.token_ids)
        if event.end is not None:
            ends[event.handle] = event
            if len(ends) == 3:
                all_ended.set()

    runtime = Runtime(executor, start.config(folder, **settings), emit=emit)  # type: ignore[arg-type]
    runtime.start()
    handles = [
        runtime.submit(
            GenerateRequest(
                request_id=str(n), input_token_ids=(n, 2, 3), max_tokens=50, lora_config=adapter(n),
                arrival_time=time.monotonic(),
            )
        )
        for n in range(3)
    ]  # fmt: skip
    assert all_ended.wait(20)
    runtime.shutdown(5.0)
    script = script_by_name(BEHIND.script, VOCAB)
    for n, handle in enumerate(handles):
        assert ends[handle].end is EndReason.LENGTH
        assert tokens[handle] == expected(script, (n, 2, 3), 50)[0]
    kinds = [lora.has_weights for lora in executor.sent]
    assert kinds.count(True) > 3, "some were sent again"
    assert kinds.count(False) > 3, "but not each time"
    assert executor._executor._executor.hazards == []
