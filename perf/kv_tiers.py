"""What the two tiers of KV cost and what each part of them is worth.

    python -m perf.kv_tiers [--json] [--section NAME] [--quick] [--runs N] [--model M] [--device D]
                            [--limit-s S]

Five sections, side by side in one run, on the embedded engine with a real model:

- content: whether copies put every byte where it belongs; if not, nothing else is measured;
- bandwidth: copies between the tiers beside a plain copy of the same bytes;
- steps: a decode step with and without copies running;
- resumes: to the next token from the device, from the host (with room in both tiers, and with
  none), after a prefetch and by recompute;
- ablation: a burst for which the KV pool is too small, with parts of the tiers left out, as
  intervals over interleaved runs, beside the shape of Table 2 of the TokenFlow paper.

`--model llama-3-8b-random --device cuda` makes a model of that shape on the GPU, with random
weights; `tiny-random` is the same path for a CPU in a minute (with `--quick`). Everything goes into
one JSON file; it is perf/results/kv_tiers.json, which the documents show, only for all sections at
full length with the default model on a CPU, and else only where `--output` says.
The exit status does not depend on the goals.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# perf.kv.models comes first: it sets what OpenMP reads when torch is loaded.
from perf.kv.models import RANDOM_MODELS, SMOLLM, Model, open_model  # isort: skip

from perf.kv import ablation, content, copies, resumes
from perf.kv.scales import SCALES, Scale
from perf.kv.tables import goals, text
from tokenflow.errors import TokenFlowError

RESULTS = Path(__file__).parent / "results" / "kv_tiers.json"
MIN_RUNS = 5
"""Of the burst, for results that documents show."""

Say = Callable[[str], None]


def _resumes(model: Model, scale: Scale, say: Say) -> Any:
    return resumes.measure(model, scale.resumes, say)


def _bandwidth(model: Model, scale: Scale, say: Say) -> Any:
    say("bandwidth of copies")
    return copies.measure_bandwidth(model, scale.copies)


def _steps(model: Model, scale: Scale, say: Say) -> Any:
    say("decode steps with and without copies")
    return copies.measure_steps(model, scale.copies)


def _ablation(model: Model, scale: Scale, say: Say) -> Any:
    return ablation.measure(model, scale.burst, scale.num_runs, say, until=scale.until)


def _content(model: Model, scale: Scale, say: Say) -> Any:
    say("whether copies are right")
    return content.measure(model, scale.num_checked_transfers)


SECTIONS: Mapping[str, Callable[[Model, Scale, Say], Any]] = {
    "content": _content,
    "bandwidth": _bandwidth,
    "steps": _steps,
    "resumes": _resumes,
    "ablation": _ablation,
}


def measure(
    model: Model,
    scale: Scale,
    sections: Sequence[str],
    say: Say,
    store: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """All results of these sections, with the environment and the goals.

    store: given what there is after each section, so that the failure of a later one loses nothing.
    """
    result: dict[str, Any] = {"environment": model.describe(), "section_s": {}}
    for name in sections:
        start = time.monotonic()
        result[name] = SECTIONS[name](model, scale, say)
        result["section_s"][name] = time.monotonic() - start
        result["goals"] = goals(result)
        store(result)
    return result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.kv_tiers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, help="only this one; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="few contexts, repeats and runs")
    parser.add_argument(
        "--runs", type=int, default=None, help="of the burst, of each variant (default 5)"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        help="seconds from the start after which no round of the burst is to end",
    )
    parser.add_argument(
        "--model",
        default=SMOLLM,
        help=f"{SMOLLM}, a checkpoint folder, or {', '.join(RANDOM_MODELS)}",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--output", type=Path, default=None, help="file for the results")
    args = parser.parse_args(argv)
    if args.runs is not None and args.runs < 1:
        parser.error("--runs must be at least 1")
    return args


def _output(args: argparse.Namespace) -> Path | None:
    is_whole = not (args.quick or args.section) and (args.runs or MIN_RUNS) >= MIN_RUNS
    is_default = (args.model, args.device, args.dtype) == (SMOLLM, "cpu", "bfloat16")
    if args.output is None and is_whole and is_default:
        return RESULTS
    path: Path | None = args.output
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 when something cannot be measured."""
    start = time.monotonic()
    args = _parse(argv)
    scale = SCALES[args.model if args.model in SCALES else SMOLLM][args.quick]
    scale = replace(scale, num_runs=args.runs or scale.num_runs, until=start + args.limit_s)
    output = _output(args)

    def say(what: str) -> None:
        print(f"measuring {what} …", file=sys.stderr, flush=True)

    def store(result: Mapping[str, Any]) -> None:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=1) + "\n")

    try:
        model = open_model(args.model, args.device, args.dtype, args.num_threads)
        result = measure(model, scale, args.section or list(SECTIONS), say, store)
    except TokenFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1) if args.json else text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
