"""What a server knows that has run before: the costs of its engine, and how long answers are.

A benchmark starts on a server that has answered something, and so do users: what a step, a copy and
a pause take has been learned (tokenflow.costs). Owns the requests from which it is learned here:
one after the other, then a crowd with long prompts that the pool cannot hold at once, then one
with short prompts, so that decoding alone, prefill beside decoding, pauses and copies all occur,
and what a sequence costs can be told from what its context costs. They are no part of what is
measured.

Invariant: same engine, same costs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest
from tokenflow.costs import CostModel
from tokenflow.output_lengths import OutputLengths
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler import plan

_NUM_ALONE = 4
_NUM_SHORT = 96
_GAP_S = 600.0
"""Between the parts; nothing is left of one when the next begins."""

_ALONE_PROMPT, _LONG_PROMPT, _SHORT_PROMPT = 512, 2048, 128
_NUM_TOKENS = 48
_OVERFLOW = 1.2
"""KV of the crowd with long prompts, of what the pool holds."""

_READ_RATE = 6.0


def learned_costs(engine: SimEngine) -> CostModel:
    """What the product's scheduler has learned of `engine` after a warm-up; the caller's own."""
    return copy.deepcopy(_learned(engine))


@functools.lru_cache(maxsize=16)
def _learned(engine: SimEngine) -> CostModel:
    """Kept: a search for a load runs the same engine again and again."""
    policy = TokenflowPolicy()
    simulation = Simulation(_requests(engine), lambda s: plan(s, policy), engine)
    simulation.run(until=86_400)
    return simulation.costs


def learned_lengths(answered: Sequence[SimRequest]) -> OutputLengths:
    """What was learned from answers to these requests, whatever the policy."""
    lengths = OutputLengths()
    for request in answered:
        lengths.observe(request.max_tokens, stopped=request.ends_by_itself)
    return lengths


def _requests(engine: SimEngine) -> list[SimRequest]:
    pool_tokens = engine.num_total_blocks * engine.tokens_per_block
    num_long = 1 + int(_OVERFLOW * pool_tokens / (_LONG_PROMPT + _NUM_TOKENS))
    work = [(_GAP_S * i, _ALONE_PROMPT) for i in range(_NUM_ALONE)]
    work += [(_GAP_S * _NUM_ALONE, _LONG_PROMPT)] * num_long
    work += [(_GAP_S * (_NUM_ALONE + 1), _SHORT_PROMPT)] * _NUM_SHORT
    return [
        SimRequest(
            arrival_time=time,
            num_prompt_tokens=min(prompt, engine.max_seq_len // 2),
            max_tokens=_NUM_TOKENS + i % 7,
            read_rate=_READ_RATE,
        )
        for i, (time, prompt) in enumerate(work)
    ]
