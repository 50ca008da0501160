"""The results of `perf.kv_tiers` as tables, for a terminal and for documents, and beside the goals.

Owns wording and rounding. Pure, and without torch: documents are made from the results file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_MB, _GB = 1e6, 1e9

_BANDWIDTH_GOAL = 0.8
_STEP_GOALS = {"cpu": 1.15, "cuda": 1.05}
_RESUME_GOALS = (
    ("resume from host beyond its copies, decode steps", "host", "extra_steps", 1.5),
    ("the same with both tiers full", "host_full", "extra_steps", 1.5),
    ("resume after a prefetch, decode steps in all", "prefetched", "steps", 1.2),
)
"""Name, way, figure of it, at most."""


@dataclass(frozen=True, slots=True)
class Table:
    """title: one line. rows: as wide as header; the first column is left-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """For a terminal."""
        lines = (self.header, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        shown = [self.title]
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            shown.append("  " + "  ".join(cells))
        return "\n".join(shown)

    def markdown(self) -> str:
        """For a document."""
        lines = [self.title, "", f"| {' | '.join(self.header)} |"]
        lines.append("|---|" + "--:|" * (len(self.header) - 1))
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The tables of the sections that the result has."""
    makers: dict[str, Callable[[Any], Table]] = {
        "content": _content_table,
        "resumes": _resume_table,
        "bandwidth": _bandwidth_table,
        "steps": _step_table,
        "ablation": _ablation_table,
    }
    made = [make(result[name]) for name, make in makers.items() if name in result]
    if result["goals"]:
        made.append(_goal_table(result["goals"]))
    return made


def text(result: Mapping[str, Any]) -> str:
    """Everything, for a terminal."""
    parts = [_environment(result["environment"]), *(table.text() for table in tables(result))]
    if "ablation" in result:
        parts.append(_ablation_note(result["ablation"]))
    return "\n\n".join(parts)


def markdown(result: Mapping[str, Any]) -> str:
    """Everything, for a document."""
    parts = [_environment(result["environment"]), *(table.markdown() for table in tables(result))]
    if "ablation" in result:
        parts.append(_ablation_note(result["ablation"]))
    return "\n\n".join(parts)


def goals(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the result is measured by: name, value, goal, whether it is met (of sections it has).

    value: the median over contexts or directions, which is what the goal is for; worst: of them.
    """
    kind = "cuda" if result["environment"]["device"].startswith("cuda") else "cpu"
    made = []
    if "resumes" in result:
        rows = result["resumes"]
        made += [
            _goal(name, [row[way][figure] for row in rows], at_most=limit)
            for name, way, figure, limit in _RESUME_GOALS
        ]
    if "bandwidth" in result:
        ratios = [row["ratio"] for row in result["bandwidth"]]
        made.append(_goal("bandwidth of copies, of a plain copy", ratios, at_least=_BANDWIDTH_GOAL))
    if "steps" in result:
        ratios = [result["steps"]["ratio"]]
        made.append(
            _goal("decode step while copies run, of one without", ratios, at_most=_STEP_GOALS[kind])
        )
    return made


def _goal(
    name: str,
    values: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> dict[str, Any]:
    """Exactly one of the limits is given."""
    value = median(values)
    if at_most is not None:
        worst, goal, is_met = max(values), f"<= {at_most}", value <= at_most
    else:
        assert at_least is not None
        worst, goal, is_met = min(values), f">= {at_least}", value >= at_least
    return {"name": name, "value": value, "worst": worst, "goal": goal, "is_met": is_met}


def _environment(values: Mapping[str, Any]) -> str:
    return (
        f"{values['model']}, {values['dtype']}, on {values['device_name']}"
        f" ({values['device']}, {values['num_threads']} threads on {values['num_cores']} cores);"
        f" blocks of {values['tokens_per_block']} tokens, {values['block_bytes'] / _MB:.3g} MB;"
        f" torch {values['torch']}, transformers {values['transformers']},"
        f" Python {values['python']}; {values['date'][:10]}"
    )


def _content_table(row: Mapping[str, Any]) -> Table:
    return Table(
        "Copies looked at byte by byte, in both directions beside steps that write",
        ("transfers", "blocks", "bytes", "wrong"),
        ((f"{row['num_transfers']}", f"{row['num_blocks']:,}", f"{row['num_bytes']:,}", "none"),),
    )


def _resume_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = []
    for row in rows:
        device, host, full = row["device"], row["host"], row["host_full"]
        fetched, computed = row["prefetched"], row["recompute"]
        ways = (device, host, full, fetched, computed)
        shown.append(
            (
                f"{row['context']:,}",
                f"{row['decode_s'] * 1e3:.1f} ms",
                f"{device['seconds'] * 1e3:.1f} ms ({device['steps']:.2f})",
                _copying(host),
                _copying(full),
                f"{fetched['seconds'] * 1e3:.1f} ms ({fetched['steps']:.2f})",
                f"{computed['seconds'] * 1e3:,.0f} ms ({computed['steps']:.1f})",
                " / ".join(f"{way['num_tokens']:,}" for way in ways),
            )
        )
    batch = rows[0]["batch"] if rows else 0
    return Table(
        f"Resume to the next token, in a batch of {batch} (in decode steps of that batch; from"
        " host: without the copies' time)",
        (
            "context",
            "decode step",
            "from device",
            "from host",
            "both tiers full",
            "after a prefetch",
            "by recompute",
            "tokens computed",
        ),
        tuple(shown),
    )


def _copying(way: Mapping[str, Any]) -> str:
    return (
        f"{way['seconds'] * 1e3:.1f} ms, {way['copy_s'] * 1e3:.1f} copying"
        f" ({way['extra_steps']:.2f})"
    )


def _bandwidth_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [
        (
            row["direction"],
            f"{row['num_bytes'] / _MB:.0f} MB",
            f"{row['bytes_per_s'] / _GB:.2f} GB/s",
            f"{row['plain_bytes_per_s'] / _GB:.2f} GB/s",
            f"{row['ratio']:.2f} ({row['ratio_quartiles'][0]:.2f}"
            f" to {row['ratio_quartiles'][1]:.2f})",
        )
        for row in rows
    ]
    return Table(
        "Copies of scattered blocks beside one plain copy of as many bytes",
        ("direction", "a transfer", "copies", "plain copy", "ratio (quartiles)"),
        tuple(shown),
    )


def _step_table(row: Mapping[str, Any]) -> Table:
    quartiles = row["ratio_quartiles"]
    return Table(
        "Decode step while copies run all the time",
        ("batch", "context", "with copies", "without", "ratio (quartiles)", "copied meanwhile"),
        (
            (
                f"{row['batch']}",
                f"{row['context']:,}",
                f"{row['with_copies_s'] * 1e3:.1f} ms",
                f"{row['without_s'] * 1e3:.1f} ms",
                f"{row['ratio']:.3f} ({quartiles[0]:.3f} to {quartiles[1]:.3f})",
                f"{row['copied_bytes_per_s'] / _GB:.2f} GB/s",
            ),
        ),
    )


def _ablation_table(result: Mapping[str, Any]) -> Table:
    shown = []
    for row in result["rows"]:
        low, middle, high = row["completion_s"]
        ratio = row["ratio"]
        paper = ""
        if row["paper_s"] is not None:
            paper = f"{row['paper_s']:.1f} s ({row['paper_ratio']:.2f})"
        shown.append(
            (
                row["variant"],
                f"{middle:.2f} s [{low:.2f}, {high:.2f}]",
                f"{ratio[1]:.2f} [{ratio[0]:.2f}, {ratio[2]:.2f}]",
                paper,
                f"{row['ttft_p50_s']:.2f} / {row['ttft_p99_s']:.2f} s",
                f"{row['num_stalls']:.1f}",
                f"{row['num_pauses']:.1f} + {row['num_forced_pauses']:.1f}",
                f"{row['num_recomputed_tokens']:,.0f}",
                f"{row['num_offloaded_blocks']:.0f} / {row['num_onboarded_blocks']:.0f}",
                f"{row['copy_s'] * 1e3:.0f} / {row['copy_wait_s'] * 1e3:.0f} ms",
            )
        )
    return Table(
        "A burst for which the KV pool is too small, with parts left out",
        (
            "variant",
            "completion",
            "of full",
            "the paper's Table 2",
            "first token P50 / P99",
            "stalls",
            "pauses + forced",
            "recomputed tokens",
            "blocks out / back",
            "copies / waited for",
        ),
        tuple(shown),
    )


def _ablation_note(result: Mapping[str, Any]) -> str:
    rows, work = result["rows"], result["workload"]
    num_runs = min(row["num_runs"] for row in rows)
    fill = max(row["peak_pool_fill"] for row in rows)
    running = max(row["peak_num_running"] for row in rows)
    prompt, output = work["num_prompt_tokens"], work["num_output_tokens"]
    full = rows[0]
    copy_share = full["copy_s"] / full["completion_s"][1]
    cover = left_out = ""
    if result["num_rounds_left_out"]:
        left_out = f" For want of time {result['num_rounds_left_out']} rounds were left out."
    if num_runs > 1:
        cover = f", which covers the true median with {1 - 2.0 ** (1 - num_runs):.0%} or more"
    return (
        f"Burst: {work['num_streams']} streams within {work['spread_s']:g} s, prompts of"
        f" {prompt[0]} to {prompt[1]} tokens, answers of {output[0]} to {output[1]}, readers of"
        f" {work['read_rate']:g} tokens/s; {work['num_device_blocks']} blocks on the device,"
        f" {work['num_host_blocks']} on the host. At its fullest the pool was filled to"
        f" {fill:.0%}, with {running} of {work['max_batch_size']} slots in use. Completion: median"
        f" [lowest, highest] of {num_runs} interleaved runs{cover}; ratios by rounds; counts are"
        f" means per run, the first token's P99 is the worst.{left_out} In {full['variant']!r}"
        f" copies take {copy_share:.1%} of the time, and leaving out what hides them can hardly"
        " change more than that. The paper's figures are those of another machine and workload:"
        " only the shape compares."
    )


def _goal_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [
        (
            row["name"],
            f"{row['value']:.2f}",
            f"{row['worst']:.2f}",
            row["goal"],
            "met" if row["is_met"] else "missed",
        )
        for row in rows
    ]
    return Table(
        "Goals (medians of repeats; over contexts and directions the median counts)",
        ("what", "median", "worst", "goal", ""),
        tuple(shown),
    )
