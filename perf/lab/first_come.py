"""A burst on the cost model alone, in a few numbers: first come, first served, fully reserved.

For comparisons with published figures, where hundreds of long answers would take minutes step by
step: stretches in which nobody comes or goes are summed in closed form. Not the product: no
scheduler, no blocks, no pause. Owns the sums. Everybody arrives at 0 and is admitted in order as
soon as prompt and output fit in the pool, then prefilled (the others generate beside) and generated
to the end. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perf.lab.roofline import (
    RooflineCosts,
    StepTotals,
    decode_totals,
    num_causal_pairs,
)
from tokenflow import metrics


class Length(NamedTuple):
    """Tokens of one request."""

    num_prompt_tokens: int
    num_output_tokens: int


class BurstFigures(NamedTuple):
    """Seconds: to the first token, and per output token after it (mean over requests)."""

    mean_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float


@dataclass(eq=False, slots=True)
class _Stream:
    length: Length
    first_time: float = 0.0
    num_context: int = 0
    num_left: int = 0


@dataclass(eq=False)
class _Burst:
    """now: instant reached. reserved: tokens of the pool promised to `running`."""

    costs: RooflineCosts
    now: float = 0.0
    reserved: int = 0
    running: list[_Stream] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)

    def prefill(self, newcomers: Sequence[_Stream], max_num_tokens: int) -> None:
        """Compute their prompts, whoever runs generating beside."""
        todo = [(stream, stream.length.num_prompt_tokens) for stream in newcomers]
        while todo:
            num_decode = len(self.running)
            room = max(1, max_num_tokens - num_decode)
            num_read = sum(stream.num_context + 1 for stream in self.running)
            num_prefill = pairs = 0
            ended: list[_Stream] = []
            while todo and room:
                stream, left = todo[0]
                num = min(room, left)
                pairs += num_causal_pairs(stream.num_context, num)
                stream.num_context += num
                num_read += stream.num_context
                num_prefill, room = num_prefill + num, room - num
                todo[0] = (stream, left - num)
                if left == num:
                    ended.append(todo.pop(0)[0])
            num_sampled = num_decode + len(ended)
            self.now += self.costs.step_s(
                StepTotals(num_decode, num_read, num_prefill, pairs, num_sampled)
            )
            self._generated(1)
            for stream in ended:
                stream.first_time, stream.num_left = self.now, stream.length.num_output_tokens - 1
                self.ttfts.append(self.now)
            self.running += ended
            self._generated(0)

    def decode(self) -> None:
        """Generate until the next stream ends: only the context grows, so the sum is exact."""
        num, steps = len(self.running), min(stream.num_left for stream in self.running)
        num_read = sum(stream.num_context + 1 for stream in self.running)
        first_s = self.costs.step_s(decode_totals(num, num_read))
        growth_s = self.costs.step_s(decode_totals(num, num_read + num)) - first_s
        self.now += steps * first_s + growth_s * steps * (steps - 1) / 2
        self._generated(steps)

    def _generated(self, num_tokens: int) -> None:
        for stream in self.running:
            stream.num_context += num_tokens
            stream.num_left -= num_tokens
        for stream in [stream for stream in self.running if stream.num_left <= 0]:
            self.running.remove(stream)
            self.reserved -= sum(stream.length)
            if stream.length.num_output_tokens > 1:
                seconds = self.now - stream.first_time
                self.tpots.append(seconds / (stream.length.num_output_tokens - 1))


def play_burst(
    costs: RooflineCosts,
    lengths: Sequence[Length],
    *,
    pool_tokens: int,
    max_batch_size: int = 1 << 20,
    max_num_tokens: int = 8192,
) -> BurstFigures:
    """The figures of a burst of `lengths` at instant 0.

    Raises ValueError for one that does not fit in the pool, or without a token on either side.
    """
    if not lengths or any(min(one) < 1 or sum(one) > pool_tokens for one in lengths):
        raise ValueError(f"every request needs tokens, and must fit in a pool of {pool_tokens}")
    burst, queue = _Burst(costs), [_Stream(one) for one in reversed(lengths)]
    while queue or burst.running:
        newcomers: list[_Stream] = []
        while (
            queue
            and burst.reserved + sum(queue[-1].length) <= pool_tokens
            and len(burst.running) + len(newcomers) < max_batch_size
        ):
            burst.reserved += sum(queue[-1].length)
            newcomers.append(queue.pop())
        if newcomers:
            burst.prefill(newcomers, max_num_tokens)
        else:
            burst.decode()
    tpot_s = sum(burst.tpots) / len(burst.tpots) if burst.tpots else float("nan")
    return BurstFigures(
        sum(burst.ttfts) / len(burst.ttfts), metrics.percentile(burst.ttfts, 99), tpot_s
    )
