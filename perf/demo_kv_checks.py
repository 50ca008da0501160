"""Was it the pool that was short, and what was it worth: read from a run's trace.

Pure. The trace says who came and went and how many streams each iteration computed; in order of
arrival, who has blocks is who came first.
"""

from __future__ import annotations

import math

from perf.analysis import BenchmarkError
from perf.trace_view import ARRIVAL_GRACE_S, Iteration, Trace, capacity
from tokenflow.config import ServingConfig


def num_pool_blocks(config: ServingConfig) -> int:
    """Blocks of the device pool."""
    return config.max_tokens_in_paged_kv_cache // config.tokens_per_block


def check_baseline(trace: Trace, num_blocks: int, max_batch_size: int) -> None:
    """Raises BenchmarkError unless a server that reserves in order of arrival used all the room
    that it could, and lacked blocks, never slots."""
    num_idle = num_short = 0
    for step in trace.iterations:
        if step.num_scheduled >= max_batch_size:
            raise BenchmarkError("it was not the pool that was short: the baseline used all slots")
        if step.num_ctx_tokens:
            continue  # a prompt may take the tokens that others could have had
        # Whether one that ends just now has its blocks yet is known to a moment only.
        fits = {_next_fits(trace, step, num_blocks, s) for s in (0.0, ARRIVAL_GRACE_S)}
        num_idle += fits == {True}
        num_short += fits == {False}
    if num_idle:
        raise BenchmarkError(
            f"the baseline had room in {num_idle} iterations in which somebody waited who would "
            "have fitted"
        )
    if not num_short:
        raise BenchmarkError("it was not the pool that was short: nobody waited for blocks")


def _next_fits(trace: Trace, step: Iteration, num_blocks: int, grace_s: float) -> bool | None:
    """Whether the next in line would have fitted beside those that `step` computed; None without
    one. grace_s: who ends so soon after it is left out."""
    unfinished = [
        request.num_blocks
        for request in sorted(trace.requests.values(), key=lambda r: r.arrival_time)
        if request.arrival_time <= step.start_time - ARRIVAL_GRACE_S
        and (request.end_time is None or request.end_time > step.end_time + grace_s)
    ]
    if len(unfinished) <= step.num_scheduled:
        return None
    return sum(unfinished[: step.num_scheduled + 1]) <= num_blocks


def fullest_capacity(trace: Trace) -> float:
    """Γ: tokens/s with as many streams in the batch as the pool ever allowed for two steps in a
    row; less than all slots would give. NaN when that cannot be measured."""
    for size in sorted({step.num_scheduled for step in trace.iterations}, reverse=True):
        tokens_per_s = capacity(trace, size) if size else math.nan
        if not math.isnan(tokens_per_s):
            return tokens_per_s
    return math.nan


def peak_pool_share(trace: Trace, num_blocks: int) -> float:
    """Share of the device pool that requests in the engine used, at its fullest."""
    return 1 - min(step.free_num_blocks for step in trace.iterations) / num_blocks
