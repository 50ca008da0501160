"""One load on one machine under one policy: does it keep its readers supplied?

Owns the run, what is measured of it, and the verdict. Seeds are pooled: a percentile is of all
measured requests of all seeds. Once the verdict cannot change any more, the seeds that are left are
not run. Invariant: same arguments, same probe; nothing depends on the machine that simulates.

A load passes if
- P99 of the first token is within its target, and no larger share of the readers than allowed sees
  a stall (a wait over 250 ms, metrics.share_with_visible_stall);
- where arrivals go on, the machine keeps up: when they are over, no more than
  `MAX_SHARE_HELD_BACK` of the requests wait for their start or stand paused. Readers with a full
  buffer hide for a whole reading time that more is asked than made; this shows it at once;
- no request fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.lab.planned_loads import PlannedWork
from perf.lab.policies import PolicyRow
from perf.lab.runs import without_warnings
from perf.virtual.values import SimEngine, SimResult
from tokenflow import metrics
from tokenflow.types import EndReason

MAX_SHARE_HELD_BACK = 0.02
"""Of the requests, at the end of arrivals. A load x above what lasts holds back nearly x of them; a
few stand paused or wait by chance below it."""
_LONGEST_END_S = 1e6
"""Virtual seconds after the last arrival in which everything must have ended."""
_TTFT_PERCENTILE = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a load must keep to. ttft_target_s: of the P99; max_share_stalled: of the readers."""

    ttft_target_s: float
    max_share_stalled: float


