"""A fixed burst for which the KV pool is too small, with parts of the tiers left out.

Owns the runs and their figures; workload and variants are bursts.py's. Each run has an engine and a
runtime of its own in this process, threads and all, and readers that never wait for one another;
only the model is shared. Runs of all variants alternate, in an order that rotates, so that what
else the machine does meets all of them. Completion is the time from the start of the burst to the
last token.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import numpy as np

from perf.analysis import BenchmarkError
from perf.kv.bursts import (
    FULL,
    TIMEOUT_S,
    VARIANTS,
    Burst,
    BurstRequest,
    Variant,
    burst_requests,
    random_tokens,
)
from perf.kv.models import TOKENS_PER_BLOCK, Model
from tokenflow.answers import Counters
from tokenflow.inflight.executor import InflightExecutor
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, Stream, percentile, stalls, ttft_s
from tokenflow.policies import TokenflowPolicy, policy_from_config
from tokenflow.runtime import Runtime
from tokenflow.scheduler import plan
from tokenflow.types import EndReason, GenerateRequest, TokenEvent

_POLL_S = 0.02
_NUM_WARMUPS = 3
_WARMUP_TOKENS = 4


class Receipts:
    """What the clients got. Filled by the runtime's thread, read when all have ended."""

    def __init__(self) -> None:
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self._ends: dict[int, TokenEvent] = {}
        self._changed = threading.Condition()

    def take(self, event: TokenEvent) -> None:
        """The runtime's `emit`."""
        now = time.monotonic()
        self.times[event.handle] += [now] * len(event.token_ids)
        if event.end is not None:
            with self._changed:
                self._ends[event.handle] = event
                self._changed.notify_all()

    def wait(self, handles: Sequence[int], look: Callable[[], None], until: float) -> None:
        """Until all have ended; `look` is called meanwhile. BenchmarkError if one of them did not
        get all it asked for, or not by `until`."""
        with self._changed:
            while not all(handle in self._ends for handle in handles):
                if time.monotonic() > until:
                    raise BenchmarkError("a burst does not come to an end")
                look()
                self._changed.wait(_POLL_S)
            ends = [self._ends[handle] for handle in handles]
        for event in ends:
            if event.end is not EndReason.LENGTH:
                raise BenchmarkError(f"a request ended by {event.end}: {event.error}")


@dataclass(slots=True)
class _Peaks:
    """The fullest moment of the pool, and most requests in the engine, as far as one looked."""

    pool: float = 0.0
    num_running: int = 0

    def look(self, runtime: Runtime) -> None:
        gauges = runtime.gauges()
        self.pool = max(self.pool, 1 - gauges.num_free_blocks / gauges.num_total_blocks)
        self.num_running = max(self.num_running, gauges.num_running)


def run_variant(model: Model, burst: Burst, variant: Variant) -> dict[str, Any]:
    """One run to the end of all requests; see `_figures`."""
    runner = model.runner()
    config = burst.config(variant, runner.kv_block_bytes(TOKENS_PER_BLOCK))
    engine = msgspec.structs.replace(config.executor_config(), overlap_copies=variant.overlap)
    policy = policy_from_config(config)
    assert isinstance(policy, TokenflowPolicy)
    policy = replace(policy, write_through=variant.write_through)
    receipts = Receipts()
    executor = InflightExecutor(runner, engine)
    runtime = Runtime(
        executor,
        config,
        emit=receipts.take,
        planner=lambda snapshot: plan(snapshot, policy),
    )
    runtime.start()
    try:
        _warm_up(runtime, receipts, runner.vocab_size)
        before = runtime.gauges().counters
        requests = burst_requests(burst, runner.vocab_size)
        start = time.monotonic()
        peaks = _Peaks()
        handles = []
        for request in requests:
            time.sleep(max(0.0, start + request.send_offset_s - time.monotonic()))
            handles.append(_submit(runtime, request, burst.read_rate))
            peaks.look(runtime)
        receipts.wait(handles, lambda: peaks.look(runtime), start + TIMEOUT_S)
        # One more turn of the runtime counts what the last iteration did.
        time.sleep(2 * config.plan_interval_s)
        after = runtime.gauges().counters
    finally:
        runtime.shutdown(10.0)
        executor.shutdown()
    streams = [
        Stream(
            arrival_time=start + request.send_offset_s,
            token_times=np.asarray(receipts.times[handle]),
            read_rate=burst.read_rate,
            output_length=request.max_tokens,
        )
        for request, handle in zip(requests, handles, strict=True)
    ]
    return _figures(variant, streams, start, _since(before, after), peaks)


def _submit(runtime: Runtime, request: BurstRequest, read_rate: float | None) -> int:
    return runtime.submit(
        GenerateRequest(
            request_id=f"{request.send_offset_s:.6f}",
            input_token_ids=request.input_token_ids,
            max_tokens=request.max_tokens,
            arrival_time=time.monotonic(),
            read_rate=read_rate,
        )
    )


