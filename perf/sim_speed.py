"""How fast virtual time goes: virtual seconds per second of one core, for 300 streams.

Owns the loads that are timed, and where the time goes. Each load runs step by step, and with those
steps made together in which nothing can change (perf/virtual/simulation.py); both runs say the same
to the byte, which is checked. A figure is the best of some runs, in CPU time: what else runs on the
machine slows the core down, but is not counted.

- quiet: everybody has a place in the pool, and nothing is planned. Timed from the last first token
  to the first end, what was put off until then included: what steps themselves cost.
- busy: more streams than the pool holds, a plan every 50 ms, pauses and resumes all the time. Timed
  from the beginning to the end: what a simulation of a set-up costs; much of it is planning.

Run `python -m perf.sim_speed`, with `--json` for the figures alone.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

from build_engines.model_shapes import MODELS
from perf.lab.gpus import GPUS
from perf.lab.roofline import sim_engine
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, Snapshot

MODEL = "llama3-8b"
SAMPLE_S = 0.004
_END_S = 1e5
_CLOCK_S = 1e-3
"""What the clock of CPU time tells apart on any machine."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Streams that come at once, 1 ms apart, and read 6 tokens/s.

    gpu: name in gpus.GPUS. is_quiet: see the module's text. max_tokens: of each; of a busy load the
    mean of lengths that differ by up to a fifth.
    """

    name: str
    gpu: str
    is_quiet: bool
    max_tokens: int
    num_streams: int = 300
    num_prompt_tokens: int = 128

    def requests(self) -> list[SimRequest]:
        """The same ones each time."""
        spread = 0 if self.is_quiet else self.max_tokens // 5
        return [
            SimRequest(
                arrival_time=1e-3 * i,
                num_prompt_tokens=self.num_prompt_tokens + i % 17,
                max_tokens=self.max_tokens + (37 * i) % (2 * spread + 1) - spread,
                read_rate=6.0,
            )
            for i in range(self.num_streams)
        ]

    def engine(self) -> SimEngine:
        """Its engine, without a host tier."""
        return sim_engine(
            GPUS[self.gpu],
            MODELS[MODEL],
            max_batch_size=512,
            capacity_policy="guaranteed_no_evict" if self.is_quiet else "max_utilization",
        )


LOADS = (
    Load(name="h200 quiet", gpu="h200", is_quiet=True, max_tokens=1024),
    Load(name="a6000 quiet", gpu="a6000", is_quiet=True, max_tokens=512),
    Load(name="a6000 busy", gpu="a6000", is_quiet=False, max_tokens=1024),
)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One load, one way.

    virtual_s: what was timed; num_steps, num_plans, cpu_s: of that. shares: of the CPU time.
    """

    load: str
    gpu: str
    together: bool
    num_streams: int
    num_steps: int
    num_plans: int
    virtual_s: float
    cpu_s: float
    shares: dict[str, float]

    @property
    def times_real(self) -> float:
        """Virtual seconds per second of one core."""
        return self.virtual_s / max(self.cpu_s, _CLOCK_S)


def measure(load: Load, *, together: bool, window: Window, num_runs: int) -> Speed:
    """The best of `num_runs` (at least 1), and the shares of all."""
    shares = Shares()
    runs = [_Run(load, together, window, shares) for _ in range(num_runs)]
    best = min(runs, key=lambda run: run.cpu_s)
    return Speed(
        load=load.name,
        gpu=load.gpu,
        together=together,
        num_streams=load.num_streams,
        num_steps=best.num_steps,
        num_plans=best.num_plans,
        virtual_s=window.end_time - window.begin_time,
        cpu_s=best.cpu_s,
        shares=shares.result(),
    )


class Window(NamedTuple):
    """What is timed of a run: two virtual instants."""

    begin_time: float
    end_time: float


