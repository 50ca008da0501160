"""What a rule is worth: the default policy against the same without the rule, seed by seed.

Owns the verdict. A variant loses where a figure is worse than the default's by more than
`MIN_CHANGE`, the whole interval over the seeds on that side, and gains where it is better by as
much; with one seed nothing is known of its spread, and the figure alone decides. Differences of a
latency under `MIN_LATENCY_S` count for nothing. Stalls are lost where they appear or grow. Beside
more than 1 % of stalled readers no effective throughput is gained. Pure; same records, same
outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.lab import bootstrap, summary
from perf.lab.measures import MAX_SHARE_STALLED, Record, known
from perf.lab.rules import Variant

MIN_CHANGE = 0.02
MIN_LATENCY_S = 0.02

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured key. better: -1 where less is better, 1 where more is, 0 where it only tells."""

    key: str
    words: str
    better: int


FIGURES = (
    Figure("ttft_p99_s", "P99", -1),
    Figure("ttft_mean_s", "mean", -1),
    Figure("effective_throughput", "effective", 1),
    Figure("raw_throughput", "raw", 1),
    Figure("end_to_end_mean_s", "end to end", -1),
    Figure("urgent_ttft_mean_s", "urgent mean", -1),
    Figure("machine_end_to_end_mean_s", "machines", -1),
    Figure("share_stalled", "stalled", 0),
    Figure("stall_s", "stalls", -1),
    Figure("num_pauses", "pauses", 0),
    Figure("num_forced_pauses", "forced", 0),
    Figure("num_recomputed_tokens", "recomputed", 0),
)
_ABOUT = (*summary.CELL_KEYS, "num_requests", "load", "is_schedulable")


def outcomes(records: Runs, variants: Sequence[Variant]) -> Record:
    """{"cells": [...]}, one for each set-up in order of first appearance: what it is, its `seeds`,
    the figures of the policies as they are (`defaults`), and a row for each variant that was run
    there: see `_row`. Records of anything else are left out; so are those of a variant without
    its default."""
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault(summary.cell_of(record), []).append(record)
    return {"cells": [_cell(runs, variants) for runs in cells.values()]}


def _cell(runs: Runs, variants: Sequence[Variant]) -> Record:
    by_policy: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], {})[run["seed"]] = run
    defaults = [policy for policy in by_policy if policy in {v.policy for v in variants}]
    rows = []
    for variant in variants:
        ours, theirs = by_policy.get(variant.label, {}), by_policy.get(variant.policy, {})
        seeds = [seed for seed in ours if seed in theirs]
        if seeds:
            pairs = [ours[s] for s in seeds], [theirs[s] for s in seeds]
            rows.append({**_named(variant), "seeds": seeds, **_row(*pairs)})
    return {
        **{key: _mean(runs, key) for key in _ABOUT},
        "seeds": sorted({run["seed"] for run in runs}),
        "defaults": {
            policy: {f.key: _mean(list(by_policy[policy].values()), f.key) for f in FIGURES}
            for policy in defaults
        },
        "rows": rows,
    }


def _named(variant: Variant) -> Record:
    named = dataclasses.asdict(variant)
    del named["changes"], named["own"]
    return {**named, "label": variant.label}


def _row(ours: Runs, theirs: Runs) -> Record:
    """figures: means over the seeds. ratios: of each to the default's its value, low and high, or
    None where there is none. losses, gains: keys. is_same: no figure of any seed differs."""
    ratios = {f.key: _ratio(ours, theirs, f.key) for f in FIGURES}
    verdicts = {f.key: _verdict(f, ratios[f.key], ours, theirs) for f in FIGURES}
    return {
        "figures": {f.key: _mean(ours, f.key) for f in FIGURES},
        "ratios": ratios,
        "losses": [key for key, verdict in verdicts.items() if verdict < 0],
        "gains": [key for key, verdict in verdicts.items() if verdict > 0],
        "is_same": all(
            a[f.key] == b[f.key] for a, b in zip(ours, theirs, strict=True) for f in FIGURES
        ),
    }


def _verdict(figure: Figure, ratio: Record | None, ours: Runs, theirs: Runs) -> int:
    """-1: the variant is worse by it; 1: better; 0: neither."""
    value, default = _mean(ours, figure.key), _mean(theirs, figure.key)
    if not figure.better or value is None or default is None:
        return 0
    if figure.key.endswith("_s") and abs(value - default) < MIN_LATENCY_S:
        return 0
    if ratio is None:
        return figure.better if value > default else 0  # from nothing
    low, high = ratio["low"], ratio["high"]
    more = ratio["value"] > 1 + MIN_CHANGE and (low is None or low > 1)
    less = ratio["value"] < 1 - MIN_CHANGE and (high is None or high < 1)
    verdict = figure.better * (more - less)
    if figure.key == "effective_throughput" and verdict > 0:
        few_stalls = (_mean(ours, "share_stalled") or 0.0) <= MAX_SHARE_STALLED
        return verdict if few_stalls else 0
    return verdict


def _ratio(ours: Runs, theirs: Runs, key: str) -> Record | None:
    values = [[run[key] for run in runs] for runs in (ours, theirs)]
    if None in values[0] + values[1]:
        return None
    found = bootstrap.paired_ratio(values[0], values[1])
    if known(found.value) is None:
        return None
    return {"value": found.value, "low": known(found.low), "high": known(found.high)}


def _mean(runs: Runs, key: str) -> Any:
    """Mean of numbers; what all runs of a set-up share, as it is; None where one has none."""
    values = [run[key] for run in runs]
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], str) or key in summary.CELL_KEYS:
        return values[0]
    return None if None in values else sum(values) / len(values)
