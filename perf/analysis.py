"""From what clients saw and what the server traced to the numbers of a benchmark.

All measures are those of `tokenflow.metrics`, on client receipt times. Pure. Invariant: every
client-visible stall has exactly one cause.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perf.client import ClientRecord
from perf.trace_view import Iteration, Pause, RequestTimes, Trace
from perf.workloads import NEWCOMER
from tokenflow import metrics
from tokenflow.errors import TokenFlowError
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, Stall, Stream

# The headline keys, in the order of the table; each gets a ratio.
HEADLINE = (
    "ttft_p50_s",
    "ttft_p99_s",
    "effective_throughput",
    "raw_throughput",
    "stalls_over_250ms",
    "num_pauses",
)


class BenchmarkError(TokenFlowError):
    """A run that says nothing: a request failed, or the baseline was not what it claims."""


class Cause(enum.Enum):
    """What a reader waited for."""

    PAUSE = "pause"
    LATE_RESUME = "late_resume"
    ENGINE_STEP = "engine_step"
    MACHINE = "machine"


@dataclass(frozen=True, kw_only=True)
class VisibleStall:
    """A client-visible stall and its cause."""

    request_id: str
    stall: Stall
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy's run. load: ΣR/Γ with Γ measured in this run; NaN when it was not measurable."""

    policy: str
    clients: Sequence[ClientRecord]
    visible_stalls: Sequence[VisibleStall]
    num_pauses: int
    load: float = float("nan")

    @property
    def streams(self) -> list[Stream]:
        """Every client's stream."""
        return [to_stream(client) for client in self.clients]

    @property
    def burst_ttfts_s(self) -> list[float]:
        """Seconds to the first token, of the newcomers."""
        return [metrics.ttft_s(to_stream(c)) for c in self.clients if c.kind == NEWCOMER]


def to_stream(client: ClientRecord) -> Stream:
    """A client's record as `tokenflow.metrics` takes it."""
    return Stream(
        arrival_time=client.send_time,
        token_times=np.asarray(client.token_times, dtype=np.float64),
        read_rate=client.read_rate,
        output_length=client.max_tokens,
    )


def failure(client: ClientRecord) -> str | None:
    """What went wrong with a request; None when it got exactly its tokens and no error."""
    if client.error is not None:
        return f"{client.request_id} failed: {client.error}"
    if len(client.token_times) != client.max_tokens:
        return f"{client.request_id} got {len(client.token_times)} tokens of {client.max_tokens}"
    return None


def require_complete(clients: Sequence[ClientRecord]) -> None:
    """Raises BenchmarkError naming the first request that failed, if any did."""
    for client in clients:
        reason = failure(client)
        if reason is not None:
            raise BenchmarkError(reason)


def under_client_ids(trace: Trace, clients: Sequence[ClientRecord]) -> Trace:
    """The trace with its requests under the ids of `clients`. Where these were sent under ids of
    another program, a request is known by its lengths, those of the same ones by their order.

    Raises BenchmarkError naming the first client whose request is not in the trace.
    """
    if all(client.request_id in trace.requests for client in clients):
        return trace
    of_lengths: dict[tuple[int, int], list[RequestTimes]] = {}
    for request in sorted(trace.requests.values(), key=lambda r: r.arrival_time):
        of_lengths.setdefault((request.num_prompt_tokens, request.max_tokens), []).append(request)
    found = {}
    for client in sorted(clients, key=lambda c: c.send_time):
        alike = of_lengths.get((client.num_prompt_tokens, client.max_tokens))
        if not alike:
            raise BenchmarkError(f"the server's trace has no request like {client.request_id}")
        found[client.request_id] = replace(alike.pop(0), request_id=client.request_id)
    return Trace(requests=found, iterations=trace.iterations)


def visible_stalls(
    clients: Sequence[ClientRecord], trace: Trace, lags: Sequence[tuple[float, float]]
) -> list[VisibleStall]:
    """Every stall over 250 ms, each with its cause."""
    found = []
    for client in clients:
        stream = to_stream(client)
        request = trace.requests.get(client.request_id)
        for stall in metrics.stalls(stream, CLIENT_VISIBLE_STALL_S):
            cause = attribute(
                stall,
                previous_time=float(stream.token_times[stall.token_index - 1]),
                pauses=request.pauses if request else (),
                iterations=trace.iterations,
                lags=lags,
            )
            found.append(VisibleStall(request_id=client.request_id, stall=stall, cause=cause))
    return found


