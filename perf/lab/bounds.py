"""What no schedule can do better: time to first token, throughput.

Owns the bounds that are set beside what policies reach. They follow from the cost model, the
engine's limits and the work alone, so they are the same for every policy that runs on that engine;
one without chunks has larger steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perf.lab.roofline import (
    RooflineCosts,
    StepTotals,
    decode_totals,
    num_causal_pairs,
    prefill_totals,
)
from perf.virtual.values import SimEngine, SimRequest
from tokenflow import metrics


class PrefillBound(NamedTuple):
    """Seconds to the first token, of all requests; p99 by nearest rank."""

    mean_s: float
    p99_s: float


def prefill_bound_s(
    costs: RooflineCosts,
    prompt_lengths: Sequence[int],
    arrival_times: Sequence[float],
    max_num_tokens: int = 8192,
) -> PrefillBound:
    """Times to first token if the GPU did nothing but prefill, in order of arrival (ties: as
    given), each step with as many tokens as there are, up to `max_num_tokens`, prompts cut where
    the step is full. A prompt's first token comes at the end of the step with its last one.

    A bound in this order and with these steps: nothing decodes beside, memory has no end. Shortest
    first would lower the mean where lengths differ, smaller steps where the first few count.
    Raises ValueError for a prompt without a token, or lists of different lengths.
    """
    if any(num < 1 for num in prompt_lengths):
        raise ValueError("every prompt needs a token")
    order = sorted(zip(arrival_times, prompt_lengths, strict=True), key=lambda request: request[0])
    ttfts: list[float] = []
    now, index, done = 0.0, 0, 0  # of order[index], `done` tokens are computed
    while index < len(order):
        now = max(now, order[index][0])
        room, ended = max_num_tokens, []
        num_read = num_prefill = pairs = 0
        while room and index < len(order) and order[index][0] <= now:
            arrival_time, length = order[index]
            num = min(room, length - done)
            num_read += done + num
            num_prefill += num
            pairs += num_causal_pairs(done, num)
            room, done = room - num, done + num
            if done == length:
                ended.append(arrival_time)
                index, done = index + 1, 0
        now += costs.step_s(StepTotals(0, num_read, num_prefill, pairs, len(ended)))
        ttfts += [now - arrival_time for arrival_time in ended]
    if not ttfts:
        return PrefillBound(float("nan"), float("nan"))
    return PrefillBound(sum(ttfts) / len(ttfts), metrics.percentile(ttfts, 99))


def raw_throughput_bound(
    costs: RooflineCosts, engine: SimEngine, requests: Sequence[SimRequest]
) -> float | None:
    """Output tokens/s, from the first arrival to the last token, that no schedule exceeds.

    There are so many steps, at least, as the longest answer has tokens, as all tokens fill
    (`max_num_tokens`), as those generated need of the batch slots, and as it takes to read the KV
    of all that are generated at no more than the whole pool a step. Each step reads the weights,
    prefill hides behind that as far as it can, and nothing is copied or computed twice. Nor can the
    last token come before the last request, alone on the engine, has all of its own.

    None where it is not known: prompts that share blocks, which the pool holds once, and clients
    that leave. `costs` are those of `engine`.
    """
    if not requests or any(_is_unknown(request) for request in requests):
        return None
    first_time = min(request.arrival_time for request in requests)
    num_steps = max(request.max_tokens for request in requests)
    work, alone_s = StepTotals(), 0.0
    for request in requests:
        own = _work(request)
        work = StepTotals(*map(sum, zip(work, own, strict=True)))
        own_s = costs.least_s(own, request.max_tokens)
        alone_s = max(alone_s, request.arrival_time - first_time + own_s)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    num_decode_reads = work.num_context_tokens_read - num_prompt_tokens
    least = (
        num_steps,
        (work.num_decode + work.num_prefill_tokens) / engine.max_num_tokens,
        work.num_decode / engine.max_batch_size,
        num_decode_reads / (engine.num_total_blocks * engine.tokens_per_block),
    )
    seconds = max(alone_s, costs.least_s(work, max(least)))
    return sum(request.max_tokens for request in requests) / seconds


def _is_unknown(request: SimRequest) -> bool:
    shares = request.num_shared_tokens or request.num_history_tokens
    return bool(shares) or request.cancel_after_s is not None


def _work(request: SimRequest) -> StepTotals:
    """All that one answer takes: its prompt in one piece, then a token at a time."""
    num_prompt, num_more = request.num_prompt_tokens, request.max_tokens - 1
    num_read = num_causal_pairs(num_prompt, num_more)  # a token sees all before it and itself
    parts = prefill_totals(num_prompt), decode_totals(num_more, num_read)
    return StepTotals(*map(sum, zip(*parts, strict=True)))
