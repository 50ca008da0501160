"""The list of facts: it agrees with the JSON, covers what the adapter touches, and finds drift."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Client
from tests.trtllm import changed
from tests.trtllm.adapters import ADAPTER, LORA_PLUGIN, lora_settings
from tests.trtllm.conftest import VOCAB, Starter, without_tensorrt_llm
from tests.trtllm.test_values import EVERYTHING, make
from tests.trtllm_double.__main__ import environment_with_double
from tests.trtllm_double.bindings import make_module
from tests.trtllm_double.folder import Behind
from tests.trtllm_double.objects import signature
from tests.trtllm_double.schema import load_json, read_api
from tokenflow.executor.api import OutputConfig
from tokenflow.executor.trtllm_check import check, format_report, main
from tokenflow.executor.trtllm_facts import CLASSES, ENUMS, OPTIONAL, fact_names
from tokenflow.executor.trtllm_signatures import overloads

API = read_api(load_json())
BOTH = OutputConfig(return_log_probs=True, return_perf_metrics=True)


def test_every_fact_stands_in_the_json() -> None:
    for name, facts in CLASSES.items():
        spec = API.classes[name]
        inits = [[a.name for a in overload] for overload in spec.inits or ()]
        wanted = {*facts.positional, *facts.arguments}
        assert not wanted or any(wanted <= set(init) for init in inits), name
        if facts.positional:
            assert any(tuple(i[: len(facts.positional)]) == facts.positional for i in inits), name
        for prop in (*facts.defaults, *facts.properties):
            assert prop in spec.properties, f"{name}.{prop}"
        for prop, default in facts.defaults.items():
            (argument,) = (
                a for a in spec.inits[0] if a.name in (prop, prop.removeprefix("request_"))
            )
            assert argument.default == default, f"{name}.{prop}"
        for method, arguments in facts.methods.items():
            assert any(
                set(arguments) <= {a.name for a in overload} for overload in spec.methods[method]
            )
    for name, members in ENUMS.items():
        assert set(members) <= set(API.enums[name])
    assert set(fact_names()) >= OPTIONAL


def test_the_facts_cover_what_the_adapter_touches(
    start: Starter, double: types.ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    executor = start.executor(
        folder=start.folder(Behind(vocab_size=VOCAB, step_s=0.005), plugins=LORA_PLUGIN),
        kv_cache_host_memory_bytes=1 << 20,
        max_queue_size=100,
        **lora_settings(adapters),
    )
    client = Client(executor)
    make(double, EVERYTHING)
    bias = ((3, 1.0),)
    stream = client.enqueue(
        range(1, 60), 60, output_config=BOTH, embedding_bias=bias, lora_config=ADAPTER
    )
    client.wait_tokens(stream, 3)
    executor.cancel_request(stream)
    client.wait(stream)
    for seed in range(6):  # blocks go to the host, others leave the tree
        client.run([(seed + i) % 250 for i in range(200)], 8, end_id=2, output_config=BOTH)
    assert client.run(range(256), 4).error
    assert executor.get_num_responses_ready() == 0
    assert executor.can_enqueue_requests()
    executor.get_kv_cache_event_manager().get_latest_events(0)
    executor.shutdown()
    two_gpus = start.folder(tp_size=2)
    start.executor(folder=two_gpus, executor_worker_path=sys.executable, gpu_device_ids="0,1")
    used = double.usage.names
    facts = set(fact_names())
    assert used - facts == set()
    unused = {
        name for name in facts - used
        if "." not in name and "(" in name and name != "ParallelConfig(num_nodes)"
    }  # fmt: skip
    assert unused == set(), "facts about arguments that nobody gives"


DRIFT: dict[str, tuple[types.ModuleType, list[str]]] = {
    "argument gone": (
        changed.without_argument("ExecutorConfig", "max_queue_size"),
        ["ExecutorConfig(max_queue_size): there is no such argument"],
    ),
    "argument and default gone": (
        changed.without_argument("KvCacheConfig", "use_uvm"),
        ["KvCacheConfig.use_uvm: there is no such property"],
    ),
    "property gone": (
        changed.without_property("Result", "log_probs"),
        ["Result.log_probs: there is no such property"],
    ),
    "class gone": (
        changed.without_class("kv_cache.KVCacheEventManager"),
        ["kv_cache.KVCacheEventManager: there is no such class"],
    ),
    "method gone": (
        changed.without_method("Executor", "cancel_request"),
        ["Executor.cancel_request: there is no such method"],
    ),
    "value gone": (
        changed.without_member("FinishReason", "CANCELLED"),
        ["FinishReason.CANCELLED: there is no such value"],
    ),
    "another default": (
        changed.with_default("Request", "return_all_generated_tokens", True),
        ["Request.return_all_generated_tokens: its default is True, not False"],
    ),
    "another enum default": (
        changed.with_default("Request", "type", "RequestType.REQUEST_TYPE_CONTEXT_ONLY"),
        ["Request.request_type: its default is 'RequestType.REQUEST_TYPE_CONTEXT_ONLY'"],
    ),
    "argument of a method renamed": (
        changed.with_renamed_argument("Executor", "cancel_request", "id", "request_id"),
        ["Executor.cancel_request(id): its arguments are (request_id)"],
    ),
    "arguments in another order": (
        changed.with_swapped_arguments("KvCacheRetentionConfig.TokenRangeRetentionConfig", 0, 1),
        ["its first arguments are token_end, token_start, priority, duration_ms"],
    ),
    "another type": (
        changed.with_type("KvCacheRetentionConfig", "decode_duration_ms", "Optional[int]"),
        ["a request: InvalidRequestError"],
    ),
}


@pytest.mark.parametrize(("bindings", "expected"), DRIFT.values(), ids=DRIFT)
def test_drift_is_told(bindings: types.ModuleType, expected: list[str]) -> None:
    report = check(bindings)
    assert len(report.differences) == len(expected), report
    for line, words in zip(report.differences, expected, strict=True):
        assert words in line
    text = format_report(report, "9")
    assert text.startswith(f"TensorRT-LLM 9: {sum(1 for _ in fact_names())} facts\ndiffers   ")
    assert text.endswith("the adapter does not fit")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("SamplingConfig", "prompt_ignore_length"),
        ("Request", "cache_salt_id"),
        ("Request", "lora_config"),
    ],
)
def test_what_only_some_requests_need_may_be_missing(owner: str, name: str) -> None:
    report = check(changed.without_argument(owner, name))
    assert report.differences == []
    assert any(line.startswith(f"{owner}({name})") for line in report.missing)
    assert "nothing differs" in format_report(report, "9")


def test_what_cannot_be_seen_is_said(double: types.ModuleType) -> None:
    kind = double.SchedulerConfig
    kind.__init__.__doc__ = None
    assert any("SchedulerConfig: its constructor" in line for line in check(double).unseen)


# -- signatures --------------------------------------------------------------------------------


def test_signatures_of_the_whole_json_are_read() -> None:
    module = make_module()
    for name, spec in API.classes.items():
        if spec.inits is None:
            continue
        kind: Any = module
        for part in name.split("."):
            kind = getattr(kind, part)
        read = overloads(kind.__init__)
        assert [o.names for o in read] == [tuple(a.name for a in i) for i in spec.inits]
        assert [o.keyword for o in read] == [
            frozenset(a.name for a in i if a.kwonly) for i in spec.inits
        ]


class Function:
    """Something with a docstring and a signature as nanobind leaves them."""

    __name__ = "go"

    def __init__(self, doc: str | None = None, nb: tuple[Any, ...] = ()) -> None:
        self.__doc__ = doc
        if nb:
            self.__nb_signature__ = nb


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Function("go(self, a: int, b: dict[str, int] = {}, *, c: int = 1) -> None"), "abc"),
        (Function("Overloaded.\n\n1. ``go(self, a: int) -> int``\n2. ``go(self, b: str)``"), "a"),
        (Function("go(self, arg: int, /) -> None"), ["arg"]),
        (Function("go(self, a: X = <mod.X object at 0x1, y>, b: int = (1, 2)) -> X"), "ab"),
        (Function(None, (("def go(self, a: int = \\0) -> int", None, 5),)), "a"),
        (Function("does things"), None),
        (Function(None), None),
    ],
)
def test_signatures_in_their_forms(function: Function, names: Any) -> None:
    read = overloads(function)
    if names is None:
        assert read == ()
    else:
        assert read[0].names == tuple(names)


def test_signatures_are_written_as_they_are_read() -> None:
    text = signature("go", API.classes["Request"].inits[0])
    assert re.match(r"go\(self, input_token_ids: list\[int\], max_tokens: int, \*, streaming", text)


# -- the command -------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenflow.executor.trtllm_check"]
    environment = environment_with_double(os.environ)
    output = tmp_path / "report.json"
    found = subprocess.run(
        [*command, "--json", "--output", str(output)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["differences"] == report["missing"] == report["unseen"] == []
    assert json.loads(output.read_text()) == report
    assert report["version"] == "1.2.1+double"


@without_tensorrt_llm
def test_without_tensorrt_llm_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "trtllm needs TensorRT-LLM" in capsys.readouterr().err