def attribute(
    stall: Stall,
    *,
    previous_time: float,
    pauses: Sequence[Pause],
    iterations: Sequence[Iteration],
    lags: Sequence[tuple[float, float]],
) -> Cause:
    """The cause of one stall; previous_time is the receipt of the token before it.

    A pause that lies between the two tokens is blamed first, whatever else was slow: PAUSE if no
    resume was asked for when the reader ran dry, LATE_RESUME otherwise. Then, if the client's own
    process was late for at least half of the stall, MACHINE; if engine steps fill at least half of
    it, ENGINE_STEP; else nobody was computing and the machine had something else to do.
    """
    for pause in pauses:
        back = math.inf if pause.resumed_time is None else pause.resumed_time
        if pause.pause_time < stall.end_time and back > previous_time:
            asked = math.inf if pause.resume_time is None else pause.resume_time
            return Cause.PAUSE if asked > stall.wanted_time else Cause.LATE_RESUME
    half = stall.duration_s / 2
    if _overlap(stall, ((at - late, at) for at, late in lags)) >= half:
        return Cause.MACHINE
    if _overlap(stall, ((step.start_time, step.end_time) for step in iterations)) >= half:
        return Cause.ENGINE_STEP
    return Cause.MACHINE


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Numbers of one policy over its runs.

    Latencies are pooled over all runs; throughputs are all tokens over all the time, i.e. the
    mean of the runs weighted by their length; stalls and pauses are totals.
    """
    ttfts = [value for run in runs for value in run.burst_ttfts_s]
    streams = [run.streams for run in runs]
    pooled = [stream for run_streams in streams for stream in run_streams]
    ends = [metrics.end_to_end_s(stream) for stream in pooled]
    causes = Counter(stall.cause for run in runs for stall in run.visible_stalls)
    return {
        "num_runs": len(runs),
        "num_requests": len(pooled),
        "ttft_p50_s": metrics.percentile(ttfts, 50),
        "ttft_p99_s": metrics.percentile(ttfts, 99),
        "ttft_worst_s": max(ttfts),
        "effective_throughput": _rate(metrics.effective_throughput, streams),
        "raw_throughput": _rate(metrics.raw_throughput, streams),
        "qos": _rate(metrics.qos, streams),
        "effective_goodput": _rate(metrics.effective_goodput, streams),
        "stalls_over_250ms": sum(len(run.visible_stalls) for run in runs),
        "stalls_by_cause": {cause.value: causes[cause] for cause in Cause},
        "share_of_readers_with_stall": metrics.share_with_visible_stall(pooled),
        "end_to_end_p50_s": metrics.percentile(ends, 50),
        "end_to_end_p99_s": metrics.percentile(ends, 99),
        "num_pauses": sum(run.num_pauses for run in runs),
        "load": _mean([run.load for run in runs]),
    }


def ratios(tokenflow: Mapping[str, Any], fcfs: Mapping[str, Any]) -> dict[str, float | None]:
    """tokenflow / fcfs of each headline key; None where fcfs is 0 (stalls, pauses)."""
    return {
        key: float(tokenflow[key] / fcfs[key]) if fcfs[key] else None
        for key in (*HEADLINE, "ttft_worst_s", "end_to_end_p50_s", "end_to_end_p99_s")
        if key in tokenflow and key in fcfs
    }


def _rate(measure: Any, runs: Sequence[Sequence[Stream]]) -> float:
    """A per-second measure over several runs: its amounts over the sum of their spans."""
    spans = [metrics.span_s(streams) for streams in runs]
    amounts = [measure(streams) * span for streams, span in zip(runs, spans, strict=True)]
    return float(sum(amounts) / sum(spans)) if sum(spans) > 0 else 0.0


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _overlap(stall: Stall, intervals: Any) -> float:
    """Seconds of the stall that the intervals cover; they do not overlap one another."""
    covered = 0.0
    for start, end in intervals:
        covered += max(0.0, min(end, stall.end_time) - max(start, stall.wanted_time))
    return covered
