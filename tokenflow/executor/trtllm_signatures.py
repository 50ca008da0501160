"""Argument names of a bound function, as far as it tells them.

nanobind writes signatures into `__nb_signature__` and `__doc__`, one line per overload:
`name(self, a: int = 1, *, b: str | None = None) -> None`, with numbers in front where there are
several. Functions of Python itself have `inspect`. Pure; needs no TensorRT-LLM.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_START = re.compile(r"^\s*(?:\d+\.\s*)?`*(?:def\s+)?(\w+)\(")


@dataclass(frozen=True)
class Overload:
    """Names of the arguments in order, without self; keyword: those given by keyword only."""

    names: tuple[str, ...]
    keyword: frozenset[str]


def overloads(function: object) -> tuple[Overload, ...]:
    """What is known of the arguments; () when nothing is."""
    found = tuple(_parse(line) for line in _lines(function))
    if found:
        return found
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    kinds = {p.kind for p in parameters}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return ()
    names = tuple(p.name for p in parameters if p.name != "self")
    keyword = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return (Overload(names, frozenset(keyword)),)


def _lines(function: object) -> Iterator[str]:
    """The argument lists, without their brackets."""
    texts = [str(entry[0]) for entry in getattr(function, "__nb_signature__", ()) if entry]
    if not texts:
        texts = (getattr(function, "__doc__", None) or "").splitlines()
    name = getattr(function, "__name__", "")
    for text in texts:
        match = _START.match(text)
        if match and match.group(1) in (name, "__init__"):
            inside = _inside(text[match.end() :])
            if inside is not None:
                yield inside


def _inside(text: str) -> str | None:
    """`text` up to the bracket that closes what was open before it."""
    depth = 0
    for i, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                return text[:i]
            depth -= 1
    return None


def _parse(arguments: str) -> Overload:
    names: list[str] = []
    keyword: set[str] = set()
    after_star = False
    for part in _split(arguments):
        name = part.partition(":")[0].partition("=")[0].strip()
        if name == "*":
            after_star = True
        elif name not in ("self", "/", ""):
            names.append(name)
            if after_star:
                keyword.add(name)
    return Overload(tuple(names), frozenset(keyword))


def _split(text: str) -> Iterator[str]:
    """At the commas that are in no brackets and no `<…>` of an object's text."""
    depth, start, previous = 0, 0, ""
    for i, character in enumerate(text):
        if character in _CLOSING:
            depth += 1
        elif character in _CLOSING.values() and previous + character != "->":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:i]
            start = i + 1
        previous = character
    yield text[start:]