def _warm_up(runtime: Runtime, receipts: Receipts, vocab_size: int) -> None:
    """A few short requests, so that steps are known and no first use falls into the burst."""
    generator = random.Random(0)
    for i in range(_NUM_WARMUPS):
        prompt = random_tokens(generator, 16 << i, vocab_size)
        request = BurstRequest(input_token_ids=prompt, max_tokens=_WARMUP_TOKENS, send_offset_s=0.0)
        handle = _submit(runtime, request, None)
        receipts.wait([handle], lambda: None, time.monotonic() + TIMEOUT_S)


def _since(before: Counters, after: Counters) -> Counters:
    names = Counters.__dataclass_fields__
    return Counters(**{name: getattr(after, name) - getattr(before, name) for name in names})


def _figures(
    variant: Variant, streams: Sequence[Stream], start: float, counters: Counters, peaks: _Peaks
) -> dict[str, Any]:
    """One run. Stalls are those a reader sees (> 250 ms); hidden_share: of the time of copies, for
    which no step waited; peaks as far as one looked."""
    first_s = [ttft_s(stream) for stream in streams]
    return {
        "variant": variant.name,
        "completion_s": max(float(s.token_times[-1]) for s in streams) - start,
        "ttft_p50_s": percentile(first_s, 50),
        "ttft_p99_s": percentile(first_s, 99),
        "num_stalls": sum(len(stalls(s, CLIENT_VISIBLE_STALL_S)) for s in streams),
        "num_pauses": counters.num_pauses,
        "num_forced_pauses": counters.num_forced_pauses + counters.num_internal_pauses,
        "num_recomputed_tokens": counters.num_recomputed_tokens,
        "num_offloaded_blocks": counters.num_offloads_completed,
        "num_onboarded_blocks": counters.num_onboards_completed,
        "copy_s": counters.offload_s + counters.onboard_s,
        "copy_wait_s": counters.copy_wait_s,
        "hidden_share": counters.hidden_copy_share,
        "peak_pool_fill": peaks.pool,
        "peak_num_running": peaks.num_running,
    }


def measure(
    model: Model,
    burst: Burst,
    num_runs: int,
    say: Callable[[str], None],
    variants: Sequence[Variant] = VARIANTS,
    until: float = math.inf,
) -> dict[str, Any]:
    """All runs, and a row per variant; see `summarise`. After the first round, none is begun that
    would end behind `until` (monotonic) if it took as long as the longest so far."""
    runs: list[dict[str, Any]] = []
    longest_s = 0.0
    for i in range(num_runs):
        round_start = time.monotonic()
        if i and round_start + longest_s > until:
            break
        first = i % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            say(f"burst, run {i + 1} of {num_runs}: {variant.name}")
            runs.append({"run": i, **run_variant(model, burst, variant)})
        longest_s = max(longest_s, time.monotonic() - round_start)
    return {
        "workload": msgspec.to_builtins(burst),
        "rows": summarise(runs, variants),
        "num_rounds_left_out": num_runs - len(runs) // len(variants),
        "runs": runs,
    }


_COUNTS = (
    "num_stalls",
    "num_pauses",
    "num_forced_pauses",
    "num_recomputed_tokens",
    "num_offloaded_blocks",
    "num_onboarded_blocks",
)
_WORST = ("ttft_p99_s", "peak_pool_fill", "peak_num_running")


def summarise(
    runs: Sequence[dict[str, Any]], variants: Sequence[Variant] = VARIANTS
) -> list[dict[str, Any]]:
    """A row per variant. completion_s and ratio are [lowest, median, highest] of the runs, ratio
    to `full` of the same round; n runs at least cover the true median with 1 - 2^(1 - n): 94 % for
    5. Counts are means per run, TTFT P99 and peaks the worst of all, the rest medians."""
    full = {run["run"]: run["completion_s"] for run in runs if run["variant"] == FULL.name}
    rows = []
    for variant in variants:
        own = [run for run in runs if run["variant"] == variant.name]
        row: dict[str, Any] = {
            "variant": variant.name,
            "num_runs": len(own),
            "completion_s": _interval([run["completion_s"] for run in own]),
            "ratio": _interval([run["completion_s"] / full[run["run"]] for run in own]),
            "paper_s": variant.paper_s,
            "paper_ratio": None
            if variant.paper_s is None or FULL.paper_s is None
            else variant.paper_s / FULL.paper_s,
        }
        for name in _COUNTS:
            row[name] = sum(run[name] for run in own) / len(own)
        for name in _WORST:
            row[name] = max(run[name] for run in own)
        for name in ("ttft_p50_s", "copy_s", "copy_wait_s", "hidden_share"):
            row[name] = median(run[name] for run in own)
        rows.append(row)
    return rows


def _interval(values: Sequence[float]) -> list[float]:
    return [min(values), median(values), max(values)]
