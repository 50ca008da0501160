"""How results are shown: tables for a terminal and for a document.

Owns order, wording and digits. Everything shown is in the summaries and goals (summary.py) that are
written as JSON; nothing is computed here but units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perf.lab.measures import MAX_SHARE_STALLED, Record
from perf.lab.summary import BASELINE
from perf.lab.timeline import Cause

_GB = 1e9
_Cell = Callable[[Mapping[str, Any]], str]


def _number(key: str, digits: int, unit: str = "", scale: float = 1.0) -> _Cell:
    def text(record: Mapping[str, Any]) -> str:
        value = record[key]
        shown = "–" if value is None else f"{value / scale:,.{digits}f}"
        interval = record.get("intervals", {}).get(key)
        if interval is not None and value is not None:
            shown += f" [{interval[0] / scale:,.{digits}f}, {interval[1] / scale:,.{digits}f}]"
        ratio = record.get("ratios", {}).get(key, {}).get("value")
        return f"{shown} {unit}".strip() + ("" if ratio is None else f" ({ratio:.3f}×)")

    return text


def _share(key: str, digits: int = 1) -> _Cell:
    return lambda record: f"{record[key]:.{digits}%}"


def _cause(cause: Cause) -> _Cell:
    def text(record: Mapping[str, Any]) -> str:
        num, seconds = record[f"num_stalls_{cause.value}"], record[f"stall_{cause.value}_s"]
        return "not traced" if num is None else f"{num:,.0f} ({seconds:,.1f} s)"

    return text


def _kinds(record: Mapping[str, Any]) -> str:
    keys = ("num_planned_pauses", "num_forced_pauses", "num_internal_pauses")
    return " / ".join(f"{record[key]:,.0f}" for key in keys)


def _moved(record: Mapping[str, Any]) -> str:
    return f"{record['offload_bytes'] / _GB:,.2f} / {record['onboard_bytes'] / _GB:,.2f} GB"


def _hidden(record: Mapping[str, Any]) -> str:
    return f"{record['hidden_copy_share']:.1%}" if record["copy_s"] else "–"


def _effective(record: Mapping[str, Any]) -> str:
    counts = record["share_stalled"] <= MAX_SHARE_STALLED
    return _number("effective_throughput", 0, "tok/s")(record) + ("" if counts else " *")


def _uses_host(record: Mapping[str, Any]) -> str:
    return "yes" if record["uses_host"] else "no"


ROWS: tuple[tuple[str, _Cell], ...] = (
    ("uses the host tier", _uses_host),
    ("first token, mean", _number("ttft_mean_s", 2, "s")),
    ("first token, P50", _number("ttft_p50_s", 2, "s")),
    ("first token, P99", _number("ttft_p99_s", 2, "s")),
    ("first token, worst", _number("ttft_worst_s", 2, "s")),
    ("requests without a token", _number("num_without_token", 0)),
    ("end to end, mean", _number("end_to_end_mean_s", 1, "s")),
    ("end to end, P99", _number("end_to_end_p99_s", 1, "s")),
    ("effective throughput", _effective),
    ("raw throughput", _number("raw_throughput", 0, "tok/s")),
    ("readers with a stall > 250 ms", _share("share_stalled")),
    ("stalls > 250 ms", _number("num_stalls", 0)),
    ("seconds of stalls", _number("stall_s", 1, "s")),
    ("longest stall", _number("stall_worst_s", 2, "s")),
    ("… while paused, no resume asked for", _cause(Cause.PAUSE)),
    ("… resumed too late", _cause(Cause.LATE_RESUME)),
    ("… paused by the engine", _cause(Cause.ENGINE_PAUSE)),
    ("… by one long step, its copies included", _cause(Cause.ENGINE_STEP)),
    ("waiting of readers, however short", _number("rebuffer_s", 1, "s")),
    ("goodput", _number("goodput", 0, "tok/s")),
    ("QoS (λ = μ = 1)", _number("qos", 0, "tok/s")),
    ("QoE, mean", _number("qoe_mean", 3)),
    ("pauses: planned / forced / engine's", _kinds),
    ("tokens recomputed", _number("num_recomputed_tokens", 0)),
    ("moved to the host / back", _moved),
    ("copies hidden behind steps", _hidden),
    ("host peak", _number("host_peak_bytes", 2, "GB", _GB)),
    ("plans", _number("num_plans", 0)),
    ("virtual seconds", _number("virtual_s", 0, "s")),
)
_WALL_ROWS: tuple[tuple[str, _Cell], ...] = (("wall seconds", _number("wall_s", 1, "s")),)
"""What depends on the machine that simulates: nothing for a document."""

_VARIANT_COLUMNS = (
    "uses the host tier",
    "first token, mean",
    "first token, P99",
    "end to end, mean",
    "effective throughput",
    "raw throughput",
    "readers with a stall > 250 ms",
    "seconds of stalls",
    "QoS (λ = μ = 1)",
    "pauses: planned / forced / engine's",
    "tokens recomputed",
    "moved to the host / back",
)

_NOTE = "* counts only where no more than 1 % of the readers stall"


def title(cell: Mapping[str, Record]) -> str:
    """Which set-up; of the summaries of one cell."""
    first = next(iter(cell.values()))
    own = first["read_rate"] is None
    rate = "rates of their own" if own else f"{first['read_rate']:g} tok/s"
    return (
        f"{first['setup']}: {first['num_requests']:.0f} requests, readers of {rate}, "
        f"host {first['host_gb']:g} GB, {_seeds(first['seeds'])}"
    )


def load_line(cell: Mapping[str, Record]) -> str:
    """What the set-up asks of its engine; of the summaries of one cell."""
    first = next(iter(cell.values()))
    verdict = "schedulable" if first["is_schedulable"] else "not schedulable"
    raw = first["raw_bound"]
    most = "" if raw is None else f" No schedule can make more than {raw:,.0f} tok/s of it."
    return (
        f"ΣR/Γ = {first['load']:.2f} ({verdict}). Prefill alone would bring the first token after "
        f"{first['ttft_bound_mean_s']:.2f} s in the mean, {first['ttft_bound_p99_s']:.2f} s at P99."
        f"{most}"
    )


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"{len(seeds)} seeds, means [95 % intervals]"


def rows(cell: Mapping[str, Record], *, with_wall: bool = True) -> list[list[str]]:
    """Header and rows as text, a column for each policy; throughputs of a policy for several
    machines are per machine. with_wall: also the seconds of the machine that simulates."""
    columns = list(cell.values())
    shown = ROWS + _WALL_ROWS if with_wall else ROWS
    header = [n if r["num_machines"] == 1 else f"{n} (per machine)" for n, r in cell.items()]
    table = [["", *header]]
    table += [[words, *(text(record) for record in columns)] for words, text in shown]
    return table


def variant_rows(cell: Mapping[str, Record]) -> list[list[str]]:
    """Header and rows as text, a row for each policy or variant, with the main figures."""
    table = [["", *_VARIANT_COLUMNS]]
    table += [[n, *figures(record, *_VARIANT_COLUMNS)] for n, record in cell.items()]
    return table


def figures(record: Mapping[str, Any], *names: str) -> list[str]:
    """What the rows of these names say of one policy."""
    texts = dict(ROWS)
    return [texts[name](record) for name in names]


def format_table(table: Sequence[Sequence[str]]) -> str:
    """Text in columns, for a terminal; the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The same for a document."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    lines.insert(1, "|---|" + "--:|" * (len(table[0]) - 1))
    return "\n".join(lines)


