"""Workloads in files: the laboratory's own CSV, and BurstGPT's.

Owns both layouts. Own layout: a header, then one request a line in order of arrival. Columns, in
any order, the first four required:

| column | value | when the column is absent |
|---|---|---|
| arrival_time | s from the start, up to MAX_TIME_S | – |
| num_prompt_tokens | tokens | – |
| max_tokens | tokens of the answer; its limit, unless limit_tokens is more | – |
| read_rate | tokens/s; empty: a machine | – |
| kind | a name to count by | reader, or machine |
| priority | 0 to 1 | 0.5 |
| pausable | true or false | true |
| num_shared_tokens | leading tokens that all prompts have | 0 |
| cancel_after_s | s after the arrival; empty: stays | stays |
| conversation | a number; empty: none | none |
| num_history_tokens | leading tokens that earlier turns said | 0 |
| limit_tokens | the limit that the request names, no less than max_tokens | max_tokens |

Invariants: what is written reads back as it was, to the last bit; a file that is not of its layout
is refused with one error that names line and column, never read in part.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from perf.lab.mixes import MACHINE, READ_RATE_BOUNDS, READER
from perf.virtual.values import SimRequest

COLUMNS = tuple(field.name for field in dataclasses.fields(SimRequest))
_PLAIN = re.compile(r"[0-9.eE+-]+")
MAX_TIME_S = 1e9
"""Instants are told apart to less than a microsecond up to here."""
_REQUIRED = ("arrival_time", "num_prompt_tokens", "max_tokens", "read_rate")


class TraceError(ValueError):
    """A trace that is not of its layout. line: from 1, the header is the first."""

    def __init__(self, path: Path, line: int, column: str, message: str) -> None:
        where = f"{path}, line {line}" + (f", column {column}" if column else "")
        super().__init__(f"{where}: {message}")
        self.line = line
        self.column = column


def write_trace(path: Path, requests: Sequence[SimRequest]) -> None:
    """Write `requests`, in order of arrival, with all columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for request in sorted(requests, key=lambda r: r.arrival_time):
            writer.writerow([_cell(getattr(request, name)) for name in COLUMNS])


def read_trace(path: Path) -> list[SimRequest]:
    """The requests of a file of our own layout. Raises TraceError, or OSError."""
    result: list[SimRequest] = []
    said: dict[int, int] = {}
    for line, cells in rows(path, _REQUIRED, COLUMNS):
        fields: dict[str, object] = {}
        for name, text in cells.items():
            try:
                fields[name] = _PARSERS[name](text)
            except ValueError as error:
                raise TraceError(path, line, name, str(error)) from None
        if "kind" not in cells:
            fields["kind"] = MACHINE if fields["read_rate"] is None else READER
        try:
            request = SimRequest(**fields)  # type: ignore[arg-type]
        except ValueError as error:
            raise TraceError(path, line, "limit_tokens", str(error)) from None
        _check(path, line, request, result[-1] if result else None, said)
        result.append(request)
    return result


def rows(
    path: Path, required: Sequence[str], known: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) of each row of a CSV file, blank lines left out.

    Raises TraceError for a header that lacks a required column, has an unknown one or one twice,
    for a row with another number of cells, and for what is not CSV in UTF-8.
    """
    with path.open("rb") as file:
        reader = csv.reader((line.decode() for line in file), strict=True)
        try:
            header = next(reader, None) or [""]
            header[0] = header[0].removeprefix("\ufeff")
            _check_header(path, header, required, known)
            for cells in reader:
                if len(cells) not in (0, len(header)):
                    message = f"{len(cells)} cells, but the header has {len(header)}"
                    raise TraceError(path, reader.line_num, "", message)
                if cells:
                    yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise TraceError(path, reader.line_num, "", str(error)) from None
        except UnicodeDecodeError as error:
            raise TraceError(path, reader.line_num + 1, "", str(error)) from None


def _check_header(
    path: Path, header: list[str], required: Sequence[str], known: Sequence[str]
) -> None:
    for name in required:
        if name not in header:
            raise TraceError(path, 1, name, "is missing")
    for name in header:
        if name not in known:
            raise TraceError(path, 1, name, f"is unknown; known are {', '.join(known)}")
        if header.count(name) > 1:
            raise TraceError(path, 1, name, "is there twice")


def _check(
    path: Path, line: int, request: SimRequest, previous: SimRequest | None, said: dict[int, int]
) -> None:
    """What no column shows alone. said: tokens of each conversation so far, kept up to date."""

    def refuse(column: str, message: str) -> None:
        raise TraceError(path, line, column, message)

    if previous is not None and request.arrival_time < previous.arrival_time:
        refuse("arrival_time", f"is before that of the line above ({previous.arrival_time})")
    if request.num_shared_tokens > request.num_prompt_tokens:
        refuse("num_shared_tokens", "exceeds num_prompt_tokens")
    if request.num_history_tokens:
        if request.num_shared_tokens:
            refuse("num_history_tokens", "cannot be had together with num_shared_tokens")
        if request.num_history_tokens > request.num_prompt_tokens:
            refuse("num_history_tokens", "exceeds num_prompt_tokens")
        known = 0 if request.conversation is None else said.get(request.conversation, 0)
        if request.num_history_tokens > known:
            refuse("num_history_tokens", f"exceeds the {known} tokens that were said before")
    if request.conversation is not None:
        said[request.conversation] = request.num_prompt_tokens + request.max_tokens


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def whole(text: str, low: int = 0) -> int:
    """A whole number in digits. Raises ValueError for anything else, and below `low`."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"must be a whole number, got {text!r}")
    if int(text) < low:
        raise ValueError(f"must be >= {low}, got {text}")
    return int(text)


def number(text: str, low: float, high: float) -> float:
    """A number. Raises ValueError for anything else, and outside low..high."""
    try:
        value = float(text if _PLAIN.fullmatch(text) else "")
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None
    if not low <= value <= high:
        raise ValueError(f"must be a number from {low:g} to {high:g}, got {text!r}")
    return value


def _rate(text: str) -> float | None:
    return number(text, *READ_RATE_BOUNDS) if text else None


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"must be true or false, got {text!r}")
    return text == "true"


def _name(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_PARSERS: dict[str, Callable[[str], object]] = {
    "arrival_time": lambda text: number(text, 0.0, MAX_TIME_S),
    "num_prompt_tokens": lambda text: whole(text, 1),
    "max_tokens": lambda text: whole(text, 1),
    "read_rate": _rate,
    "priority": lambda text: number(text, 0.0, 1.0),
    "pausable": _truth,
    "kind": _name,
    "num_shared_tokens": whole,
    "cancel_after_s": lambda text: number(text, 0.0, MAX_TIME_S) if text else None,
    "conversation": lambda text: whole(text) if text else None,
    "num_history_tokens": whole,
    "limit_tokens": lambda text: whole(text, 1) if text else None,
}
