"""BurstGPT's published trace as a workload (its CSV files; arXiv 2401.17644).

Owns that layout: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type;
the third trace has Session ID and Elapsed time too, which are not used. The trace is not part of
this repository. Invariant: same file and arguments, same workload.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from perf.lab.mixes import Mix, asked
from perf.lab.traces import MAX_TIME_S, TraceError, number, rows, whole
from perf.lab.workloads import streams
from perf.virtual.values import SimRequest

_REQUIRED = (
    "Timestamp",
    "Model",
    "Request tokens",
    "Response tokens",
    "Total tokens",
    "Log Type",
)
_KNOWN = (*_REQUIRED, "Session ID", "Elapsed time")


def is_burstgpt(path: Path) -> bool:
    """True if the file begins as BurstGPT's do. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().split(",")[0].strip("\ufeff\"' \n") == _REQUIRED[0]


def read_burstgpt(
    path: Path,
    *,
    mix: Mix,
    num_requests: int = 200,
    num_rows: int = 10_000,
    time_scale: float = 1e-4,
    max_context: int = 4096,
    seed: int = 0,
) -> list[SimRequest]:
    """`num_requests` of the first `num_rows` rows, at random, in order of arrival.

    The defaults are those of the scripts that TokenFlow's authors used: sample 200 of the first
    10,000, count the time from the first, times 1e-4, contexts up to 4096. time_scale: what
    timestamps are multiplied with. max_context: prompt + answer; longer rows are left out, and so
    are failures (rows without response tokens) and rows without a prompt. seed: of the sample and
    of the people in `mix`, who are drawn for it.

    Raises TraceError for a file of another layout, and ValueError if it has too few usable rows.
    """
    usable = []
    for line, cells in itertools.islice(rows(path, _REQUIRED, _KNOWN), num_rows):
        row = _row(path, line, cells)
        if row[1] and row[2] and row[1] + row[2] <= max_context:
            usable.append(row)
    if len(usable) < num_requests:
        raise ValueError(f"{path} has {len(usable)} usable rows, {num_requests} were asked for")
    sample, people = streams(seed, 2)
    chosen = sample.choice(len(usable), num_requests, replace=False)
    picked = sorted(usable[i] for i in chosen)
    times = np.array([row[0] for row in picked])
    return asked(
        (times - times[:1]) * time_scale,
        np.array([row[1] for row in picked], dtype=np.int64),
        np.array([row[2] for row in picked], dtype=np.int64),
        mix.people(people, num_requests),
    )


def _row(path: Path, line: int, cells: dict[str, str]) -> tuple[float, int, int]:
    """(timestamp, request tokens, response tokens)."""
    column = "Timestamp"
    try:
        time = number(cells[column], 0.0, MAX_TIME_S)
        column = "Request tokens"
        num_prompt = whole(cells[column])
        column = "Response tokens"
        return time, num_prompt, whole(cells[column])
    except ValueError as error:
        raise TraceError(path, line, column, str(error)) from None
