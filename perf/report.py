"""Tables from results, for the terminal, README.md and docs.

`python -m perf.report --update` rewrites the parts of README.md, docs/benchmarks.md and
docs/operations.md that lie between `<!-- generated: NAME -->` and `<!-- end -->`; `--check` ends
with 1 when one of them is not current. Owns the order and wording of the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf import demo_kv_table
from perf.kv.tables import markdown as kv_tiers_tables
from perf.lab import assumptions, documents, rule_tables
from tokenflow.config import ServingConfig, format_parameters
from tokenflow.preemption import UNPAUSABLE_KINDS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results"
DOCUMENTS = ("README.md", "docs/benchmarks.md", "docs/operations.md")
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# key, what a person reads, digits, unit
_ROWS = (
    ("ttft_p50_s", "burst: first token, P50", 2, "s"),
    ("ttft_p99_s", "burst: first token, P99", 2, "s"),
    ("ttft_worst_s", "burst: first token, worst", 2, "s"),
    ("stalls_over_250ms", "stalls a reader sees (> 250 ms)", 0, ""),
    ("effective_throughput", "effective throughput", 1, "tok/s"),
    ("raw_throughput", "raw throughput", 1, "tok/s"),
    ("end_to_end_p50_s", "end to end, P50", 1, "s"),
    ("end_to_end_p99_s", "end to end, P99", 1, "s"),
    ("num_pauses", "pauses", 0, ""),
)
_COLUMNS = ("fcfs", "tokenflow")


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, fcfs, tokenflow, ratio) as text, for the keys that the result has."""
    fcfs, tokenflow = result["fcfs"], result["tokenflow"]
    table = []
    for key, words, digits, unit in _ROWS:
        if key not in fcfs:
            continue
        ratio = result["ratio"].get(key)
        shown = [f"{values[key]:.{digits}f} {unit}".strip() for values in (fcfs, tokenflow)]
        table.append((words, shown[0], shown[1], "" if ratio is None else f"{ratio:.3f}"))
        if key == "stalls_over_250ms" and "stalls_by_cause" in fcfs:
            causes = [_causes(values["stalls_by_cause"]) for values in (fcfs, tokenflow)]
            table.append(("… and what caused them", causes[0], causes[1], ""))
    return table


def format_table(result: Mapping[str, Any]) -> str:
    """The table for a terminal."""
    table = [("", *_COLUMNS, "ratio"), *rows(result)]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))])
        for row in table
    )