def goal_rows(goals: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and rows: which goal, reached, limit, met."""
    table = [["goal", "policy", "reached", "limit", ""]]
    for goal in goals:
        sign = "≥" if goal["at_least"] else "≤"
        verdict = "met" if goal["met"] else "missed"
        if not goal["counts"]:
            verdict = "does not count: readers stall"
        value = "–" if goal["value"] is None else f"{goal['value']:,.2f}"
        table.append([goal["goal"], goal["policy"], value, f"{sign} {goal['limit']:,.2f}", verdict])
    return table


def pair_rows(cell: Mapping[str, Record]) -> list[list[str]]:
    """Where the load is not schedulable: P99 of the first token and stalls, as a pair."""
    table = [["policy", "first token, P99", "readers with a stall", "seconds of stalls"]]
    for name, record in cell.items():
        cells = _number("ttft_p99_s", 2, "s"), _share("share_stalled"), _number("stall_s", 1, "s")
        table.append([name, *(cell_text(record) for cell_text in cells)])
    return table


def terminal(cell: Mapping[str, Record], goals: Sequence[Mapping[str, Any]]) -> str:
    """Everything about one set-up, for a terminal."""
    parts = [f"{title(cell)}\n{load_line(cell)}", format_table(rows(cell))]
    if any(record["share_stalled"] > MAX_SHARE_STALLED for record in cell.values()):
        parts.append(_NOTE)
    if goals:
        parts.append(format_table(goal_rows(goals)))
    elif BASELINE in cell and not next(iter(cell.values()))["is_schedulable"]:
        parts.append("no goals but the pair:\n" + format_table(pair_rows(cell)))
    return "\n\n".join(parts)


def document(cell: Mapping[str, Record], goals: Sequence[Mapping[str, Any]]) -> str:
    """The main figures and the goals, for a document."""
    parts = [f"**{title(cell)}.** {load_line(cell)}", markdown(variant_rows(cell))]
    if any(record["share_stalled"] > MAX_SHARE_STALLED for record in cell.values()):
        parts.append(f"\\{_NOTE}")
    if goals:
        parts.append(markdown(goal_rows(goals)))
    return "\n\n".join(parts)


def overview_rows(
    cells: Sequence[tuple[Mapping[str, Record], Sequence[Mapping[str, Any]]]],
    ours: str = "tokenflow",
) -> list[list[str]]:
    """Header and rows: `ours` on each set-up that it was run on, with its ratios to the baseline
    and the goals that it meets."""
    names = (
        "first token, mean",
        "first token, P99",
        "end to end, mean",
        "effective throughput",
        "raw throughput",
        "readers with a stall > 250 ms",
    )
    about = ("set-up", "tok/s", "host, GB", "ΣR/Γ", "prefill bound, P99", "raw bound")
    table = [[*about, *names, "goals met"]]
    for cell, goals in cells:
        if ours not in cell:
            continue
        record = cell[ours]
        checked = [goal for goal in goals if goal["policy"] == ours]
        met = f"{sum(goal['met'] for goal in checked)} of {len(checked)}" if checked else "–"
        rate = "own" if record["read_rate"] is None else f"{record['read_rate']:g}"
        head = [record["setup"], rate, f"{record['host_gb']:g}", f"{record['load']:.2f}"]
        raw = "–" if record["raw_bound"] is None else f"{record['raw_bound']:,.0f} tok/s"
        head += [f"{record['ttft_bound_p99_s']:.2f} s", raw]
        table.append([*head, *figures(record, *names), met])
    return table


def ablation_rows(cell: Mapping[str, Record], paper: Mapping[str, float]) -> list[list[str]]:
    """Header and rows: seconds to completion of each policy and how much longer than the first one;
    the same of the paper where it has a row of that name; and what it does to readers."""
    first = next(iter(cell))
    names = ("first token, P99", "effective throughput", "readers with a stall > 250 ms")
    table = [["", "completion", "", "the paper's", "", *names]]
    for name, record in cell.items():
        seconds = record["virtual_s"]
        row = [name, f"{seconds:.2f} s", _longer(seconds, cell[first]["virtual_s"])]
        known, base = paper.get(name), paper.get(first)
        shown = "–" if known is None else f"{known:.2f} s"
        row += [shown, "" if known is None or base is None else _longer(known, base)]
        table.append([*row, *figures(record, *names)])
    return table


def _longer(seconds: float, first: float) -> str:
    return "" if seconds == first else f"{seconds / first - 1:+.1%}"
