"""From what a run in virtual time gave back to one flat record of it.

Every measure of a stream is that of `tokenflow.metrics`; this module only pools them over a run's
requests. Keys end in their unit as names do everywhere (_s, _bytes; rates are tokens/s); values are
numbers, text, booleans or None, where None stands for "there is none" (a percentile of nothing).
Pure. Invariant: all keys but those of `WALL_KEYS` are the same for the same requests, engine and
planner.

- Time to first token and QoS are over the requests that got a token; the others, whose clients
  left while they waited, say, are counted in `num_without_token`. End to end is over those that
  ended by themselves.
- Time between tokens (tbt) is pooled over all gaps of all readers, as they see them.
- Stalls are waits over 250 ms, each with its cause; `rebuffer_s` is all waiting, however short.
- QoS is the paper's Eq. 2 with lambda = mu = 1 token/s; QoE is Andes', its mean over readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.lab import bootstrap
from perf.lab.timeline import Cause, Timeline, stall_causes
from perf.virtual.values import SimResult
from tokenflow import metrics
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, Stream
from tokenflow.types import EndReason

Record = dict[str, Any]

WALL_KEYS = ("wall_s", "plan_wall_s", "virtual_per_wall_s")
"""What depends on the machine that simulates."""

MAX_SHARE_STALLED = 0.01
"""Effective throughput only counts while no larger share of the readers sees a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What deciding and simulating took. num_plans: calls of the planner, None where they were not
    counted; plan_wall_s: seconds of this machine in them; wall_s: of the whole run."""

    num_plans: int | None
    plan_wall_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the workload asks of the engine.

    ttft_bound_*: time to first token if the engine did nothing but prefill. raw_bound: tokens/s
    that no schedule exceeds, None where that is not known. sum_rate: Σ R of the
    readers at their most, tokens/s; capacity: Γ at their mid-life context, tokens/s.
    """

    ttft_bound_mean_s: float
    ttft_bound_p99_s: float
    raw_bound: float | None
    sum_rate: float
    capacity: float

    @property
    def load(self) -> float:
        """ΣR / Γ."""
        return self.sum_rate / self.capacity

    @property
    def is_schedulable(self) -> bool:
        """True if the engine can keep all readers supplied at once."""
        return self.load <= 1.0


def measure(
    result: SimResult,
    timeline: Timeline | None,
    load: Load,
    effort: Effort,
    *,
    block_bytes: int,
    num_machines: int = 1,
) -> Record:
    """The record of one run.

    timeline: None where nothing was traced: then what stalls were caused by is None, too.
    num_machines: throughputs, goodput and QoS are per machine.
    """
    streams = {str(handle): seq.stream for handle, seq in enumerate(result.seqs, 1)}
    virtual_s = metrics.span_s(list(streams.values()))
    return {
        "num_machines": num_machines,
        **_counts(result, list(streams.values())),
        **_latencies(result, list(streams.values())),
        **_apart(result),
        **_worth(list(streams.values()), num_machines),
        **_stalls(streams),
        **_causes(streams, timeline),
        **_pauses(result),
        **_copies(result, block_bytes),
        "ttft_bound_mean_s": load.ttft_bound_mean_s,
        "ttft_bound_p99_s": load.ttft_bound_p99_s,
        "raw_bound": load.raw_bound,
        "sum_rate": load.sum_rate,
        "capacity": load.capacity,
        "load": load.load,
        "is_schedulable": load.is_schedulable,
        "num_steps": None if timeline is None else len(timeline.step_s),
        "num_plans": effort.num_plans,
        "virtual_s": virtual_s,
        "wall_s": effort.wall_s,
        "plan_wall_s": effort.plan_wall_s,
        "virtual_per_wall_s": virtual_s / effort.wall_s,
    }


def deterministic(record: Mapping[str, Any]) -> Record:
    """The record without what depends on the machine that simulated."""
    return {key: value for key, value in record.items() if key not in WALL_KEYS}


def _counts(result: SimResult, streams: list[Stream]) -> Record:
    ends = [seq.end for seq in result.seqs]
    return {
        "num_requests": len(streams),
        "num_completed": sum(end in (EndReason.LENGTH, EndReason.STOP) for end in ends),
        "num_cancelled": ends.count(EndReason.CANCELLED),
        "num_failed": sum(end in (EndReason.ERROR, EndReason.TIMEOUT) for end in ends),
        "num_without_token": sum(not s.num_tokens for s in streams),
        "num_output_tokens": sum(s.num_tokens for s in streams),
    }


