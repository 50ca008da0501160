"""From the records of runs to one summary for each policy on each set-up, and its goals.

Owns what is averaged and what it is compared with. A figure over several seeds is the mean of the
runs' figures (a P99 too: the mean of the seeds' P99s), with a bootstrap interval; a ratio to the
baseline is paired by seed. Pure; same records, same summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perf.lab import bootstrap
from perf.lab.measures import MAX_SHARE_STALLED, Record, known

BASELINE = "fcfs-reserve"
OURS = ("tokenflow", "tokenflow-tiering")
"""The policies that the goals are for."""

COMPARED = (
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "end_to_end_mean_s",
    "effective_throughput",
    "raw_throughput",
    "goodput",
    "qos",
    "qoe_mean",
)
"""Keys that get a ratio to the baseline."""

WITH_INTERVAL = (*COMPARED, "share_stalled", "num_stalls", "stall_s", "num_pauses")
CELL_KEYS = ("setup", "arrivals", "read_rate", "host_gb")
"""What makes a set-up with its settings; runs of the same are averaged and compared."""


def summarise(records: Sequence[Mapping[str, Any]], baseline: str = BASELINE) -> list[Record]:
    """One summary for each (set-up, policy), in order of first appearance.

    Numbers become means over the seeds; None in one of them makes None. Added are `seeds`,
    `intervals` {key: [low, high]} (with two seeds or more) and `ratios` {key: {value, low, high}}
    to `baseline` (where its runs are there, with the same seeds).
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault((*cell_of(record), record["policy"]), []).append(record)
    summaries = []
    for key, runs in cells.items():
        summary = _means(runs)
        by_seed = {run["seed"]: run for run in cells.get((*key[:-1], baseline), [])}
        if key[-1] != baseline and all(run["seed"] in by_seed for run in runs):
            summary["ratios"] = _ratios(runs, [by_seed[run["seed"]] for run in runs])
        summaries.append(summary)
    return summaries


def cell_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What runs must share to be compared."""
    return tuple(record.get(key) for key in CELL_KEYS)


def by_cell(summaries: Iterable[Record]) -> list[dict[str, Record]]:
    """The summaries of each set-up, by policy."""
    cells: dict[tuple[Any, ...], dict[str, Record]] = {}
    for summary in summaries:
        cells.setdefault(cell_of(summary), {})[summary["policy"]] = summary
    return list(cells.values())


def goals(cell: Mapping[str, Record]) -> list[Record]:
    """What each of OURS in `cell` should reach and reached; empty where the load is not
    schedulable, or nobody to be compared with was run.

    Each: policy, goal, value, limit, `met`, and `counts`: False for an effective throughput beside
    which more than 1 % of the readers stalled.
    """
    found = []
    for name in OURS:
        if name in cell and cell[name]["is_schedulable"]:
            found += _goals_of(cell[name], cell)
    return found


def _goals_of(ours: Record, cell: Mapping[str, Record]) -> list[Record]:
    few_stalls = ours["share_stalled"] <= MAX_SHARE_STALLED
    rows: list[Record] = []
    cell = {name: record for name, record in cell.items() if record["ttft_p99_s"] is not None}
    if ours["ttft_p99_s"] is None:
        return rows  # nobody got a token

    def goal(
        words: str, value: float, limit: float, *, at_least: bool, counts: bool = True
    ) -> None:
        met = (value >= limit if at_least else value <= limit) and counts
        rows.append(
            {
                "policy": ours["policy"],
                "goal": words,
                "value": value,
                "limit": limit,
                "at_least": at_least,
                "counts": counts,
                "met": met,
            }
        )

    for name in (BASELINE, "sglang-like"):
        if name in cell:
            bound = 1.3 * ours["ttft_bound_p99_s"]
            limit = max(0.15 * cell[name]["ttft_p99_s"], bound)
            words = f"P99 of the first token, s: max(0.15 x {name}, 1.3 x prefill bound)"
            goal(words, ours["ttft_p99_s"], limit, at_least=False)
            mean = 0.45 * cell[name]["ttft_mean_s"]
            words = f"mean of the first token, s: 0.45 x {name}"
            goal(words, ours["ttft_mean_s"], mean, at_least=False)
    for name, factor in _effective_factors(ours).items():
        if name in cell:
            words = f"effective throughput, tok/s: {factor} x {name}, stalled readers <= 1 %"
            limit = factor * cell[name]["effective_throughput"]
            goal(words, ours["effective_throughput"], limit, at_least=True, counts=few_stalls)
    baselines = [cell[n]["raw_throughput"] for n in (BASELINE, "fcfs-max-utilization") if n in cell]
    if baselines and ours["host_gb"]:
        words = "raw throughput with a host tier, tok/s: 0.99 x the better baseline"
        goal(words, ours["raw_throughput"], 0.99 * max(baselines), at_least=True)
    if BASELINE in cell:
        limit = 1.2 * cell[BASELINE]["end_to_end_mean_s"]
        words = f"end to end, mean, s: 1.2 x {BASELINE}"
        goal(words, ours["end_to_end_mean_s"], limit, at_least=False)
    return rows


def _effective_factors(ours: Record) -> dict[str, float]:
    factors = {
        "burst": {BASELINE: 1.6, "fcfs-max-utilization": 1.4},
        "poisson": {BASELINE: 1.9},
    }
    return factors.get(ours["arrivals"], {})


def _means(runs: Sequence[Mapping[str, Any]]) -> Record:
    summary: Record = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if key == "seed":
            summary["seeds"] = values
        elif isinstance(first, str) or key in CELL_KEYS:
            summary[key] = first
        elif isinstance(first, bool):
            summary[key] = all(values)
        else:
            summary[key] = None if None in values else sum(values) / len(values)
    if len(runs) > 1:
        summary["intervals"] = {
            key: _ends(bootstrap.interval([run[key] for run in runs]))
            for key in WITH_INTERVAL
            if summary[key] is not None
        }
    return summary


def _ends(found: bootstrap.Interval) -> list[float]:
    return [found.low, found.high]


def _ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> Record:
    ratios: Record = {}
    for key in COMPARED:
        values = [[run[key] for run in runs] for runs in (ours, theirs)]
        if None not in values[0] + values[1]:
            found = bootstrap.paired_ratio(values[0], values[1])
            ratios[key] = {
                "value": known(found.value),
                "low": known(found.low),
                "high": known(found.high),
            }
    return ratios
