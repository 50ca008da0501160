"""Which Python values an argument or property takes, by the type that the JSON writes.

As strict as nanobind: no None where it is not optional, no float for an int, no int for a bool or a
timedelta, no number outside the C++ type, no enum by its number. What nanobind converts is
converted here too: an int for a float, any sequence (but text) for a list.
"""

from __future__ import annotations

import datetime
import operator
import os
import re
from collections.abc import Callable
from typing import Any

from tests.trtllm_double.schema import Argument

Converter = Callable[[Any], Any]

_INT32 = (-(2**31), 2**31 - 1)
_UINT64 = (0, 2**64 - 1)
UINT64_NAMES = {
    "id", "ids", "request_id", "client_id", "task_id", "lora_id", "req_id", "cache_salt_id",
    "draft_request_id", "token_extra_id", "input_token_extra_ids", "event_id", "block_hash",
    "block_hashes", "parent_hash", "seed", "host_cache_size", "max_gpu_total_bytes",
    "event_buffer_max_size", "max_seq_idle_microseconds", "kv_cache_size", "gpu_mem_usage",
    "cpu_mem_usage", "pinned_mem_usage", "iter", "decoding_iter",
}  # fmt: skip
COMMENT = re.compile(r"\s*\([^()]*\)|\s+0\.\.100|\s+'%.*$")


class Mismatch(TypeError):
    """The value does not fit; the caller says where."""


class TypeChecks:
    """Converters by type text. find(name): the class or enum of that name, or None."""

    def __init__(self, find: Callable[[str], type | None]) -> None:
        self._find = find

    def convert(self, type_text: str, name: str, value: Any) -> Any:
        """`value` as the binding would hold it. Raises Mismatch, or RuntimeError for a value that
        the C++ constructor refuses."""
        if "0..100" in type_text:
            value = _integer(value, _INT32)
            if not 0 <= value <= 100:
                raise RuntimeError(f"{name} must be in [0, 100], got {value}")
            return value
        return self._convert(COMMENT.sub("", type_text).strip(), name, value)

    def _convert(self, text: str, name: str, value: Any) -> Any:
        outer, inner = _split(text)
        if outer == "Optional":
            return None if value is None else self._convert(inner, name, value)
        if outer in ("list", "list-like"):
            return [self._convert(inner, name, item) for item in _items(value)]
        if outer == "dict":
            if not isinstance(value, dict):
                raise Mismatch(f"{name} must be a dict")
            key, _, item = inner.partition(",")
            return {
                self._convert(key.strip(), name, k): self._convert(item.strip(), name, v)
                for k, v in value.items()
            }
        if "|" in text:
            return self._any_of(text.split("|"), name, value)
        return self._plain(text, name, value)

    def _any_of(self, texts: list[str], name: str, value: Any) -> Any:
        for text in texts:
            try:
                return self._convert(text.strip(), name, value)
            except Mismatch:
                continue
        raise Mismatch(f"{name}: no type of {texts} fits {type(value).__name__}")

    def _plain(self, text: str, name: str, value: Any) -> Any:
        if text == "int":
            return _integer(value, _UINT64 if name in UINT64_NAMES else _INT32)
        if text == "list":
            return list(_items(value))
        if text in _PLAIN:
            return _PLAIN[text](value)
        kind = self._find(text)
        if kind is None:
            raise Mismatch(f"{name}: there is nothing of type {text} in Python")
        if not isinstance(value, kind):
            raise Mismatch(f"{name} must be {text}, not {type(value).__name__}")
        return value

    def bind(self, arguments: tuple[Argument, ...], args: Any, kwargs: Any) -> dict[str, Any]:
        """Values by name, defaults included. Raises Mismatch."""
        positional = [a for a in arguments if not a.kwonly]
        if len(args) > len(positional):
            raise Mismatch(f"{len(args)} positional arguments, {len(positional)} are taken")
        given = {a.name: value for a, value in zip(positional, args, strict=False)}
        for name, value in kwargs.items():
            if name in given or name not in {a.name for a in arguments}:
                raise Mismatch(f"unknown or repeated argument {name}")
            given[name] = value
        bound = {}
        for argument in arguments:
            if argument.name in given:
                value = given[argument.name]
            elif argument.required:
                raise Mismatch(f"{argument.name} is missing")
            else:
                value = self.default(argument)
            bound[argument.name] = self.convert(argument.type, argument.name, value)
        return bound

    def default(self, argument: Argument) -> Any:
        """The default of an argument as a Python value: the JSON names objects by text."""
        text = argument.default
        if not isinstance(text, str) or text == "":
            return text
        if text.endswith("()"):
            kind = self._find(text[:-2])
            return text if kind is None else kind.with_defaults()  # type: ignore[attr-defined]
        owner, _, member = text.rpartition(".")
        kind = self._find(owner) if owner else None
        return text if kind is None else getattr(kind, member)


def _split(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(Optional|list|list-like|dict)\[(.*)\]", text)
    return (match.group(1), match.group(2)) if match else ("", text)


def _items(value: Any) -> Any:
    if isinstance(value, (str, bytes, dict, set)) or not hasattr(value, "__getitem__"):
        raise Mismatch(f"a sequence is wanted, not {type(value).__name__}")
    return [value[i] for i in range(len(value))]


def _integer(value: Any, bounds: tuple[int, int]) -> int:
    if isinstance(value, float) or value is None:
        raise Mismatch(f"an int is wanted, not {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError:
        raise Mismatch(f"an int is wanted, not {type(value).__name__}") from None
    if not bounds[0] <= number <= bounds[1]:
        raise Mismatch(f"{number} is not in [{bounds[0]}, {bounds[1]}]")
    return number


def _number(value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise Mismatch(f"a float is wanted, not {type(value).__name__}")
    return float(value)


def _exactly(*kinds: type) -> Converter:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise Mismatch(f"{kinds[0].__name__} is wanted, not {type(value).__name__}")
        return value

    return check


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise Mismatch(f"a path is wanted, not {type(value).__name__}")
    return os.fspath(value)


def _tensor(value: Any) -> Any:
    kind = type(value)
    if (kind.__module__.partition(".")[0], kind.__name__) not in (
        ("torch", "Tensor"),
        ("torch", "Parameter"),
    ):
        raise Mismatch(f"torch.Tensor is wanted, not {kind.__name__}")
    return value


def _callable(value: Any) -> Any:
    if not callable(value):
        raise Mismatch("a callable is wanted")
    return value


_PLAIN: dict[str, Converter] = {
    "bool": _exactly(bool),
    "float": _number,
    "str": _exactly(str),
    "bytes": _exactly(bytes),
    "object": lambda value: value,
    "datetime.timedelta": _exactly(datetime.timedelta),
    "torch.Tensor": _tensor,
    "tensor/ndarray": _tensor,
    "Callable": _callable,
    "pathlib.Path": _path,
}
