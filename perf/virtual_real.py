"""Virtual time beside real time: the demo's workload on a real server and on the fitted costs.

    python -m perf.virtual_real [--runs 5 | --real FILE] [--costs FILE] [--json]

Real runs: those in perf/results/demo.json (or --real FILE), or --runs N fresh ones of each policy
(a Triton server each, as `tokenflow demo` makes them; about a minute a run). Virtual runs: the same
lengths, instants, rates and limits in virtual time, as many per policy, with the costs that
`python -m perf.cost_model --embedded` fitted; each draws the jitter of its steps from what that fit
left over, with a seed of its own.

Printed per policy and measure: mean over the runs and its bootstrap 95 % interval, real and
virtual, and whether the intervals overlap. Twice:
- *alone*: the costs as fitted, of an engine that has the machine to itself;
- *beside*: all steps longer by one factor, by which a full decode step of the real first-come runs
  was slower than the virtual one: Triton, the runtime and the clients share the cores. The
  throughput of fcfs is given then; its times to first token and all of tokenflow are not.

Fresh runs also measure the path between client and runtime (gRPC, Triton, tokenizer), which virtual
time does not have: its median is added to virtual times to first token, and printed.

Written to perf/results/virtual_real.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from perf.analysis import require_complete
from perf.client import ClientRecord, WorkloadRecord
from perf.comparison import POLICIES
from perf.lab import bootstrap
from perf.lab.embedded import EmbeddedCosts, embedded_engine, from_json
from perf.simulate import whole
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimRequest, SimStep
from perf.workloads import NEWCOMER, ClientRequest
from tokenflow import metrics
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.policies import policy_from_config
from tokenflow.scheduler import plan
from triton_backend.launcher import TritonServer

RESULTS = Path(__file__).parent / "results"
MEASURES = ("ttft_p50_s", "ttft_p99_s", "raw_throughput")
_DEFAULT_RUNS = 5

_Made = TypeVar("_Made")
Values = dict[str, dict[str, list[float]]]
"""policy -> measure -> one value per run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """What one run came to. full_step_s: median seconds of a decode step with every slot taken."""

    ttft_p50_s: float
    ttft_p99_s: float
    raw_throughput: float
    full_step_s: float


def sim_requests(workload: Mapping[str, Any]) -> list[SimRequest]:
    """The requests of a result file in virtual time. Raises KeyError for another kind of file."""
    return [
        SimRequest(
            arrival_time=request["send_offset_s"],
            num_prompt_tokens=request["num_prompt_tokens"],
            max_tokens=request["max_tokens"],
            read_rate=request["read_rate"],
            kind=request["request_id"].rsplit("-", 1)[0],
        )
        for request in workload["requests"]
    ]


def play_virtual(
    requests: Sequence[SimRequest],
    config: ServingConfig,
    costs: EmbeddedCosts,
    *,
    seed: int,
    level: float = 1.0,
    path_s: float = 0.0,
) -> VirtualRun:
    """One run in virtual time under the policy of `config`; `path_s` is added to every time to
    first token."""
    policy = policy_from_config(config)
    engine = embedded_engine(costs, config, seed=seed, level=level)
    full: list[float] = []

    def observe(step: SimStep) -> None:
        if len(step.handles) == config.max_batch_size:
            full.append(step.step_s)

    simulation = Simulation(
        requests, lambda snapshot: plan(snapshot, policy), engine, observe=observe
    )
    result = simulation.run()
    ttfts = [metrics.ttft_s(stream) + path_s for stream in result.streams(NEWCOMER)]
    return VirtualRun(
        ttft_p50_s=metrics.percentile(ttfts, 50),
        ttft_p99_s=metrics.percentile(ttfts, 99),
        raw_throughput=metrics.raw_throughput(result.streams()),
        # Prefills come with few of them, and the median does not see those.
        full_step_s=statistics.median(full) if full else float("nan"),
    )


def real_values(real: Mapping[str, Any]) -> Values:
    """One value per run from the content of demo.json."""
    runs = {name: [run for run in real["runs"] if run["policy"] == name] for name in POLICIES}
    return {
        name: {measure: [run[measure] for run in played] for measure in MEASURES}
        for name, played in runs.items()
    }


def real_full_step_s(real: Mapping[str, Any], max_batch_size: int) -> float:
    """Seconds of a full decode step in the real first-come runs: slots / Γ, where a run states
    ΣR/Γ; the mean over the runs. NaN when none could measure it."""
    rates = sum(request["read_rate"] for request in real["workload"]["requests"])
    loads = [run["load"] for run in real["runs"] if run["policy"] == "fcfs" and run["load"]]
    return max_batch_size * statistics.fmean(loads) / rates if loads else float("nan")


def virtual_values(runs: Mapping[str, Sequence[VirtualRun]]) -> Values:
    """The same of runs in virtual time."""
    return {
        name: {measure: [getattr(run, measure) for run in played] for measure in MEASURES}
        for name, played in runs.items()
    }


def compare(real: Values, virtual: Values) -> list[dict[str, Any]]:
    """One row per policy and measure: both intervals, and whether they overlap."""
    rows = []
    for name, measures in real.items():
        for measure, values in measures.items():
            ours, theirs = (
                bootstrap.interval(sample) for sample in (virtual[name][measure], values)
            )
            rows.append(
                {
                    "policy": name,
                    "measure": measure,
                    "num_real": len(values),
                    "num_virtual": len(virtual[name][measure]),
                    "real": [theirs.value, theirs.low, theirs.high],
                    "virtual": [ours.value, ours.low, ours.high],
                    "overlap": ours.low <= theirs.high and theirs.low <= ours.high,
                }
            )
    return rows


