"""What happened when in a run: its trace, kept in memory, and what readers waited for.

Owns the reading of trace events (tokenflow/trace.py) while they are made. Invariants: the instants
of a timeline never decrease; every client-visible stall has exactly one cause.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenflow import metrics
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, FloatArray, Stream


class Cause(enum.Enum):
    """What a reader waited for.

    PAUSE: its stream stood still, and no resume had been asked for when it ran dry. LATE_RESUME: a
    resume had been asked for, and its token came too late. ENGINE_PAUSE: to the planner it ran, but
    the engine made steps without it (it paused it by itself, or let it wait). ENGINE_STEP: the step
    that brought its token took so long.
    """

    PAUSE = "pause"
    LATE_RESUME = "late_resume"
    ENGINE_PAUSE = "engine_pause"
    ENGINE_STEP = "engine_step"


@dataclass(slots=True)
class Pause:
    """One pause of a request: asked for, resume asked for, first token after it; +inf: never."""

    pause_time: float
    resume_time: float = math.inf
    resumed_time: float = math.inf


class Timeline:
    """Implements `tokenflow.trace.Tracer` for one run.

    pauses: of each request, by its id, in order. step_end_times, step_s: of the engine's steps that
    computed something; num_running: sequences in each. num_waiting: requests that wait for their
    start or, in the engine, for a place in a step; num_paused: those that a plan or a client paused
    and nobody resumed; both as of the end of each of those steps.
    """

    def __init__(self) -> None:
        self.pauses: dict[str, list[Pause]] = defaultdict(list)
        self.step_end_times: list[float] = []
        self.step_s: list[float] = []
        self.num_running: list[int] = []
        self.num_waiting: list[int] = []
        self.num_paused: list[int] = []

    def record(self, event: str, time: float, **fields: Any) -> None:
        """See Tracer; everything but steps and pauses is forgotten."""
        if event == "iteration":
            if fields["num_scheduled"]:
                self._step(time, fields)
        elif event == "pause":
            self.pauses[fields["request_id"]].append(Pause(time))
        elif event in ("resume", "resumed"):
            self._resume(event, time, self.pauses.get(fields["request_id"]))

    def flush(self) -> None:
        """See Tracer."""

    def _step(self, time: float, fields: Mapping[str, Any]) -> None:
        self.step_end_times.append(time)
        self.step_s.append(fields["latency_ms"] / 1e3)
        self.num_running.append(fields["num_scheduled"])
        in_engine = fields["num_queued"] + fields["num_active"] - fields["num_scheduled"]
        self.num_waiting.append(fields["num_waiting"] + in_engine)
        self.num_paused.append(fields["num_preempted"])

    @staticmethod
    def _resume(event: str, time: float, pauses: list[Pause] | None) -> None:
        """Without a pause before it, it is the renewal of a lease: no interruption."""
        if not pauses or pauses[-1].resumed_time < math.inf:
            return
        if event == "resumed":
            pauses[-1].resumed_time = time
        elif pauses[-1].resume_time == math.inf:
            pauses[-1].resume_time = time


@dataclass(slots=True)
class CauseTotals:
    """Visible stalls of one cause: how many, and their seconds."""

    num_stalls: int = 0
    stall_s: float = 0.0


def stall_causes(streams: Mapping[str, Stream], timeline: Timeline) -> dict[Cause, CauseTotals]:
    """Every stall over 250 ms of `streams`, which go by their request ids, by cause.

    A pause that lies between the token before the stall and the awaited one is blamed first; else
    two or more steps between those tokens mean that the engine went on without the stream.
    """
    totals = {cause: CauseTotals() for cause in Cause}
    step_ends = np.asarray(timeline.step_end_times)
    for request_id, stream in streams.items():
        waits = metrics.waits_s(stream)
        late = np.flatnonzero(waits > CLIENT_VISIBLE_STALL_S)
        if not len(late):
            continue
        before, awaited = stream.token_times[late - 1], stream.token_times[late]
        num_steps = np.searchsorted(step_ends, awaited, side="right") - np.searchsorted(
            step_ends, before, side="right"
        )
        pauses = timeline.pauses.get(request_id, [])
        pause_times = [pause.pause_time for pause in pauses]
        for j, start, end, steps in zip(late, before, awaited, num_steps, strict=True):
            num_begun = bisect_left(pause_times, float(end))
            pause = pauses[num_begun - 1] if num_begun else None
            cause = _cause(pause, float(start), float(end - waits[j]), int(steps))
            totals[cause].num_stalls += 1
            totals[cause].stall_s += float(waits[j])
    return totals


def _cause(pause: Pause | None, before: float, wanted_time: float, num_steps: int) -> Cause:
    """`pause`: the last one that began before the awaited token came; `before`: receipt of the
    token in front of it."""
    if pause is not None and pause.resumed_time > before:
        return Cause.LATE_RESUME if pause.resume_time <= wanted_time else Cause.PAUSE
    return Cause.ENGINE_PAUSE if num_steps > 1 else Cause.ENGINE_STEP


def on_grid(values: Sequence[float], times: Sequence[float], instants: FloatArray) -> FloatArray:
    """`values`, each of which holds from its instant in `times` on, at each of `instants`; 0 before
    the first."""
    held = np.concatenate(([0.0], np.asarray(values, dtype=np.float64)))
    return np.asarray(held[np.searchsorted(np.asarray(times), instants, side="right")])
