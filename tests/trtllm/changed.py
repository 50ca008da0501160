"""Bindings of other versions: the recorded JSON with something changed."""

from __future__ import annotations

import types
from typing import Any

from tests.trtllm_double.bindings import make_module
from tests.trtllm_double.schema import load_json


def _arguments(data: dict[str, Any], owner: str, method: str = "") -> list[dict[str, Any]]:
    spec = data["classes"][owner]
    found: list[dict[str, Any]] = spec["methods"][method] if method else spec["init"]
    return found


def without_argument(owner: str, name: str) -> types.ModuleType:
    """A class without an argument of its constructor, and without the property of that name."""
    data = load_json()
    arguments = _arguments(data, owner)
    arguments[:] = [a for a in arguments if a["name"] != name]
    data["classes"][owner]["properties"].pop(name, None)
    return make_module(data)


def without_property(owner: str, name: str) -> types.ModuleType:
    data = load_json()
    del data["classes"][owner]["properties"][name]
    return make_module(data)


def without_class(name: str) -> types.ModuleType:
    data = load_json()
    del data["classes"][name]
    return make_module(data)


def without_method(owner: str, name: str) -> types.ModuleType:
    data = load_json()
    del data["classes"][owner]["methods"][name]
    return make_module(data)


def without_member(enum: str, name: str) -> types.ModuleType:
    data = load_json()
    data["enums"][enum].remove(name)
    return make_module(data)


def with_default(owner: str, name: str, default: Any) -> types.ModuleType:
    data = load_json()
    for argument in _arguments(data, owner):
        if argument["name"] == name:
            argument["default"] = default
    return make_module(data)


def with_renamed_argument(owner: str, method: str, old: str, new: str) -> types.ModuleType:
    data = load_json()
    for argument in _arguments(data, owner, method):
        if argument["name"] == old:
            argument["name"] = new
    return make_module(data)


def with_swapped_arguments(owner: str, first: int, second: int) -> types.ModuleType:
    data = load_json()
    arguments = _arguments(data, owner)
    arguments[first], arguments[second] = arguments[second], arguments[first]
    return make_module(data)


def with_type(owner: str, name: str, type_text: str) -> types.ModuleType:
    data = load_json()
    for argument in _arguments(data, owner):
        if argument["name"] == name:
            argument["type"] = type_text
    return make_module(data)