def _latencies(result: SimResult, streams: list[Stream]) -> Record:
    ttfts = np.array([metrics.ttft_s(s) for s in streams if s.num_tokens])
    complete = [
        stream
        for seq, stream in zip(result.seqs, streams, strict=True)
        if seq.end in (EndReason.LENGTH, EndReason.STOP)
    ]
    ends = np.array([metrics.end_to_end_s(s) for s in complete])
    readers = [s for s in streams if s.read_rate is not None]
    tbts = np.concatenate([np.zeros(0), *(metrics.tbt_s(s) for s in readers)])
    mean, p99 = bootstrap.interval(ttfts), bootstrap.interval(ttfts, bootstrap.percentile(99))
    return {
        "ttft_mean_s": known(mean.value),
        "ttft_mean_low_s": known(mean.low),
        "ttft_mean_high_s": known(mean.high),
        "ttft_p50_s": known(metrics.percentile(ttfts, 50)),
        "ttft_p99_s": known(p99.value),
        "ttft_p99_low_s": known(p99.low),
        "ttft_p99_high_s": known(p99.high),
        "ttft_worst_s": known(metrics.percentile(ttfts, 100)),
        "tbt_p50_s": known(metrics.percentile(tbts, 50)),
        "tbt_p99_s": known(metrics.percentile(tbts, 99)),
        "end_to_end_mean_s": float(ends.mean()) if len(ends) else None,
        "end_to_end_p50_s": known(metrics.percentile(ends, 50)),
        "end_to_end_p99_s": known(metrics.percentile(ends, 99)),
    }


def _apart(result: SimResult) -> Record:
    """Of those who are served by rules of their own: requests of the highest class, where there are
    several; and requests that nobody reads along, until they ended."""
    urgent = max((seq.request.priority for seq in result.seqs), default=0.0)
    is_mixed = any(seq.request.priority < urgent for seq in result.seqs)
    ttfts = [
        metrics.ttft_s(seq.stream)
        for seq in result.seqs
        if is_mixed and seq.request.priority == urgent and seq.token_times
    ]
    ends = [
        metrics.end_to_end_s(seq.stream)
        for seq in result.seqs
        if seq.request.read_rate is None and seq.end in (EndReason.LENGTH, EndReason.STOP)
    ]
    return {
        "urgent_ttft_mean_s": sum(ttfts) / len(ttfts) if ttfts else None,
        "urgent_ttft_p99_s": known(metrics.percentile(np.array(ttfts), 99)),
        "machine_end_to_end_mean_s": sum(ends) / len(ends) if ends else None,
        "machine_end_to_end_p99_s": known(metrics.percentile(np.array(ends), 99)),
    }


def _worth(streams: list[Stream], num_machines: int) -> Record:
    served = [s for s in streams if s.num_tokens]
    qoes = [metrics.qoe(s) for s in streams if s.read_rate is not None]
    return {
        "raw_throughput": metrics.raw_throughput(streams) / num_machines,
        "effective_throughput": metrics.effective_throughput(streams) / num_machines,
        "goodput": metrics.effective_goodput(streams) / num_machines,
        "qos": metrics.qos(served) / num_machines,
        "qoe_mean": sum(qoes) / len(qoes) if qoes else None,
    }


def _stalls(streams: Mapping[str, Stream]) -> Record:
    readers = [s for s in streams.values() if s.read_rate is not None]
    waits = [metrics.waits_s(s) for s in readers]
    visible = [w[w > CLIENT_VISIBLE_STALL_S] for w in waits]
    share = sum(len(v) > 0 for v in visible) / len(readers) if readers else 0.0
    return {
        "num_readers": len(readers),
        "num_stalls": sum(len(v) for v in visible),
        "stall_s": float(sum(v.sum() for v in visible)),
        "stall_worst_s": max((float(v.max()) for v in visible if len(v)), default=0.0),
        "share_stalled": share,
        "rebuffer_s": float(sum(w.sum() for w in waits)),
    }


def _causes(streams: Mapping[str, Stream], timeline: Timeline | None) -> Record:
    found = None if timeline is None else stall_causes(streams, timeline)
    record: Record = {}
    for cause in Cause:
        record[f"num_stalls_{cause.value}"] = None if found is None else found[cause].num_stalls
        record[f"stall_{cause.value}_s"] = None if found is None else found[cause].stall_s
    return record


def _pauses(result: SimResult) -> Record:
    return {
        "num_pauses": result.num_pauses,
        "num_planned_pauses": result.num_pauses - result.num_forced,
        "num_forced_pauses": result.num_forced,
        "num_internal_pauses": result.num_internal_pauses,
        "num_lease_ends": result.num_lease_ends,
        "num_recomputed_tokens": result.num_recomputed_tokens,
        "num_thrown_away_tokens": result.num_thrown_away,
    }


def _copies(result: SimResult, block_bytes: int) -> Record:
    counters = result.counters
    return {
        "offload_bytes": counters.num_offloads_completed * block_bytes,
        "onboard_bytes": counters.num_onboards_completed * block_bytes,
        "copy_s": counters.offload_s + counters.onboard_s,
        "copy_wait_s": counters.copy_wait_s,
        "hidden_copy_share": counters.hidden_copy_share,
        "host_peak_bytes": result.num_host_blocks_peak * block_bytes,
        "num_host_full_blocks": counters.num_host_full,
    }


def known(value: float) -> float | None:
    """The value, or None for NaN."""
    return None if math.isnan(value) else float(value)
