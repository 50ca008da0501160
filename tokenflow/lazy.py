"""A value that is computed when it is first asked for, and kept.

Owns the descriptor. Unlike functools.cached_property it takes no lock on any version of Python: its
owners live in one thread, in which a plan asks for dozens of such values.

Invariant: the value is computed once per owner; owners have a `__dict__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Decorator of a method without arguments; the name then stands for its result."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> lazy[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> T | lazy[T]:
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._compute(owner)
        return value
