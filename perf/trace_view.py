"""The server's trace, read back: who was paused when, what the engine did, was its batch full.

Owns the reading of the JSON lines that `tokenflow.trace` writes. Pure after `read_trace`. Instants
are CLOCK_MONOTONIC and can be laid beside the clients' receipt times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenflow.executor.api import CapacitySchedulerPolicy, num_blocks_needed

# A slot may stand empty for this long after an arrival: the request is on its way to the engine.
ARRIVAL_GRACE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One pause of a request. resume_time: when the resume was asked for; resumed_time: its first
    token. Both None while it never came."""

    pause_time: float
    resume_time: float | None = None
    resumed_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of the engine."""

    number: int
    start_time: float
    end_time: float
    num_scheduled: int
    num_active: int
    num_ctx_tokens: int
    free_num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """What the trace says about one request. num_blocks: its full reservation."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    num_blocks: int
    end_time: float | None
    pauses: tuple[Pause, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A run's trace, in order of time."""

    requests: Mapping[str, RequestTimes]
    iterations: Sequence[Iteration]

    @property
    def num_pauses(self) -> int:
        """Pauses of all requests."""
        return sum(len(request.pauses) for request in self.requests.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCheck:
    """Iterations in which somebody waited, by what kept the next request out.

    num_full: every slot was taken. num_no_room: the next in line did not fit in the KV pool.
    idle_times: ends of iterations in which neither was the case; none for an honest baseline.
    """

    num_full: int
    num_no_room: int
    idle_times: tuple[float, ...]


def read_trace(path: Path, *, tokens_per_block: int, since_time: float = 0.0) -> Trace:
    """The trace of `path`, without what happened before `since_time` (warm-up)."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return build_trace(
        [line for line in lines if line["time"] >= since_time], tokens_per_block=tokens_per_block
    )


def build_trace(lines: Sequence[Mapping[str, Any]], *, tokens_per_block: int) -> Trace:
    """A Trace of events as `tokenflow.trace` records them, in any order."""
    per_request: dict[str, list[Mapping[str, Any]]] = {}
    iterations = []
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "iteration":
            iterations.append(_iteration(line))
        elif "request_id" in line:
            per_request.setdefault(line["request_id"], []).append(line)
    requests = {
        request_id: _request_times(request_id, events, tokens_per_block)
        for request_id, events in per_request.items()
        if any(event["event"] == "arrival" for event in events)
    }
    return Trace(requests=requests, iterations=iterations)


def capacity(trace: Trace, max_batch_size: int) -> float:
    """Γ: tokens/s of the engine when every slot generates, measured; NaN when it never did.

    From the time between the ends of neighbouring iterations that were full and had no prefill, so
    that the engine's own work between two steps counts.
    """
    gaps = [
        later.end_time - earlier.end_time
        for earlier, later in zip(trace.iterations, trace.iterations[1:], strict=False)
        if later.number == earlier.number + 1
        and earlier.num_scheduled == later.num_scheduled == max_batch_size
        and earlier.num_ctx_tokens == later.num_ctx_tokens == 0
    ]
    return max_batch_size / statistics.median(gaps) if gaps else float("nan")


def check_batch(trace: Trace, *, max_batch_size: int, num_blocks: int) -> BatchCheck:
    """Was the batch full whenever somebody waited? For policies that keep the order of arrival.

    In order of arrival the engine holds the first `num_active` unfinished requests, and the next
    one is the first that waits; it has no room when the reservations of those before it leave
    fewer blocks than it needs. Requests that came within ARRIVAL_GRACE_S are not counted yet.
    """
    in_order = sorted(trace.requests.values(), key=lambda r: r.arrival_time)
    num_full = num_no_room = 0
    idle = []
    for step in trace.iterations:
        unfinished = [
            r
            for r in in_order
            if r.arrival_time <= step.start_time - ARRIVAL_GRACE_S
            and (r.end_time is None or r.end_time > step.end_time + ARRIVAL_GRACE_S)
        ]
        if len(unfinished) <= step.num_active:
            continue
        reserved = sum(r.num_blocks for r in unfinished[: step.num_active])
        if step.num_active >= max_batch_size:
            num_full += 1
        elif reserved + unfinished[step.num_active].num_blocks > num_blocks:
            num_no_room += 1
        else:
            idle.append(step.end_time)
    return BatchCheck(num_full=num_full, num_no_room=num_no_room, idle_times=tuple(idle))


def _iteration(line: Mapping[str, Any]) -> Iteration:
    return Iteration(
        number=line["iter"],
        start_time=line["time"] - line["latency_ms"] / 1000,
        end_time=line["time"],
        num_scheduled=line["num_scheduled"],
        num_active=line["num_active"],
        num_ctx_tokens=line["num_ctx_tokens"],
        free_num_blocks=line["free_num_blocks"],
    )


def _request_times(
    request_id: str, events: Sequence[Mapping[str, Any]], tokens_per_block: int
) -> RequestTimes:
    arrival = next(event for event in events if event["event"] == "arrival")
    num_blocks = num_blocks_needed(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        tokens_per_block,
        arrival["num_prompt_tokens"],
        arrival["max_tokens"],
    )
    end = next((e["time"] for e in events if e["event"] in ("finish", "cancel", "error")), None)
    pauses: list[Pause] = []
    for event in events:
        kind, at = event["event"], event["time"]
        if kind == "pause":
            pauses.append(Pause(pause_time=at))
        elif kind in ("resume", "resumed") and pauses:
            last = pauses[-1]
            pauses[-1] = Pause(
                pause_time=last.pause_time,
                resume_time=at if kind == "resume" else last.resume_time,
                resumed_time=at if kind == "resumed" else last.resumed_time,
            )
    return RequestTimes(
        request_id=request_id,
        arrival_time=arrival["time"],
        num_prompt_tokens=arrival["num_prompt_tokens"],
        max_tokens=arrival["max_tokens"],
        num_blocks=num_blocks,
        end_time=end,
        pauses=tuple(pauses),
    )
