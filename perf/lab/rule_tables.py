"""How the worth of rules is shown: one table over all set-ups, and one for each.

Owns wording, marks and digits; nothing is computed here. Everything shown is in what
rule_outcomes.py made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.lab import tables
from perf.lab.measures import MAX_SHARE_STALLED, Record
from perf.lab.rule_outcomes import FIGURES, MIN_CHANGE
from perf.lab.rules import VARIANTS

SAME, NOTHING, LOSES, GAINS = "=", "·", "✗", "✓"
LEGEND = (
    f"{LOSES} worse by more than {MIN_CHANGE:.0%} in what is named, or stalls appear; "
    f"{GAINS} better; {NOTHING} neither; {SAME} the same to the last figure; blank: not tried there"
)
_WORDS = {figure.key: figure.words for figure in FIGURES}
_COLUMNS = (
    ("ttft_p99_s", "first token, P99", 2, "s"),
    ("ttft_mean_s", "mean", 2, "s"),
    ("share_stalled", "stalled readers", 1, "%"),
    ("stall_s", "seconds of stalls", 1, "s"),
    ("effective_throughput", "effective", 0, ""),
    ("raw_throughput", "raw", 0, ""),
    ("end_to_end_mean_s", "end to end", 1, "s"),
    ("urgent_ttft_mean_s", "urgent: mean", 2, "s"),
    ("machine_end_to_end_mean_s", "machines: end to end", 1, "s"),
    ("num_pauses", "pauses", 0, ""),
    ("num_forced_pauses", "forced", 0, ""),
    ("num_recomputed_tokens", "recomputed", 0, ""),
)


def overview_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and rows: each variant, what it lost and gained on each set-up, and the verdict over
    all of them; of several files."""
    cells = _cells(results)
    found: dict[str, dict[int, Record]] = {}
    for i, cell in enumerate(cells):
        for row in cell["rows"]:
            found.setdefault(row["name"], {})[i] = row
    table = [["rule", "instead", *map(_name, cells), "without it"]]
    places = {variant.name: place for place, variant in enumerate(VARIANTS)}
    for name in sorted(found, key=lambda name: places.get(name, len(places))):
        rows = found[name]
        one = next(iter(rows.values()))
        marks = [_mark(rows[i]) if i in rows else "" for i in range(len(cells))]
        table.append([one["rule"], one["instead"], *marks, verdict(list(rows.values()))])
    return table


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the rows of one variant: what leaving the rule out does, over all set-ups."""
    loses, gains = any(row["losses"] for row in rows), any(row["gains"] for row in rows)
    if loses and gains:
        return "loses and gains"
    if loses or gains:
        return "loses" if loses else "gains"
    return "nothing changes" if all(row["is_same"] for row in rows) else "costs nothing"


def cell_rows(cell: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows: every figure on one set-up, a row for each variant under its default."""
    columns = [c for c in _COLUMNS if any(d[c[0]] is not None for d in cell["defaults"].values())]
    table = [["rule", "instead", *(words for _, words, _, _ in columns), ""]]
    for policy, default in cell["defaults"].items():
        shown = [_shown(default[key], digits, unit) for key, _, digits, unit in columns]
        table.append([policy, "", *shown, ""])
        for row in cell["rows"]:
            if row["policy"] == policy:
                texts = [_figure(row, *column) for column in columns]
                table.append([row["rule"], row["instead"], *texts, _mark(row)])
    return table


def title(cell: Mapping[str, Any]) -> str:
    """Which set-up, and what it asks of its engine."""
    rate = cell["read_rate"]
    read = "rates of their own" if rate is None else f"{rate:g} tok/s"
    load = "schedulable" if cell["is_schedulable"] else "not schedulable"
    return (
        f"{cell['setup']}: {cell['num_requests']:.0f} requests, readers of {read}, host "
        f"{cell['host_gb']:g} GB, ΣR/Γ = {cell['load']:.2f} ({load}), seeds "
        f"{', '.join(map(str, cell['seeds']))}"
    )


def terminal(results: Sequence[Mapping[str, Any]]) -> str:
    """All of it, for a terminal."""
    parts = [f"{title(cell)}\n\n{tables.format_table(cell_rows(cell))}" for cell in _cells(results)]
    overview = tables.format_table(overview_rows(results))
    return "\n\n\n".join([*parts, f"{overview}\n\n{LEGEND}"])


def document(results: Sequence[Mapping[str, Any]]) -> str:
    """The same for a document: the figures folded away."""
    parts = [f"**{title(cell)}**\n\n{tables.markdown(cell_rows(cell))}" for cell in _cells(results)]
    return "\n\n".join(
        [
            tables.markdown(overview_rows(results)),
            f"{LEGEND}.",
            "<details><summary>Every figure of each rule</summary>",
            *parts,
            "</details>",
        ]
    )


def _cells(results: Sequence[Mapping[str, Any]]) -> list[Record]:
    return [cell for result in results for cell in result["cells"]]


def _name(cell: Mapping[str, Any]) -> str:
    rate = "" if cell["read_rate"] is None else f", {cell['read_rate']:g} tok/s"
    return f"{cell['setup']}{rate}, {cell['host_gb']:g} GB"


def _mark(row: Mapping[str, Any]) -> str:
    losses, gains = row["losses"], row["gains"]
    if not losses and not gains:
        return SAME if row["is_same"] else NOTHING
    parts = (LOSES, losses), (GAINS, gains)
    return "; ".join(f"{m} {', '.join(_change(row, k) for k in keys)}" for m, keys in parts if keys)


def _change(row: Mapping[str, Any], key: str) -> str:
    """A figure and how much it changed."""
    ratio = row["ratios"][key]
    if key == "stall_s":
        return f"{_WORDS[key]} {row['figures'][key]:,.1f} s"
    return f"{_WORDS[key]} {ratio['value'] - 1:+.0%}"


def _shown(value: float | None, digits: int, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.{digits}%}"
    return f"{value:,.{digits}f} {unit}".strip()


def _figure(row: Mapping[str, Any], key: str, _: str, digits: int, unit: str) -> str:
    text, ratio = _shown(row["figures"][key], digits, unit), row["ratios"][key]
    if key == "effective_throughput" and row["figures"]["share_stalled"] > MAX_SHARE_STALLED:
        text += " *"
    if ratio is None:
        return text
    ends = ratio["low"], ratio["high"]
    spread = "" if len(row["seeds"]) < 2 or None in ends else " [{:.3f}, {:.3f}]".format(*ends)
    return f"{text} ({ratio['value']:.3f}×{spread})"
