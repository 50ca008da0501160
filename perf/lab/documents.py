"""The laboratory's parts of the documents, from its files of results alone.

Owns what of a result a document shows; tables.py owns how. A file is what `perf.simulate --output`
or `perf.sweep` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.lab import summary, tables
from perf.lab.measures import Record

PAPER_ABLATION_SETUP = "4090-b"
PAPER_ABLATION = {
    "tokenflow-tiering": 66.00,
    "tokenflow-tiering-no-offload": 127.28,
    "tokenflow-tiering-no-write-through": 82.76,
    "tokenflow-tiering-no-overlap": 74.43,
}
"""Seconds to completion that the paper reports for its own scheduler on that set-up (its Table 2),
by our row with the same part left out. Its reading rates and the deviation of its lengths are not
printed."""


def cells_of(results: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Record], list[Record]]]:
    """(summaries by policy, goals) of every set-up of these files of `perf.simulate`."""
    return [
        ({one["policy"]: one for one in cell["summaries"]}, cell["goals"])
        for result in results
        for cell in result["cells"]
    ]


def overview(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each set-up: our default against the baseline, and how many goals are met."""
    return tables.markdown(tables.overview_rows(cells_of(results)))


def main_figures(results: Sequence[Mapping[str, Any]]) -> str:
    """For each set-up the main figures of each policy, and the goals."""
    return "\n\n".join(tables.document(cell, goals) for cell, goals in cells_of(results))


def all_figures(results: Sequence[Mapping[str, Any]]) -> str:
    """For each set-up every figure of each policy."""
    return "\n\n".join(
        _under_title(cell, tables.rows(cell, with_wall=False)) for cell, _ in cells_of(results)
    )


def ablation(results: Sequence[Mapping[str, Any]]) -> str:
    """Parts left out, in the form of the paper's Table 2; its figures beside ours where they are of
    the same set-up."""
    parts = []
    for cell, _ in cells_of(results):
        is_papers = next(iter(cell.values()))["setup"] == PAPER_ABLATION_SETUP
        table = tables.ablation_rows(cell, PAPER_ABLATION if is_papers else {})
        parts.append(_under_title(cell, table))
    return "\n\n".join(parts)


def sweeps(results: Sequence[Mapping[str, Any]]) -> str:
    """Every sweep: a table for each set-up, a row for each variant."""
    return "\n\n".join(
        _under_title(cell, tables.variant_rows(cell))
        for result in results
        for cell in summary.by_cell(result["summaries"])
    )


def virtual_real(results: Sequence[Mapping[str, Any]]) -> str:
    """What `perf.virtual_real` found: means and 95 % intervals of the real runs, and of virtual
    ones with the engine's costs as measured alone, and beside the server if that is known."""
    names = {"ttft_p50_s": "first token, P50", "ttft_p99_s": "first token, P99"}
    rows = [["policy", "", "real", "virtual, engine alone", "virtual, beside the server"]]
    for result in results:
        besides = result.get("beside") or [None] * len(result["alone"])
        for alone, beside in zip(result["alone"], besides, strict=True):
            unit = " s" if alone["measure"] in names else " tok/s"
            rows.append(
                [
                    alone["policy"],
                    names.get(alone["measure"], "raw throughput"),
                    _interval(alone["real"], unit),
                    *(_beside_real(one, unit) for one in (alone, beside)),
                ]
            )
    return tables.markdown(rows)


def _beside_real(row: Mapping[str, Any] | None, unit: str) -> str:
    if row is None:
        return "–"
    apart = "" if row["overlap"] else " (apart)"
    return _interval(row["virtual"], unit) + apart


def _interval(values: Sequence[float], unit: str) -> str:
    mean, low, high = values
    return f"{mean:.2f}{unit} [{low:.2f}, {high:.2f}]"


def load(folder: Path, pattern: str) -> list[Record]:
    """The files of `folder` that match, in order of their names. Raises as `read`."""
    return [read(path) for path in sorted(folder.glob(pattern))]


def read(path: Path) -> Record:
    """A file of results. Raises ValueError that names it where it does not hold one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the results in {path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"cannot read the results in {path}: not an object")
    return found


def _under_title(cell: Mapping[str, Record], table: Sequence[Sequence[str]]) -> str:
    return f"**{tables.title(cell)}.** {tables.load_line(cell)}\n\n{tables.markdown(table)}"
