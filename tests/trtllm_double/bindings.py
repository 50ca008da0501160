"""The double as a module: what `import tensorrt_llm.bindings.executor` gives.

`make_module()` gives one of its own, with a record of what was used of it (`module.usage`); with
changed data (`schema.load_json`) it is another version of TensorRT-LLM.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from tests.trtllm_double import events, executor, methods
from tests.trtllm_double.objects import Usage, make_classes
from tests.trtllm_double.schema import load_json, read_api

VERSION = "1.2.1+double"


def make_module(data: Mapping[str, Any] | None = None) -> types.ModuleType:
    """A module with every class and enum of the JSON, nested as there."""
    api = read_api(data or load_json())
    usage = Usage()
    bodies = {
        **methods.BODIES,
        "Executor": executor.BODIES,
        "kv_cache.KVCacheEventManager": events.BODIES,
    }
    executor_base = type("ExecutorOfModule", (executor.ExecutorBase,), {})
    bases = {
        **methods.BASES,
        "Executor": executor_base,
        "kv_cache.KVCacheEventManager": events.EventManagerBase,
    }
    classes = make_classes(api, bodies, bases, usage)
    executor_base._classes = classes  # type: ignore[attr-defined]
    module = types.ModuleType("tensorrt_llm.bindings.executor", __doc__)
    module.kv_cache = types.ModuleType(  # type: ignore[attr-defined]
        "tensorrt_llm.bindings.executor.kv_cache"
    )
    for name, made in sorted(classes.items(), key=lambda item: item[0].count(".")):
        owner, _, short = name.rpartition(".")
        setattr(_owner(module, owner), short, made)
    module.__version__ = VERSION  # type: ignore[attr-defined]
    module.usage = usage  # type: ignore[attr-defined]
    return module


def _owner(module: types.ModuleType, name: str) -> Any:
    return getattr(module, name) if name else module
