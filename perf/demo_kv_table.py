"""The tables of the demo of both KV tiers, for a terminal and for documents.

Owns which figures are shown, under which words, and what is asked of them. Pure. A result is what
`perf.demo_kv` writes: a summary per way of serving under its name, `names` in order, `baseline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.workloads import describe_load

MAX_TTFT_RATIO = 0.25
MIN_RAW_RATIO = 0.95
PAUSE_CAUSES = ("pause", "late_resume")

# Key of a summary, its words, digits, unit; None = no digits to round.
_ROWS: tuple[tuple[str, str, int, str], ...] = (
    ("ttft_p50_s", "newcomers: first token, P50", 2, "s"),
    ("ttft_p99_s", "newcomers: first token, P99", 2, "s"),
    ("ttft_p99_ratio", "… of the baseline's", 3, "×"),
    ("raw_throughput", "raw throughput", 1, "tok/s"),
    ("raw_ratio", "… of the baseline's", 3, "×"),
    ("effective_throughput", "effective throughput", 1, "tok/s"),
    ("stalls_over_250ms", "stalls a reader sees (> 250 ms)", 0, ""),
    ("stalls_by_pause", "… caused by a pause or a late resume", 0, ""),
    ("num_pauses", "pauses by the scheduler", 0, ""),
    ("num_internal_pauses", "pauses by the engine itself", 0, ""),
    ("num_offloaded_blocks", "blocks copied to the host", 0, ""),
    ("num_onboarded_blocks", "blocks brought back", 0, ""),
    ("num_recomputed_tokens", "tokens computed again", 0, ""),
    ("copy_wait_s", "time that steps waited for copies", 3, "s"),
    ("peak_pool_share", "pool in use, at its fullest", 2, "of 1"),
    ("peak_slots", "slots in use, at most", 0, ""),
    ("load", "ΣR/Γ", 2, ""),
)


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Words, then a cell per way of serving."""
    table = []
    for key, words, digits, unit in _ROWS:
        cells = []
        for name in result["names"]:
            value = result[name].get(key)
            cells.append("" if value is None else f"{value:,.{digits}f} {unit}".strip())
        table.append([words, *cells])
    return table


def format_table(result: Mapping[str, Any]) -> str:
    """The table for a terminal, and under it whether it is what is asked for."""
    heads = [[""], [""]]
    for name in result["names"]:
        policy, _, how = result[name]["title"].partition(": ")
        heads[0].append(policy)
        heads[1].append(how)
    table = [*heads, *rows(result)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
    return "\n".join([*lines, "", *verdicts(result)])


def markdown_table(result: Mapping[str, Any]) -> str:
    """The table for a document."""
    titles = [result[name]["title"] for name in result["names"]]
    lines = [f"| | {' | '.join(titles)} |", f"|---|{'--:|' * len(titles)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join([*lines, "", *(f"- {text}" for text in verdicts(result))])


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """What was asked of each tokenflow column against the baseline, and whether it holds."""
    lines = []
    baseline = result["baseline"]
    for name in result["names"]:
        values = result[name]
        if not name.startswith("tokenflow"):
            continue
        asked: Sequence[tuple[str, bool]] = (
            (
                f"first token P99 {values['ttft_p99_ratio']:.3f} × (at most {MAX_TTFT_RATIO})",
                values["ttft_p99_ratio"] <= MAX_TTFT_RATIO,
            ),
            (
                f"raw {values['raw_ratio']:.3f} × (at least {MIN_RAW_RATIO})",
                values["raw_ratio"] >= MIN_RAW_RATIO,
            ),
            (
                f"stalls by pauses {values['stalls_by_pause']} (0)",
                values["stalls_by_pause"] == 0,
            ),
        )
        parts = [text if holds else f"NOT REACHED: {text}" for text, holds in asked]
        lines.append(f"{values['title']}, against {result[baseline]['title']}: {', '.join(parts)}")
    first = result[result["names"][0]]
    lines.append(
        f"what is short: the pool has {first['num_blocks']} blocks, the engine "
        f"{first['max_batch_size']} slots"
    )
    fullest = max((result[name] for name in result["names"]), key=lambda v: float(v["peak_slots"]))
    if fullest["load"] is not None:
        load = describe_load(fullest["load"])
        lines.append(f"ΣR/Γ, Γ at the fullest batch that the pool allowed: {load}")
    return lines
