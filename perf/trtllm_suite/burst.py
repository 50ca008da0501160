"""Section: one burst under three policies, through the whole runtime, on an engine each.

Readers fill every slot of the engine; while they read, twice as many newcomers come within a short
time. What they read per second together is a share LOAD of what the engine makes, so the same
burst fits a large GPU and a small one: lengths and rates follow from the measured time of a step.

    fcfs-reserve      first come first served, the whole length reserved (GUARANTEED_NO_EVICT)
    fcfs              the same, blocks as they are needed (MAX_UTILIZATION)
    tokenflow         the product, as it is configured by default

Measures are those of tokenflow.metrics, on the instants at which the runtime hands tokens out.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.shape import Prompts
from perf.trtllm_suite.values import Deadline, Findings, SuiteError
from tokenflow import metrics
from tokenflow.config import ServingConfig
from tokenflow.executor.api import Executor
from tokenflow.executor.factory import served_config
from tokenflow.runtime import Runtime
from tokenflow.types import EndReason, GenerateRequest, TokenEvent

POLICIES: dict[str, dict[str, str]] = {
    "fcfs-reserve": {"scheduling_policy": "fcfs-reserve"},
    "fcfs": {"scheduling_policy": "fcfs-reserve", "batch_scheduler_policy": "max_utilization"},
    "tokenflow": {"scheduling_policy": "tokenflow"},
}
LOAD = 0.6
MIN_THROUGHPUT_RATIO = 0.85
"""Raw throughput of tokenflow to that of the better baseline, below which the report remarks it."""

_SLOTS = 8
_USUAL_SPAN_S, _SHORT_SPAN_S = 20.0, 1.5  # of readers
_BURST_AT = 0.3  # of the time that readers are generated
_NUM_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRequest:
    """One of them. send_offset_s: after the start."""

    is_reader: bool
    input_token_ids: tuple[int, ...]
    max_tokens: int
    read_rate: float
    send_offset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """What is played. num_pool_tokens: all readers at their full length, no more."""

    requests: tuple[BurstRequest, ...]
    num_slots: int
    num_pool_tokens: int
    step_s: float


@dataclass
class _Heard:
    """What the runtime says; told by its thread."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    times: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, tuple[EndReason, str | None]] = field(default_factory=dict)
    num_pauses: int = 0

    def emit(self, event: TokenEvent) -> None:
        now = time.monotonic()
        with self.changed:
            self.times.setdefault(event.handle, []).extend([now] * len(event.token_ids))
            if event.end is not None:
                self.ends[event.handle] = (event.end, event.error)
                self.num_pauses += event.usage.num_pauses if event.usage else 0
                self.changed.notify()


