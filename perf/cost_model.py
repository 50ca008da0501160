"""How far the cost model is from published figures, and the fit of the embedded engine.

    python -m perf.cost_model [--json]
    python -m perf.cost_model --embedded [--seconds 45] [--json]

Without a flag: every published figure (perf/lab/published.py) beside what the model says, and the
ratio of the two, under assumptions that the output names. With --embedded: steps of the embedded
engine (SmolLM2-135M in bf16) are measured on this machine and fitted; the coefficients, what is
left over and the grid go to perf/results/embedded_costs.json, for perf/virtual_real.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.lab.embedded import EmbeddedCosts, Step, fit
from perf.lab.published import NOT_RECORDED, Row, rows

RESULTS = Path(__file__).parent / "results" / "embedded_costs.json"


def published_table(table: Sequence[Row]) -> str:
    """One line per figure, the ratio under each assumption by letter, and what was not recorded."""
    letters: dict[str, str] = {}
    figures: dict[str, list[Row]] = {}
    for row in table:
        letters.setdefault(row.assumption, chr(ord("A") + len(letters)))
        figures.setdefault(row.what, []).append(row)
    lines = [f"{'figure':<46} {'published':>20}  model / published"]
    for what, group in figures.items():
        ratios = [
            f"{letters[row.assumption]} {'-' if row.ratio is None else format(row.ratio, '.2f')}"
            for row in group
        ]
        value = f"{group[0].published:,.4g} {group[0].unit}"
        lines.append(f"{what:<46} {value:>20}  {'  '.join(ratios)}")
    lines += ["", "Asked under:", *(f"  {letter}: {text}" for text, letter in letters.items())]
    lines += ["", "Not recorded:", *(f"  - {text}" for text in NOT_RECORDED)]
    return "\n".join(lines)


def print_published(as_json: bool) -> None:
    """The comparison."""
    table = rows()
    if not as_json:
        print(published_table(table))
        return
    figures = [{**asdict(row), "ratio": row.ratio} for row in table]
    print(json.dumps({"rows": figures, "not_recorded": NOT_RECORDED}, indent=1))


def cells(steps: Sequence[Step], costs: EmbeddedCosts) -> list[dict[str, Any]]:
    """Measured median and fit by kind of step (batch, context to the next hundred, prefill)."""
    groups: dict[tuple[int, int, int], list[Step]] = {}
    for step in steps:
        context = step.num_context_tokens // step.num_gen if step.num_gen else 0
        groups.setdefault((step.num_gen, round(context, -2), step.num_prefill_tokens), []).append(
            step
        )
    return [
        {
            "num_gen": num_gen,
            "context": context,
            "num_prefill_tokens": num_prefill,
            "num_steps": len(group),
            "measured_s": statistics.median(step.seconds for step in group),
            "fitted_s": statistics.median(costs.step_s(step) for step in group),
        }
        for (num_gen, context, num_prefill), group in sorted(groups.items())
    ]


def measured(model_path: Path, seconds: float, num_threads: int) -> dict[str, Any]:
    """Measure and fit on this machine; the content of the result file."""
    from perf.lab.measure_embedded import StepBench, measure, open_runner

    bench = StepBench(open_runner(model_path, num_threads))
    steps = measure(bench, seconds)
    costs = fit(steps)
    return {
        **costs.as_json(),
        "num_steps": len(steps),
        "cells": cells(steps, costs),
        "machine": {
            "python": platform.python_version(),
            "num_cores": len(os.sched_getaffinity(0)),
            "date": time.strftime("%Y-%m-%d"),
        },
    }


def embedded_table(result: dict[str, Any]) -> str:
    """The fit for a terminal."""
    ratio = result["ratio"]
    lines = [
        f"step = {1e3 * result['step_base_s']:.1f} ms"
        f" + {1e3 * result['step_per_sequence_s']:.2f} ms per generating sequence"
        f" + {1e6 * result['step_per_context_token_s']:.2f} ms per 1,000 context tokens"
        f" + prefill at {result['prefill_tokens_per_s']:,.0f} tokens/s",
        f"observed / fitted over {result['num_steps']} steps: "
        f"P5 {ratio['p05']:.3f}, P50 {ratio['p50']:.3f}, P95 {ratio['p95']:.3f}",
        f"{'batch':>6} {'context':>8} {'prefill':>8} {'steps':>6} {'measured ms':>12} {'fit':>8}",
    ]
    lines += [
        f"{cell['num_gen']:>6} {cell['context']:>8} {cell['num_prefill_tokens']:>8}"
        f" {cell['num_steps']:>6} {1e3 * cell['measured_s']:>12.1f} {1e3 * cell['fitted_s']:>8.1f}"
        for cell in result["cells"]
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.cost_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--embedded", action="store_true", help="measure and fit this machine")
    parser.add_argument("--seconds", type=float, default=45.0, help="time of measuring (45)")
    parser.add_argument("--num-threads", type=int, default=0, help="of the model (0 = all cores)")
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder (SmolLM2)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of --embedded")
    args = parser.parse_args(argv)
    if not args.embedded:
        print_published(args.json)
        return 0
    from build_engines.fetch import default_model_path

    model_path = args.model or default_model_path()
    if not (model_path / "config.json").is_file():
        parser.error(f"no checkpoint in {model_path}: run `tokenflow model fetch` first")
    result = measured(model_path, args.seconds, args.num_threads)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if args.json else embedded_table(result))
    if not args.json:
        print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
