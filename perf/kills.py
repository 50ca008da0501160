"""Kill test: streams on a real server whose engine is killed again and again.

`python -m perf.kills` keeps 16 streams open for a minute, kills the engine five times and checks
every token that every client gets. Prints how long the next first token took after each kill, and
ends with 1 when one client got something wrong. `--model` runs a real model instead of the scripted
engine; its answers are compared with those of a run without kills.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perf.harness import serving
from perf.long_runs.kill_plan import Kill, KillPlan, describe
from perf.long_runs.kill_run import KillReport, run_kills
from perf.long_runs.known_prompts import CountingPrompts, recorded_prompts, scripted_kill_config
from tokenflow.config import ServingConfig


def format_report(report: KillReport) -> str:
    """What a person reads."""

    def after(time: float | None, kill: Kill) -> str:
        return "      –" if time is None else f"{time - kill.kill_time:6.2f}s"

    lines = ["kill      lost   started  first token   (seconds after the kill)"]
    lines += [
        f"{kill.moment.value:8} {after(kill.lost_time, kill)} {after(kill.started_time, kill)}"
        f"   {after(kill.first_token_time, kill)}"
        for kill in report.kills
    ]
    lines.append(f"longest gap of each stream around a kill: {describe(report.gaps_s)}")
    lines.append(f"stalls that readers notice: {describe(report.stalls_s)}")
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in report.outcomes.items())
    lines.append(f"streams: {counts}; {report.num_tokens} tokens")
    lines += [f"{name}: {value:g}" for name, value in sorted(report.metrics.items())]
    lines += [f"WRONG {fault}" for fault in report.faults]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.kills", description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    parser.add_argument("--seed", type=int, default=KillPlan.seed)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: scripted engine)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args(arguments)
    plan = KillPlan(duration_s=options.duration, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="tokenflow-kills-") as name:
        folder = Path(name)
        report = _run_in(folder, plan, options.model, options.dtype)
    print(format_report(report))
    return 1 if report.faults else 0


def _run_in(folder: Path, plan: KillPlan, model: Path | None, dtype: str) -> KillReport:
    trace_path = folder / "trace.jsonl"
    if model is None:
        config = scripted_kill_config(folder, trace_path)
        with serving(config, folder / "server", "kills") as server:
            return run_kills(server, trace_path, plan, CountingPrompts(), exact=True)
    config = ServingConfig(
        gpt_model_path=str(model), dtype=dtype, max_num_tokens=64, trace_path=str(trace_path)
    )
    with serving(config, folder / "server", "kills") as server:
        choose = asyncio.run(recorded_prompts(server))
        return run_kills(server, trace_path, plan, choose, exact=False)


if __name__ == "__main__":
    sys.exit(main())
