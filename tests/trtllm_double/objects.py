"""The classes and enums of the double, made from the JSON.

Owns construction, properties, signatures and the record of what was used. Methods do what
`methods.py` and `executor.py` say; a method without such a body raises NotImplementedError.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tests.trtllm_double.checks import COMMENT, Mismatch, TypeChecks
from tests.trtllm_double.schema import Api, Argument, ClassSpec

Body = Callable[..., Any]
"""body(self, **arguments): what a method does."""


class Usage:
    """What callers used, as `Class(argument)`, `Class.property`, `Class.method(argument)` and
    `Enum.MEMBER`. Off while the double works for itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, name: str) -> None:
        self.names.add(name)


class Bound:
    """Base of every class of the double."""

    _spec: ClassVar[ClassSpec]
    _types: ClassVar[TypeChecks]
    _usage: ClassVar[Usage]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = self._spec
        if spec.inits is None:
            raise TypeError(f"{spec.name}: no constructor defined!")
        values = resolve(self._types, f"{spec.name}.__init__", spec.inits, args, kwargs)
        note_arguments(self._usage, spec.name, spec.inits, args, kwargs)
        self._values = values
        self._check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Only ExecutorConfig and Request take what they do not have."""
        if name[0] != "_" and name not in self._spec.properties and not self._spec.is_dynamic:
            raise AttributeError(f"'{self._spec.name}' object has no attribute '{name}'")
        super().__setattr__(name, value)

    def _check(self) -> None:
        """What the C++ constructor refuses; RuntimeError."""

    def _check_set(self) -> None:
        """What the C++ setters refuse; RuntimeError."""

    @classmethod
    def with_defaults(cls) -> Any:
        """As a constructor without arguments, without a record of its use."""
        self = cls.__new__(cls)
        assert cls._spec.inits is not None
        self._values = cls._types.bind(cls._spec.inits[0], (), {})
        return self

    @classmethod
    def make(cls, **values: Any) -> Any:
        """An instance as the library makes it; types are checked, what is left out is empty."""
        self = cls.__new__(cls)
        self._values = {}
        for name, value in values.items():
            text, _ = cls._spec.properties[name]
            self._values[name] = cls._types.convert(text, name, value)
        return self

    def get(self, name: str) -> Any:
        """A value, without a record of its use."""
        if name in self._values:
            return self._values[name]
        return empty(self._spec.properties[name][0])


def empty(type_text: str) -> Any:
    """What a field that nobody set holds."""
    if type_text.startswith("Optional"):
        return None
    for start, value in (("int", 0), ("float", 0.0), ("bool", False), ("str", "")):
        if type_text.startswith(start):
            return value
    if type_text.startswith("list"):
        return []
    if type_text.startswith("dict"):
        return {}
    return None


def resolve(
    types: TypeChecks,
    function: str,
    overloads: tuple[tuple[Argument, ...], ...],
    args: Any,
    kwargs: Any,
) -> dict[str, Any]:
    """The values of the first overload that fits. Raises TypeError when none does."""
    reasons = []
    for overload in overloads:
        try:
            return types.bind(overload, args, kwargs)
        except Mismatch as error:
            reasons.append(str(error))
    supported = "\n".join(
        f"    {i}. {signature(function.rpartition('.')[2], overload)}"
        for i, overload in enumerate(overloads, 1)
    )
    raise TypeError(
        f"{function}(): incompatible function arguments. The following argument types are "
        f"supported:\n{supported}\n\nReason: {'; '.join(reasons)}"
    )


def note_arguments(
    usage: Usage,
    function: str,
    overloads: tuple[tuple[Argument, ...], ...],
    args: Any,
    kwargs: Any,
) -> None:
    """Record which arguments a call gave."""
    usage.note(function)
    names = [a.name for a in overloads[0] if not a.kwonly][: len(args)]
    for name in (*names, *kwargs):
        usage.note(f"{function}({name})")
    for value in (*args, *kwargs.values()):
        if isinstance(value, enum.Enum):
            usage.note(f"{type(value).__qualname__}.{value.name}")


def signature(name: str, arguments: tuple[Argument, ...]) -> str:
    """As nanobind writes it into docstrings."""
    parts, has_star = ["self"], False
    for argument in arguments:
        if argument.kwonly and not has_star:
            parts.append("*")
            has_star = True
        text = f"{argument.name}: {_type_text(argument.type)}"
        if not argument.required:
            text += f" = {_default_text(argument.default)}"
        parts.append(text)
    return f"{name}({', '.join(parts)})"


def _type_text(text: str) -> str:
    inner = COMMENT.sub("", text).strip()
    return f"{inner[9:-1]} | None" if inner.startswith("Optional[") else inner


def _default_text(default: Any) -> str:
    if isinstance(default, str) and default.endswith("()"):
        return f"<tensorrt_llm.bindings.executor.{default[:-2]} object at 0x7f00>"
    return str(default) if isinstance(default, str) and default else repr(default)


def make_enum(name: str, members: Mapping[str, int]) -> type[enum.Enum]:
    """As nanobind makes them: members that are no numbers."""
    made: type[enum.Enum] = enum.Enum(  # type: ignore[assignment]
        name.rpartition(".")[2], dict(members), module="tensorrt_llm.bindings.executor"
    )
    made.__qualname__ = name
    return made


def make_classes(
    api: Api, bodies: Mapping[str, Mapping[str, Body]], bases: Mapping[str, type], usage: Usage
) -> dict[str, type]:
    """Every class and enum by its name. bodies: of methods, by class ('' = of every class)."""
    made: dict[str, type] = {}

    def find(name: str) -> type | None:
        if name in made:
            return made[name]
        return next((made[full] for full in made if full.rpartition(".")[2] == name), None)

    types = TypeChecks(find)
    for name, members in api.enums.items():
        made[name] = make_enum(name, members)
    for name, spec in api.classes.items():
        made[name] = _make_class(spec, types, usage, bodies, bases.get(name, Bound))
    return made


def _make_class(
    spec: ClassSpec,
    types: TypeChecks,
    usage: Usage,
    bodies: Mapping[str, Mapping[str, Body]],
    base: type,
) -> type:
    short = spec.name.rpartition(".")[2]
    namespace: dict[str, Any] = {
        "_spec": spec,
        "_types": types,
        "_usage": usage,
        "__module__": "tensorrt_llm.bindings.executor",
        "__qualname__": spec.name,
        **spec.attributes,
    }
    for name, (text, writable) in spec.properties.items():
        namespace[name] = _property(spec, name, text, writable, types, usage)
    for name, overloads in spec.methods.items():
        body = bodies.get(spec.name, {}).get(name) or bodies[""].get(name)
        namespace[name] = _method(spec.name, name, overloads, types, usage, body)
    for name, overloads in spec.statics.items():
        body = bodies.get(spec.name, {}).get(name)
        made = _method(spec.name, name, overloads, types, usage, body)
        namespace[name] = classmethod(made)
    kind = type(short, (base,), namespace)
    if spec.inits is not None:
        kind.__init__ = _constructor(kind, spec)  # type: ignore[misc]
    return kind


def _constructor(kind: type, spec: ClassSpec) -> Body:
    inherited = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        inherited(self, *args, **kwargs)

    assert spec.inits is not None
    __init__.__doc__ = "\n".join(f"{signature('__init__', i)} -> None" for i in spec.inits)
    return __init__


def _property(
    spec: ClassSpec, name: str, text: str, writable: bool, types: TypeChecks, usage: Usage
) -> property:
    # A property may be called otherwise than the argument it comes from.
    key = {"request_type": "type"}.get(name, name) if spec.inits else name

    def read(self: Any) -> Any:
        usage.note(f"{spec.name}.{name}")
        special = getattr(self, f"_get_{name}", None)
        if special is not None:
            return special()
        return self._values[key] if key in self._values else empty(text)

    def write(self: Any, value: Any) -> None:
        usage.note(f"{spec.name}.{name}")
        wanted = text
        if spec.refuses_none and text.startswith("Optional["):
            wanted = text[len("Optional[") : -1]
        before = self._values
        try:
            self._values = {**before, key: types.convert(wanted, name, value)}
        except Mismatch as error:
            raise TypeError(
                f"{spec.name}.{name}: incompatible function arguments. {error}"
            ) from None
        try:
            self._check_set()
        except RuntimeError:
            self._values = before
            raise

    return property(read, write if writable else None)


def _method(
    owner: str,
    name: str,
    overloads: tuple[tuple[Argument, ...], ...],
    types: TypeChecks,
    usage: Usage,
    body: Body | None,
) -> Body:
    function = f"{owner}.{name}"

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = resolve(types, function, overloads, args, kwargs)
        note_arguments(usage, function, overloads, args, kwargs)
        if body is None:
            raise NotImplementedError(f"the double does nothing for {function}")
        return body(self, **values)

    call.__name__ = name
    call.__doc__ = "\n".join(f"{signature(name, overload)} -> object" for overload in overloads)
    return call
