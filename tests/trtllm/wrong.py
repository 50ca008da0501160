"""Values that an argument of the bindings takes, and such that it refuses, by the JSON's type."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from tests.trtllm_double.checks import UINT64_NAMES
from tests.trtllm_double.schema import Argument, ClassSpec

_COMMENT = re.compile(r"\s*\([^()]*\)|\s+'%.*$")


class NoValue(Exception):
    """Nothing of that type can be made here."""


def plain(type_text: str) -> str:
    return _COMMENT.sub("", type_text).strip()


def right_value(module: Any, type_text: str) -> Any:
    """Something that fits. Raises NoValue where torch or MPI would be needed."""
    text = plain(type_text)
    match = re.fullmatch(r"(Optional|list|dict)\[(.*)\]", text)
    if match:
        outer, inner = match.groups()
        if outer == "dict":
            return {}
        value = right_value(module, inner)
        return value if outer == "Optional" else [value]
    simple = {
        "int": 1, "int 0..100": 50, "float": 0.5, "bool": True, "str": "a", "bytes": b"a",
        "object": None, "datetime.timedelta": timedelta(seconds=1), "Callable": print,
        "pathlib.Path": "/nowhere", "pathlib.Path|str": "/nowhere",
    }  # fmt: skip
    if text in simple:
        return simple[text]
    kind = find(module, text)
    if kind is None:
        raise NoValue(text)
    if hasattr(kind, "_spec"):
        if kind._spec.inits is None:
            raise NoValue(text)
        return make(module, kind._spec)
    return next(iter(kind))


def find(module: Any, name: str) -> Any:
    for owner in (module, module.kv_cache):
        found = owner
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


def make(module: Any, spec: ClassSpec, **given: Any) -> Any:
    """An instance with its required arguments and `given`."""
    assert spec.inits is not None
    return find(module, spec.name)(**{**required(module, spec.inits[0]), **given})


def required(module: Any, arguments: tuple[Argument, ...]) -> dict[str, Any]:
    values = {a.name: right_value(module, a.type) for a in arguments if a.required}
    # Its default does not fit its type.
    return {
        **values,
        **({"directory": ""} if any(a.name == "directory" for a in arguments) else {}),
    }


def wrong_values(type_text: str, name: str) -> list[tuple[str, Any]]:
    """(label, value) that are refused."""
    text = plain(type_text)
    if text.startswith("Optional["):
        return _wrong(text[len("Optional[") : -1], name)
    return [*_wrong(text, name), *([] if text == "object" else [("none", None)])]


def _wrong(text: str, name: str) -> list[tuple[str, Any]]:
    if text.startswith("list["):
        inner = [(f"list of {label}", [value]) for label, value in _wrong(text[5:-1], name)]
        return [("number", 5), ("text", "ab"), *inner]
    if text.startswith("dict["):
        return [("number", 5), ("list", [1])]
    if text.startswith("int"):
        limits = [("too large", 2**64), ("negative", -1)] if name in UINT64_NAMES else [
            ("too large", 2**31), ("too small", -(2**31) - 1)]  # fmt: skip
        if "0..100" in text:
            limits = []
        return [("float", 1.5), ("text", "1"), *limits]
    table: dict[str, list[tuple[str, Any]]] = {
        "float": [("text", "1"), ("list", [])],
        "bool": [("number", 1), ("text", "true"), ("float", 0.0)],
        "str": [("number", 1), ("bytes", b"a")],
        "bytes": [("text", "a"), ("number", 1)],
        "datetime.timedelta": [("number", 5), ("float", 0.5), ("text", "5")],
        "torch.Tensor": [("list", [1.0]), ("number", 1)],
        "Callable": [("number", 5)],
        "pathlib.Path": [("number", 5), ("bytes", b"/")],
        "pathlib.Path|str": [("number", 5), ("bytes", b"/")],
        "object": [],
    }
    return table.get(text, [("number", 0), ("text", "DEFAULT"), ("object", object())])