def beside(real: Mapping[str, Any], costs: EmbeddedCosts, num_runs: int) -> dict[str, Any]:
    """The whole comparison: `num_runs` virtual runs per policy beside the runs of `real`, the
    content of demo.json, with `path_s` where that was measured."""
    requests, values = sim_requests(real["workload"]), real_values(real)
    path_s = real.get("path_s", 0.0)
    configs = {
        name: parse_parameters({**real["settings"], "scheduling_policy": policy})
        for name, policy in POLICIES.items()
    }

    def play_all(level: float) -> dict[str, list[VirtualRun]]:
        return {
            name: [
                play_virtual(requests, config, costs, seed=seed, level=level, path_s=path_s)
                for seed in range(1, num_runs + 1)
            ]
            for name, config in configs.items()
        }

    alone = play_all(1.0)
    virtual_s = statistics.fmean(run.full_step_s for run in alone["fcfs"])
    real_s = real_full_step_s(real, configs["fcfs"].max_batch_size)
    level = real_s / virtual_s
    result: dict[str, Any] = {
        "alone": compare(values, virtual_values(alone)),
        "full_step_s": {"real": real_s, "virtual": virtual_s},
        "level": level,
        "path_s": path_s,
        "real_runs": values,
    }
    if not math.isnan(level):  # else no real run could measure its full steps
        result["beside"] = compare(values, virtual_values(play_all(level)))
    return result


def format_result(result: Mapping[str, Any]) -> str:
    """Both tables for a terminal."""
    lines = []
    for mode in ("alone", "beside"):
        if mode not in result:
            continue
        factor = 1.0 if mode == "alone" else result["level"]
        lines += [
            f"{mode}: steps × {factor:.3f}",
            f"{'policy':<10} {'measure':<15} {'real [95 %]':>28} {'virtual [95 %]':>28}  overlap",
        ]
        for row in result[mode]:
            sides = [
                f"{value:.2f} [{low:.2f}, {high:.2f}]"
                for value, low, high in (row["real"], row["virtual"])
            ]
            lines.append(
                f"{row['policy']:<10} {row['measure']:<15} {sides[0]:>28} {sides[1]:>28}  "
                f"{'yes' if row['overlap'] else 'no'}"
            )
        lines.append("")
    steps = result["full_step_s"]
    lines.append(
        f"full decode step under fcfs: real {1e3 * steps['real']:.1f} ms (from end to end of "
        f"neighbours), virtual {1e3 * steps['virtual']:.1f} ms; path between client and runtime: "
        f"{1e3 * result['path_s']:.1f} ms"
    )
    return "\n".join(lines)


def path_s(events: Sequence[Mapping[str, Any]], clients: Sequence[ClientRecord]) -> list[float]:
    """Seconds between client and runtime, there and back, of each request: from sending to the
    trace's arrival, and from the trace's first token to its receipt."""
    times = {
        (event["event"], event["request_id"]): event["time"]
        for event in events
        if event["event"] in ("arrival", "first_token")
    }
    return [
        times["arrival", client.request_id]
        - client.send_time
        + client.token_times[0]
        - times["first_token", client.request_id]
        for client in clients
    ]


def _fresh_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the real demo; its result as demo.json has it, and the median `path_s`."""
    from perf import comparison, demo

    paths: list[float] = []

    def player(
        server: TritonServer, requests: list[ClientRequest], folder: Path, label: str
    ) -> WorkloadRecord:
        record = demo.play_demo(server, requests, folder, label)
        require_complete(record.clients)
        lines = (folder / "trace.jsonl").read_text().splitlines()
        paths.extend(path_s([json.loads(line) for line in lines], record.clients))
        return record

    result = comparison.compare(arguments, player)[1]
    return {**result, "path_s": statistics.median(paths)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.virtual_real", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--runs", type=whole, default=None, help="fresh real runs of each policy")
    source.add_argument("--real", type=Path, default=RESULTS / "demo.json", help="their results")
    parser.add_argument("--virtual-runs", type=whole, default=_DEFAULT_RUNS, metavar="N")
    parser.add_argument("--costs", type=Path, default=RESULTS / "embedded_costs.json")
    parser.add_argument("--output", type=Path, default=RESULTS / "virtual_real.json")
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder (SmolLM2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(settings=[])
    args = parser.parse_args(argv)
    if not args.costs.is_file():
        parser.error(f"no {args.costs}: run `python -m perf.cost_model --embedded` first")
    if args.runs is None and not args.real.is_file():
        parser.error(f"no {args.real}: run the demo, or pass --runs")
    try:
        args.fitted = _of_file(args.costs, from_json)
        if args.runs is None:
            args.played = _of_file(args.real, _demo)
    except ValueError as error:
        parser.error(str(error))
    return args


def _of_file(path: Path, make: Callable[[Any], _Made]) -> _Made:
    """What `make` makes of the JSON in `path`. Raises ValueError that names a file of another
    kind."""
    try:
        return make(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds something else: {error!r}") from error


def _demo(content: Any) -> Any:
    """The content of demo.json. Raises KeyError or TypeError for another kind of file."""
    sim_requests(content["workload"])
    real_values(content)
    return content


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, which does not depend on the overlap."""
    args = _parse(argv)
    real = args.played if args.runs is None else _fresh_runs(args)
    result = beside(real, args.fitted, args.virtual_runs)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1) if args.json else format_result(result))
    if not args.json:
        print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
