"""`trtllm_api.json` as Python values: classes, arguments, properties, enums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

API_PATH = Path(__file__).with_name("trtllm_api.json")


@dataclass(frozen=True)
class Argument:
    """One argument. default: as the JSON writes it; meaningless where `required`."""

    name: str
    type: str
    required: bool
    kwonly: bool
    default: Any = None


@dataclass(frozen=True)
class ClassSpec:
    """One class. inits: the overloads of its constructor, or None where Python has none.
    properties: name -> (type, writable). methods: name -> overloads. is_dynamic: instances take
    attributes of any name."""

    name: str
    inits: tuple[tuple[Argument, ...], ...] | None
    properties: dict[str, tuple[str, bool]]
    methods: dict[str, tuple[tuple[Argument, ...], ...]]
    statics: dict[str, tuple[tuple[Argument, ...], ...]]
    attributes: dict[str, Any]
    refuses_none: bool = False
    is_dynamic: bool = False


@dataclass(frozen=True)
class Api:
    """All of it. enums: name -> {member: value}."""

    classes: dict[str, ClassSpec] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)


def load_json() -> dict[str, Any]:
    """The JSON as it is; changed copies of it make changed doubles."""
    data: dict[str, Any] = json.loads(API_PATH.read_text(encoding="utf-8"))
    return data


def read_api(data: Mapping[str, Any]) -> Api:
    """The values of `data`."""
    classes = {name: _class(name, spec) for name, spec in data["classes"].items()}
    enums = {}
    for name, members in data["enums"].items():
        values = data["enum_int_values"].get(name, {})
        enums[name] = {member: values.get(member, i) for i, member in enumerate(members)}
    return Api(classes, enums)


def _class(name: str, spec: Mapping[str, Any]) -> ClassSpec:
    properties = {key: (p["type"], p["writable"]) for key, p in spec["properties"].items()}
    if "init_overloads" in spec:
        inits: Any = tuple(_arguments(overload) for overload in spec["init_overloads"])
    elif spec["init"]:
        inits = (_arguments(spec["init"]),)
    else:  # values that only the library makes have read-only properties
        is_plain = bool(properties) and all(writable for _, writable in properties.values())
        inits = ((),) if is_plain else None
    return ClassSpec(
        name=name,
        inits=inits,
        properties=properties,
        methods={key: _overloads(m) for key, m in spec["methods"].items()},
        statics={key: _overloads(m) for key, m in spec["static"].items()},
        attributes=dict(spec.get("class_attrs", {})),
        refuses_none=any("cannot assign None" in note for note in spec.get("notes", ())),
        is_dynamic=any("dynamic_attr" in note for note in spec.get("notes", ())),
    )


def _overloads(given: list[dict[str, Any]]) -> tuple[tuple[Argument, ...], ...]:
    if given and "overload" in given[0]:
        return tuple(_arguments(overload["args"]) for overload in given)
    return (_arguments(given),)


def _arguments(given: list[dict[str, Any]]) -> tuple[Argument, ...]:
    return tuple(
        Argument(a["name"], a["type"], a.get("required", False), a["kwonly"], a.get("default"))
        for a in given
    )