class Watch:
    """Implements `tokenflow.trace.Tracer` for one run: what its end does not tell.

    num_used_blocks_peak: most blocks that streams referenced in the pool. paused_tokens_peak: most
    tokens, prompts and answers so far, of all streams that were paused at once. num_held_back:
    requests without a place in a step at `look_time`.
    """

    def __init__(self, num_total_blocks: int, look_time: float | None) -> None:
        self._num_total_blocks = num_total_blocks
        self._look_time = math.inf if look_time is None else look_time
        self._num_prompt_tokens: dict[str, int] = {}
        self._paused: dict[str, int] = {}
        self._num_paused_tokens = 0
        self.num_used_blocks_peak = 0
        self.paused_tokens_peak = 0
        self.num_held_back = 0

    def record(self, event: str, time: float, **fields: Any) -> None:
        """See Tracer."""
        if event == "iteration":
            self._iteration(time, fields)
        elif event == "arrival":
            self._num_prompt_tokens[fields["request_id"]] = fields["num_prompt_tokens"]
        elif event == "pause":
            self._pause(fields["request_id"], fields["num_tokens"])
        elif event in ("resume", "finish", "cancel", "error"):
            self._num_paused_tokens -= self._paused.pop(fields["request_id"], 0)

    def flush(self) -> None:
        """See Tracer."""

    def _iteration(self, time: float, fields: dict[str, Any]) -> None:
        num_used = self._num_total_blocks - fields["free_num_blocks"]
        self.num_used_blocks_peak = max(self.num_used_blocks_peak, num_used)
        if time >= self._look_time:
            in_engine = fields["num_queued"] + fields["num_active"] - fields["num_scheduled"]
            self.num_held_back = fields["num_waiting"] + fields["num_preempted"] + in_engine
            self._look_time = math.inf

    def _pause(self, request_id: str, num_tokens: int) -> None:
        num_tokens += self._num_prompt_tokens[request_id]
        self._paused[request_id] = num_tokens
        self._num_paused_tokens += num_tokens
        self.paused_tokens_peak = max(self.paused_tokens_peak, self._num_paused_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRun:
    """What came of one seed. ttfts_s: of the measured requests, inf where no token came; reader_s:
    from arrival until the last token is read, of those that got any. num_stalled: measured readers.
    The rest is of the whole run, warm-up included."""

    ttfts_s: tuple[float, ...]
    reader_s: tuple[float, ...]
    num_stalled: int
    num_requests: int
    num_failed: int
    num_held_back: int
    num_output_tokens: int
    num_pauses: int
    num_forced_pauses: int
    num_recomputed_tokens: int
    num_offloaded_blocks: int
    num_onboarded_blocks: int
    num_used_blocks_peak: int
    num_host_blocks_peak: int
    paused_tokens_peak: int
    virtual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A load and what came of it: the seeds that were run, of `num_seeds`; reasons: why it does not
    pass, empty if it does."""

    load: float
    num_seeds: int
    runs: tuple[SeedRun, ...]
    reasons: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """True if the readers are kept supplied."""
        return not self.reasons

    def total(self, name: str) -> int:
        """Sum over the seeds of a count of SeedRun."""
        return sum(int(getattr(run, name)) for run in self.runs)

    def peak(self, name: str) -> int:
        """The largest of a count of SeedRun."""
        return max(int(getattr(run, name)) for run in self.runs)

    @property
    def ttfts_s(self) -> list[float]:
        """Of all measured requests."""
        return [ttft for run in self.runs for ttft in run.ttfts_s]

    @property
    def virtual_s(self) -> float:
        """Simulated seconds."""
        return sum(run.virtual_s for run in self.runs)


def probe(
    load: float,
    works: Sequence[Callable[[], PlannedWork]],
    row: PolicyRow,
    machine: SimEngine,
    limits: Limits,
) -> Probe:
    """Run `load`, whose work with each seed is in `works`, until the verdict is certain.

    Raises RuntimeError when a run does not end within `_LONGEST_END_S` of its last arrival.
    """
    made = [make() for make in works]
    num_measured = sum(len(work.requests) - work.num_warm_up for work in made)
    num_requests = sum(len(work.requests) for work in made)
    goes_on = any(work.look_time is not None for work in made)
    runs: list[SeedRun] = []
    for work in made:
        runs.append(_run(work, row, machine))
        if _reasons(runs, limits, num_measured, num_requests, goes_on=goes_on):
            break
    reasons = _reasons(runs, limits, num_measured, num_requests, goes_on=goes_on)
    return Probe(load=load, num_seeds=len(made), runs=tuple(runs), reasons=reasons)


def _reasons(
    runs: Sequence[SeedRun],
    limits: Limits,
    num_measured: int,
    num_requests: int,
    *,
    goes_on: bool,
) -> tuple[str, ...]:
    """What is certain already, of `num_measured` and `num_requests` with all seeds."""
    num_late = sum(t > limits.ttft_target_s for run in runs for t in run.ttfts_s)
    # The nearest rank: so many values may lie above a percentile.
    may_be_late = num_measured - math.ceil(_TTFT_PERCENTILE / 100 * num_measured)
    reasons = []
    if num_late > may_be_late:
        reasons.append("ttft")
    if sum(run.num_stalled for run in runs) > limits.max_share_stalled * num_measured:
        reasons.append("stalls")
    num_held_back = sum(run.num_held_back for run in runs)
    if goes_on and num_held_back > MAX_SHARE_HELD_BACK * num_requests:
        reasons.append("held back")
    if any(run.num_failed for run in runs):
        reasons.append("failed")
    return tuple(reasons)


def _run(work: PlannedWork, row: PolicyRow, machine: SimEngine) -> SeedRun:
    watch = Watch(machine.num_total_blocks, work.look_time)
    until = work.requests[-1].arrival_time + _LONGEST_END_S
    with without_warnings():
        result = row.run(work.requests, machine, until=until, tracer=watch)
    return _measured(result, work.num_warm_up, watch)


def _measured(result: SimResult, num_warm_up: int, watch: Watch) -> SeedRun:
    streams = result.streams()
    measured = streams[num_warm_up:]
    served = [stream for stream in measured if stream.num_tokens]
    ttfts = [metrics.ttft_s(s) if s.num_tokens else math.inf for s in measured]
    return SeedRun(
        ttfts_s=tuple(ttfts),
        reader_s=tuple(float(metrics.read_times(s)[-1] - s.arrival_time) for s in served),
        num_stalled=sum(_stalls(stream) for stream in measured),
        num_requests=len(streams),
        num_failed=sum(seq.end is not EndReason.LENGTH for seq in result.seqs),
        num_held_back=watch.num_held_back,
        num_output_tokens=sum(stream.num_tokens for stream in streams),
        num_pauses=result.num_pauses,
        num_forced_pauses=result.num_forced,
        num_recomputed_tokens=result.num_recomputed_tokens,
        num_offloaded_blocks=result.counters.num_offloads_completed,
        num_onboarded_blocks=result.counters.num_onboards_completed,
        num_used_blocks_peak=watch.num_used_blocks_peak,
        num_host_blocks_peak=result.num_host_blocks_peak,
        paused_tokens_peak=watch.paused_tokens_peak,
        virtual_s=metrics.span_s(streams),
    )


def _stalls(stream: metrics.Stream) -> bool:
    return bool(np.any(metrics.waits_s(stream) > metrics.CLIENT_VISIBLE_STALL_S))