def make_plan(prompts: Prompts, engines: Engines, step_s: float, duration_s: float) -> BurstPlan:
    """A burst for an engine whose step of a full batch takes `step_s`: readers are generated for
    `duration_s`, or as long as the engine's sequences may be."""
    built = engines.built
    slots = min(_SLOTS, built.max_batch_size)
    prompt_len, short_len = 2 * built.tokens_per_block, built.tokens_per_block
    length = int(duration_s / step_s)
    length = max(32, min(length, built.max_seq_len - prompt_len - 1))
    rate = LOAD * (slots / step_s) / (3 * slots)
    requests = [
        BurstRequest(
            is_reader=True,
            input_token_ids=prompts.make(prompt_len),
            max_tokens=length - 3 * index,
            read_rate=rate,
            send_offset_s=2 * step_s * index,
        )
        for index in range(slots)
    ]
    burst_at = _BURST_AT * length * step_s
    requests += [
        BurstRequest(
            is_reader=False,
            input_token_ids=prompts.make(short_len + index),
            max_tokens=max(8, length // 10),
            read_rate=rate,
            send_offset_s=burst_at + index * step_s,
        )
        for index in range(2 * slots)
    ]
    block = built.tokens_per_block
    per_reader = -(-(prompt_len + length) // block) * block
    return BurstPlan(
        requests=tuple(requests), num_slots=slots, num_pool_tokens=slots * per_reader, step_s=step_s
    )


def measure_step_s(engines: Engines) -> float:
    """Seconds of a step with a full batch: the median gap of its streams."""
    with engines.streams() as streams:
        num = min(_SLOTS, engines.built.max_batch_size)
        ids = [
            streams.enqueue(engines.prompts.make(engines.shape.prompt_lens[0] + i), 40)
            for i in range(num)
        ]
        outputs = [streams.finish(request_id) for request_id in ids]
    gaps = [g for o in outputs for g in np.diff(o.times[len(o.times) // 2 :]).tolist()]
    return max(1e-4, float(statistics.mean(gaps)))


def play(
    executor: Executor, config: ServingConfig, plan: BurstPlan, deadline: Deadline, margin_s: float
) -> dict[str, Any]:
    """Run the burst once; its figures. Raises SuiteError when a request fails or loses tokens."""
    heard = _Heard()
    runtime = Runtime(executor, served_config(config, executor), emit=heard.emit)
    runtime.start()
    try:
        _warm_up(runtime, heard, plan, deadline)
        heard.num_pauses = 0
        start_time = time.monotonic() + margin_s
        handles: dict[int, tuple[BurstRequest, float]] = {}
        for request in plan.requests:
            _sleep_until(start_time + request.send_offset_s)
            handles[_submit(runtime, request)] = (request, time.monotonic())
        _wait(heard, list(handles), deadline)
    finally:
        runtime.shutdown(5.0)
    streams: dict[bool, list[metrics.Stream]] = {True: [], False: []}
    for handle, (request, sent_time) in handles.items():
        times = heard.times[handle]
        if len(times) != request.max_tokens:
            raise SuiteError(f"a request of {request.max_tokens} tokens got {len(times)}")
        streams[request.is_reader].append(
            metrics.Stream(
                arrival_time=sent_time, token_times=np.array(times), read_rate=request.read_rate
            )
        )
    return _figures(streams, heard.num_pauses)


def _submit(runtime: Runtime, request: BurstRequest) -> int:
    return runtime.submit(
        GenerateRequest(
            request_id="burst",
            input_token_ids=request.input_token_ids,
            max_tokens=request.max_tokens,
            arrival_time=time.monotonic(),
            read_rate=request.read_rate,
        )
    )


def _warm_up(runtime: Runtime, heard: _Heard, plan: BurstPlan, deadline: Deadline) -> None:
    """A full batch, so that costs are learned and no first use falls into the measurement."""
    size = len(plan.requests[0].input_token_ids)
    handles = [
        _submit(
            runtime,
            BurstRequest(
                is_reader=True,
                input_token_ids=tuple(range(1, 1 + size))[::-1],
                max_tokens=_NUM_WARM_UP_TOKENS,
                read_rate=plan.requests[0].read_rate,
                send_offset_s=0.0,
            ),
        )
        for _ in range(plan.num_slots)
    ]
    _wait(heard, handles, deadline)


def _wait(heard: _Heard, handles: Sequence[int], deadline: Deadline) -> None:
    with heard.changed:
        while not heard.ends.keys() >= set(handles):
            deadline.check("the end of a burst")
            heard.changed.wait(0.2)
    for handle in handles:
        end, error = heard.ends[handle]
        if end is not EndReason.LENGTH:
            raise SuiteError(f"a request of the burst ended with {end.value}: {error}")


def _sleep_until(instant: float) -> None:
    time.sleep(max(0.0, instant - time.monotonic()))


def _figures(streams: dict[bool, list[metrics.Stream]], num_pauses: int) -> dict[str, Any]:
    everybody = streams[True] + streams[False]
    first_s = [metrics.ttft_s(stream) for stream in streams[False]]
    stalls = [s for stream in everybody
              for s in metrics.stalls(stream, metrics.CLIENT_VISIBLE_STALL_S)]  # fmt: skip
    return {
        "ttft_p50_s": round(metrics.percentile(first_s, 50), 4),
        "ttft_p99_s": round(metrics.percentile(first_s, 99), 4),
        "raw_throughput": round(metrics.raw_throughput(everybody), 2),
        "effective_throughput": round(metrics.effective_throughput(everybody), 2),
        "num_stalls": len(stalls),
        "longest_stall_s": round(max((s.duration_s for s in stalls), default=0.0), 3),
        "num_pauses": num_pauses,
    }


def check_burst(engines: Engines) -> Findings:
    """Newcomers get their first token sooner under tokenflow, and all tokens come under all."""
    found = Findings()
    step_s = measure_step_s(engines)
    duration_s = _SHORT_SPAN_S if engines.settings.is_short else _USUAL_SPAN_S
    plan = make_plan(engines.prompts, engines, step_s, duration_s)
    engines.close()
    span_s = plan.requests[0].max_tokens * step_s
    found.figures = {
        "step_s": round(step_s, 5),
        "num_slots": plan.num_slots,
        "reader_tokens": plan.requests[0].max_tokens,
        "newcomer_tokens": plan.requests[-1].max_tokens,
        "read_rate": round(plan.requests[0].read_rate, 2),
        "load": LOAD,
    }
    for name, policy in POLICIES.items():
        config = engines.config(_parameters(engines, plan, policy, span_s))
        executor = engines.start(config)
        try:
            deadline = Deadline(engines.settings.section_limit_s)
            found.figures[name] = play(executor, config, plan, deadline, margin_s=0.2)
        finally:
            executor.shutdown()
    _judge(found)
    return found


def _parameters(
    engines: Engines, plan: BurstPlan, policy: dict[str, str], span_s: float
) -> dict[str, str]:
    """Margins of the scheduler are those of people who read for minutes; a burst of seconds gets
    the same share of its length. And the averages of arrivals look back for seconds: in a burst
    that is hardly longer they would keep a slot free to its end, so it goes without them."""
    scale = min(1.0, span_s / _USUAL_SPAN_S)
    pool_blocks = plan.num_pool_tokens // engines.built.tokens_per_block
    return {
        "max_batch_size": str(plan.num_slots),
        "max_tokens_in_paged_kv_cache": str(plan.num_pool_tokens),
        "kv_cache_host_memory_bytes": str(pool_blocks * engines.built.block_bytes),
        "slack_margin_s": str(round(0.5 * scale, 3)),
        "min_quantum_s": str(round(1.0 * scale, 3)),
        "plan_interval_s": str(round(max(0.01, 0.05 * scale), 3)),
        "max_queue_size": "256",
        "anticipate_arrivals": str(scale > 0.5).lower(),
        **policy,
    }


def _judge(found: Findings) -> None:
    ours, reserve = found.figures["tokenflow"], found.figures["fcfs-reserve"]
    baselines = [found.figures[name] for name in POLICIES if name != "tokenflow"]
    best = max(baseline["raw_throughput"] for baseline in baselines)
    found.figures["ttft_p99_ratio"] = round(ours["ttft_p99_s"] / reserve["ttft_p99_s"], 3)
    found.figures["raw_throughput_ratio"] = round(ours["raw_throughput"] / best, 3)
    if ours["ttft_p99_s"] >= min(baseline["ttft_p99_s"] for baseline in baselines):
        found.faults.append(
            f"P99 time to first token {ours['ttft_p99_s']} s is not below that of a baseline"
        )
    if not ours["num_pauses"]:
        found.faults.append("tokenflow paused nobody: the burst did not press the engine")
    if found.figures["raw_throughput_ratio"] < MIN_THROUGHPUT_RATIO:
        found.remarks.append(
            f"raw throughput is {found.figures['raw_throughput_ratio']:.2f} of the better "
            "baseline's"
        )
    if ours["num_stalls"]:
        found.remarks.append(f"{ours['num_stalls']} stalls over 250 ms under tokenflow")