def markdown_table(result: Mapping[str, Any]) -> str:
    """The table for a document."""
    lines = ["| | first come, first served | tokenflow | ratio |", "|---|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join(lines)


def runs_table(result: Mapping[str, Any]) -> str:
    """One row per run, for a document."""
    lines = [
        "| policy | first token P50 / worst | raw | effective | stalls | pauses | ΣR/Γ |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        load = "" if run["load"] is None else f"{run['load']:.2f}"
        lines.append(
            f"| {run['policy']} | {run['ttft_p50_s']:.2f} / {run['ttft_worst_s']:.2f} s "
            f"| {run['raw_throughput']:.1f} tok/s | {run['effective_throughput']:.1f} tok/s "
            f"| {run['stalls_over_250ms']} | {run['num_pauses']} | {load} |"
        )
    return "\n".join(lines)


def lease_table(result: Mapping[str, Any]) -> str:
    """Leases beside cancels, for a document."""
    lines = [
        "| case | mode | recomputed tokens | lost steps | tok/s | first token P50 / P99 | stalls "
        "| blocks held / used | pauses |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['case']} | {row['mode']} | {row['num_recomputed_tokens']:,} "
            f"| {row['num_lost_steps']} | {row['throughput']:.1f} "
            f"| {row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.2f} s | {row['share_stalled']:.1%} "
            f"| {row['held_per_used_block']:.2f} | {row['num_pauses']} |"
        )
    return "\n".join(lines)


_SOAK_ROWS = 10
_MB = 1e6


def soak_table(result: Mapping[str, Any]) -> str:
    """What the long run kept, for a document: about ten of its idle moments."""
    lines = [
        "| requests | server / model / engine process, MB | threads | descriptors | /dev/shm, MB "
        "| sessions, holds, blocks |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    samples = result["samples"]
    for s in samples[:: max(1, len(samples) // _SOAK_ROWS)]:
        sizes = [s[f"{name}_rss"] / _MB for name in ("server", "stub", "engine")]
        lines.append(
            f"| {s['num_requests']:,} | {' / '.join(f'{size:.1f}' for size in sizes)} "
            f"| {s['stub_threads']} + {s['engine_threads']} | {s['stub_fds']} + {s['engine_fds']} "
            f"| {s['shm_bytes'] / _MB:.1f} "
            f"| {s['num_active']:.0f}, {s['num_held']:.0f}, {s['num_used_blocks']:.0f} |"
        )
    return "\n".join(lines)


def _causes(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {num}" for cause, num in causes.items() if num) or "none"


def parameter_table() -> str:
    """Every field of ServingConfig, for a document: name, default, allowed values, meaning."""
    defaults = format_parameters(ServingConfig())
    lines = ["| parameter | default | allowed | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(ServingConfig):
        default = f"`{defaults[field.name]}`" if defaults[field.name] else "empty"
        lines.append(
            f"| `{field.name}` | {default} | {_allowed(field)} | {field.metadata['help']} |"
        )
    return "\n".join(lines)


def unpausable_table() -> str:
    """Kinds of requests that are never paused, and why, for a document."""
    lines = ["| kind | why |", "|---|---|"]
    lines += [f"| {kind.name} | {kind.why} |" for kind in UNPAUSABLE_KINDS]
    return "\n".join(lines)


def _allowed(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata["choices"] or (
        ("true", "false") if isinstance(field.default, bool) else ()
    )
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    low, high = field.metadata["low"], field.metadata["high"]
    return "text" if low is None else f"{low} to {high}"


def _of_results(name: str, render: Callable[[Mapping[str, Any]], str]) -> Callable[[Path], str]:
    def text(results: Path) -> str:
        path = results / f"{name}.json"
        if not path.exists():
            return f"No results yet: run `make {name.replace('_', '-')}`, then `make docs`."
        return render(documents.read(path))

    return text


def _of_lab(
    pattern: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    command: str = "make lab",
) -> Callable[[Path], str]:
    def text(results: Path) -> str:
        found = documents.load(results, pattern)
        return render(found) if found else f"No results yet: run `{command}`, then `make docs`."

    return text


# Name of a block -> its text, from the folder of the results.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "demo": _of_results("demo", markdown_table),
    "demo_runs": _of_results("demo", runs_table),
    "demo_kv": _of_results("demo_kv", demo_kv_table.markdown_table),
    "burst_pa": _of_results("burst_pa", markdown_table),
    "soak": _of_results("soak", soak_table),
    "lease": _of_results("lease", lease_table),
    "kv_tiers": _of_results("kv_tiers", kv_tiers_tables),
    "simulate_main": _of_lab("simulate.json", documents.overview),
    "simulate_overview": _of_lab("simulate*.json", documents.overview),
    "simulate": _of_lab("simulate.json", documents.main_figures),
    "simulate_all_figures": _of_lab("simulate.json", documents.all_figures),
    "ablation": _of_lab("ablation*.json", documents.ablation),
    "virtual_real": _of_lab(
        "virtual_real.json", documents.virtual_real, "python -m perf.virtual_real"
    ),
    "sweeps": _of_lab("sweep_*.json", documents.sweeps),
    "assumptions": _of_lab("assumptions*.json", assumptions.document),
    "rules": _of_lab("rules*.json", rule_tables.document, "make rules"),
    "parameters": lambda results: parameter_table(),
    "unpausable": lambda results: unpausable_table(),
}


def regenerate(
    text: str, *, results: Path = RESULTS, names: Collection[str] = tuple(BLOCKS)
) -> str:
    """`text` with the generated blocks of these names written anew.

    Raises KeyError for a block that nothing generates.
    """

    def block(match: re.Match[str]) -> str:
        make = BLOCKS[match.group(2)]
        if match.group(2) not in names:
            return match.group(0)
        return f"{match.group(1)}{make(results)}\n{match.group(4)}"

    return _BLOCK.sub(block, text)


def stale_documents(
    *, results: Path = RESULTS, names: Collection[str] = tuple(BLOCKS)
) -> list[Path]:
    """Documents in which a generated block of these names is not current."""

    def stale(text: str) -> bool:
        return regenerate(text, results=results, names=names) != text

    return [path for path in (ROOT / name for name in DOCUMENTS) if stale(path.read_text())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.report", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--update", action="store_true", help="rewrite what is not current")
    mode.add_argument("--check", action="store_true", help="only say what is not current")
    parsed = parser.parse_args(arguments)
    try:
        stale = stale_documents()
    except ValueError as error:
        parser.error(str(error))
    for path in stale:
        print(f"{'updated' if parsed.update else 'not current'}: {path.relative_to(ROOT)}")
        if parsed.update:
            path.write_text(regenerate(path.read_text()))
    return 1 if parsed.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