def window_of(load: Load, result: SimResult) -> Window:
    """The window that the module's text names, for a load that ran so."""
    ends = [q.end_time for q in result.seqs]
    if not load.is_quiet:
        return Window(0.0, max(ends))
    return Window(max(q.token_times[0] for q in result.seqs), min(ends))


class _Run:
    """A run that is timed: num_steps, num_plans and cpu_s are those of the window."""

    def __init__(self, load: Load, together: bool, window: Window, shares: Shares) -> None:
        self._policy = TokenflowPolicy()
        self.num_plans = 0
        simulation = Simulation(load.requests(), self._plan, load.engine(), together=together)
        simulation.advance(window.begin_time)
        self.num_plans, num_steps = 0, simulation.num_steps
        with shares:
            start = time.process_time()
            simulation.advance(window.end_time)
            self.cpu_s = time.process_time() - start
        self.num_steps = simulation.num_steps - num_steps

    def _plan(self, snapshot: Snapshot) -> Decision:
        self.num_plans += 1
        return plan(snapshot, self._policy)


class Shares:
    """Looks every few milliseconds of CPU time at what is running; a context manager, for the main
    thread."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Shares:
        self._old = signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._old)

    def result(self) -> dict[str, float]:
        """Shares by what was done, the greatest first; {} if nothing was seen."""
        total = sum(self._counts.values())
        return {name: num / total for name, num in self._counts.most_common()}

    def _look(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            part = part_of(frame.f_code.co_filename)
            if part is not None:
                self._counts[part] += 1
                return
            frame = frame.f_back


def part_of(filename: str) -> str | None:
    """What the code of a file of ours does; None for files of others."""
    path = PurePath(filename)
    if "perf" in path.parts:
        return "events"
    if "tokenflow" not in path.parts:
        return None
    if path.parent.name == "inflight":
        return "engine"
    name = path.stem
    if name.startswith("scheduler") or name == "policies":
        return "planner"
    if name.startswith(("snapshots", "costs", "copy_costs", "whereabouts", "kv_", "session_rows")):
        return "what plans are made from"
    return "sessions"


def rows(loads: Sequence[Load], num_runs: int) -> list[Speed]:
    """Both ways of each load. Raises RuntimeError if they do not agree."""
    speeds: list[Speed] = []
    for load in loads:
        expected, result = (_whole(load, together=together) for together in (False, True))
        for ours, theirs in zip(result.seqs, expected.seqs, strict=True):
            if ours.token_times != theirs.token_times:
                raise RuntimeError(f"{load.name}: steps made together say something else")
        window = window_of(load, result)
        speeds += [
            measure(load, together=together, window=window, num_runs=num_runs)
            for together in (False, True)
        ]
    return speeds


def _whole(load: Load, *, together: bool) -> SimResult:
    policy = TokenflowPolicy()
    simulation = Simulation(
        load.requests(), lambda snap: plan(snap, policy), load.engine(), together=together
    )
    return simulation.run(_END_S)


def table(speeds: Sequence[Speed]) -> str:
    """For people."""
    lines = [
        f"{'load':<12} {'streams':>7}  {'steps':<11} {'virtual s':>9} {'CPU s':>6} "
        f"{'× real':>7} {'µs/step':>8} {'plans':>6}  where the time goes"
    ]
    for s in speeds:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in s.shares.items())
        lines.append(
            f"{s.load:<12} {s.num_streams:>7}  {'together' if s.together else 'one by one':<11} "
            f"{s.virtual_s:>9.1f} {s.cpu_s:>6.2f} {s.times_real:>7.0f} "
            f"{1e6 * s.cpu_s / s.num_steps:>8.0f} {s.num_plans:>6}  {shares}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, loads: Sequence[Load] = LOADS) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m perf.sim_speed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the best counts")
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error("--runs must be at least 1")
    speeds = rows(loads, args.runs)
    if args.json:
        data = [{**asdict(s), "times_real": s.times_real} for s in speeds]
        json.dump({"model": MODEL, "speeds": data}, sys.stdout, indent=2)
        print()
    else:
        print(table(speeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
