"""The double refuses what TensorRT-LLM's bindings refuse, with the same kind of failure.

The wrong uses are made from the JSON: each argument of each constructor, each property.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.wrong import NoValue, find, make, required, right_value, wrong_values
from tests.trtllm_double.bindings import make_module
from tests.trtllm_double.folder import Behind, write_engine
from tests.trtllm_double.schema import ClassSpec, load_json, read_api

API = read_api(load_json())
MODULE = make_module()
DOUBLE = Path(__file__).parents[1] / "trtllm_double"


def _can_be_made(spec: ClassSpec) -> bool:
    """Executor and Response have tests of their own; some need a tensor."""
    try:
        return spec.name not in ("Executor", "Response") and bool(
            spec.inits is not None and make(MODULE, spec)
        )
    except NoValue:
        return False


MADE = {name: spec for name, spec in API.classes.items() if _can_be_made(spec)}


def _wrong_arguments() -> list[Any]:
    cases = []
    for name, spec in MADE.items():
        for argument in spec.inits[0]:
            for label, value in wrong_values(argument.type, argument.name):
                cases.append(pytest.param(spec, {argument.name: value},
                                          id=f"{name}({argument.name})-{label}"))  # fmt: skip
        cases.append(pytest.param(spec, {"no_such_argument": 1}, id=f"{name}-unknown"))
    return cases


ARGUMENTS = _wrong_arguments()


def test_there_are_hundreds_of_wrong_uses() -> None:
    assert len(ARGUMENTS) + len(PROPERTIES) > 400


@pytest.mark.parametrize(("spec", "given"), ARGUMENTS)
def test_a_wrong_argument_is_a_type_error(spec: Any, given: dict[str, Any]) -> None:
    values = required(MODULE, spec.inits[0])
    with pytest.raises(TypeError, match="incompatible function arguments"):
        find(MODULE, spec.name)(**{**values, **given})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(spec, argument.name, id=f"{spec.name}({argument.name})")
        for spec in MADE.values()
        for argument in spec.inits[0]
        if argument.required
    ],
)
def test_a_missing_argument_is_a_type_error(spec: Any, name: str) -> None:
    values = required(MODULE, spec.inits[0])
    del values[name]
    with pytest.raises(TypeError, match=f"{name} is missing"):
        find(MODULE, spec.name)(**values)


@pytest.mark.parametrize(
    "spec",
    [s for s in MADE.values() if any(a.kwonly for a in s.inits[0])],
    ids=lambda spec: spec.name,
)
def test_keyword_only_arguments_have_no_place(spec: Any) -> None:
    positional = [a for a in spec.inits[0] if not a.kwonly]
    values = [right_value(MODULE, a.type) for a in positional]
    first = next(a for a in spec.inits[0] if a.kwonly)
    kind = find(MODULE, spec.name)
    kind(*values)
    with pytest.raises(TypeError, match="positional"):
        kind(*values, right_value(MODULE, first.type))


def _properties() -> list[Any]:
    cases = []
    for name, spec in MADE.items():
        for prop, (text, writable) in spec.properties.items():
            if not writable:
                cases.append(pytest.param(spec, prop, None, AttributeError, id=f"{name}.{prop}"))
                continue
            for label, value in wrong_values(text, prop)[:3]:
                cases.append(pytest.param(spec, prop, value, TypeError,
                                          id=f"{name}.{prop}-{label}"))  # fmt: skip
    return cases


PROPERTIES = _properties()


@pytest.mark.parametrize(("spec", "prop", "value", "kind"), PROPERTIES)
def test_a_wrong_assignment_is_refused(spec: Any, prop: str, value: Any, kind: type) -> None:
    made = make(MODULE, spec)
    with pytest.raises(kind):
        setattr(made, prop, value)


@pytest.mark.parametrize(
    "spec", [s for s in API.classes.values() if s.inits is None], ids=lambda s: s.name
)
def test_what_only_the_library_makes_has_no_constructor(spec: Any) -> None:
    with pytest.raises(TypeError, match="no constructor"):
        find(MODULE, spec.name)()


@pytest.mark.parametrize("spec", MADE.values(), ids=lambda spec: spec.name)
def test_right_uses_are_taken(spec: Any) -> None:
    """Each argument for itself, and read back where there is a property of the name."""
    values = required(MODULE, spec.inits[0])
    kind = find(MODULE, spec.name)
    for argument in spec.inits[0]:
        try:
            value = right_value(MODULE, argument.type)
        except NoValue:
            continue
        made = kind(**{**values, argument.name: value})
        if argument.name in spec.properties:
            assert getattr(made, argument.name) == value
    made = kind(**values)
    for prop, (text, writable) in spec.properties.items():
        try:
            value = right_value(MODULE, text)
        except NoValue:
            continue
        if writable:
            setattr(made, prop, value)
            assert getattr(made, prop) == value


OPTIONALS = [
    name for name, (text, _) in API.classes["ExecutorConfig"].properties.items()
    if text.startswith("Optional")
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONALS)
def test_executor_config_properties_take_no_none(name: str) -> None:
    with pytest.raises(TypeError):
        setattr(MODULE.ExecutorConfig(), name, None)


def test_hazards_of_values() -> None:
    kind = MODULE.KvCacheRetentionConfig
    with pytest.raises(TypeError, match="str is wanted, not NoneType"):
        kind([], 35)  # without directory
    made = kind([kind.TokenRangeRetentionConfig(0, None, 35)], directory="")
    assert made == kind([kind.TokenRangeRetentionConfig(0, None, 35)], directory="")
    for priority in (-1, 101):
        with pytest.raises(RuntimeError, match="100"):
            kind.TokenRangeRetentionConfig(0, None, priority)
    overlapping = [
        kind.TokenRangeRetentionConfig(0, 9, 1),
        kind.TokenRangeRetentionConfig(8, 10, 1),
    ]
    with pytest.raises(RuntimeError, match="overlap"):
        kind(overlapping, directory="")
    for empty in (lambda: MODULE.Request([], 1), lambda: MODULE.Request([1], 0)):
        with pytest.raises(RuntimeError, match="Assertion failed"):
            empty()
    assert not hasattr(MODULE.Request([1], 1), "priority")


@pytest.mark.parametrize(
    ("kind", "given"),
    [("KvCacheConfig", {"max_tokens": 0}), ("KvCacheConfig", {"max_attention_window": [64, 0]}),
     ("KvCacheConfig", {"sink_token_length": 0}), ("KvCacheConfig", {"sink_token_length": -1}),
     ("KvCacheConfig", {"free_gpu_memory_fraction": 0.0}),
     ("KvCacheConfig", {"free_gpu_memory_fraction": 1.0}),
     ("KvCacheConfig", {"cross_kv_cache_fraction": 1.0}), ("ExecutorConfig", {"max_beam_width": 0}),
     ("ExecutorConfig", {"iter_stats_max_iterations": -1}),
     ("ExecutorConfig", {"request_stats_max_iterations": -1}),
     ("ExecutorConfig", {"max_seq_idle_microseconds": 0})],
)  # fmt: skip
def test_configurations_out_of_range_are_refused(kind: str, given: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"Assertion failed: {next(iter(given))}"):
        getattr(MODULE, kind)(**given)
    made, name = getattr(MODULE, kind)(), next(iter(given))
    before = getattr(made, name)
    with pytest.raises(RuntimeError, match=f"Assertion failed: {name}"):
        setattr(made, name, given[name])
    assert getattr(made, name) == before


def test_the_double_knows_nothing_of_the_adapter() -> None:
    """What both have in common would hide a mistake in it."""
    for path in DOUBLE.rglob("*.py"):
        assert "executor.trtllm" not in path.read_text(), path


def test_a_response_is_a_result_or_an_error() -> None:
    error = MODULE.Response(1, "no", 7)
    assert error.has_error()
    assert (error.request_id, error.error_msg, error.client_id) == (1, "no", 7)
    with pytest.raises(RuntimeError):
        _ = error.result
    result = MODULE.Response(2, MODULE.Result())
    assert not result.has_error()
    with pytest.raises(RuntimeError):
        _ = result.error_msg


def test_what_the_binding_converts_is_converted() -> None:
    sampling = MODULE.SamplingConfig(top_p=1, top_k=True)
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)
    assert MODULE.Request((1, 2), 3).input_token_ids == [1, 2]
    with pytest.raises(TypeError):
        MODULE.SamplingConfig(1, 5)  # all but the first are keyword-only


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_engine(tmp_path_factory.mktemp("engine") / "e", Behind())
    made = MODULE.Executor(
        folder,
        MODULE.ModelType.DECODER_ONLY,
        MODULE.ExecutorConfig(kv_cache_config=MODULE.KvCacheConfig(max_tokens=320)),
    )
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.cancel_request(),
        lambda e: e.cancel_request(None),
        lambda e: e.cancel_request("1"),
        lambda e: e.cancel_request(-1),
        lambda e: e.cancel_request(1.0),
        lambda e: e.await_responses(timeout=1),
        lambda e: e.await_responses(timeout=0.5),
        lambda e: e.await_responses(1, 5),
        lambda e: e.await_responses(ids=1),
        lambda e: e.await_responses(wait=timedelta(0)),
        lambda e: e.enqueue_request(None),
        lambda e: e.enqueue_request([1, 2]),
        lambda e: e.enqueue_request(),
        lambda e: e.enqueue_requests(MODULE.Request([1], 1)),
        lambda e: e.enqueue_requests([None]),
        lambda e: e.get_num_responses_ready("1"),
        lambda e: e.shutdown(1),
        lambda e: e.get_latest_iteration_stats(5),
    ],
)
def test_wrong_calls_of_an_executor(executor: Any, call: Any) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(executor)


def test_an_executor_is_made_with_the_right_things_only(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "e", Behind())
    config, kind = MODULE.ExecutorConfig(), MODULE.ModelType.DECODER_ONLY
    for wrong in (
        (folder, kind),
        (folder, 0, config),
        (5, kind, config),
        (folder, kind, None),
        (folder, kind, {}),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            MODULE.Executor(*wrong)
    with pytest.raises(RuntimeError, match=r"config\.json"):
        MODULE.Executor(tmp_path / "none", kind, config)
    with pytest.raises(RuntimeError, match="max_batch_size"):
        MODULE.Executor(folder, kind, MODULE.ExecutorConfig(max_batch_size=9))
