"""Which loads an engine can certainly carry, and how long a first token may take then.

Both are made from what requests ask for and from the engine's true costs, never from what the
scheduler has learned or decided: a scheduler that is slow gets no more time for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from perf.virtual.values import SimEngine, SimRequest
from tokenflow.policies import TokenflowPolicy

POLICY = TokenflowPolicy()
CLEARLY = 0.5
"""Share of an engine's time up to which a load can clearly be carried."""
_LEFT_OVER = 2.0
"""Times as long because readers who are there take the other half of the engine."""
_ROUND_TRIP_STEPS = 5
"""A pause takes effect at a boundary, and so does a resume, each told a step later."""
_LATEST_START_S = 3.0
"""By which readers are taken to begin late when it is asked who is there."""


def rate(request: SimRequest) -> float:
    """Tokens/s that it counts with."""
    return request.read_rate or SimEngine().config().default_read_rate


def num_blocks(request: SimRequest, engine: SimEngine) -> int:
    """Blocks at its full length."""
    return -(-(request.num_prompt_tokens + request.max_tokens) // engine.tokens_per_block)


def mid_life(request: SimRequest) -> float:
    """Context when half the answer is there, tokens."""
    return request.num_prompt_tokens + 0.5 * request.max_tokens


def step_s(engine: SimEngine, batch: float, context: float) -> float:
    """Seconds of a decode step of so many streams with so much context each."""
    per_sequence = engine.step_per_sequence_s + engine.step_per_context_token_s * context
    return engine.step_base_s + batch * per_sequence


def share_asked(present: Sequence[SimRequest], engine: SimEngine) -> float:
    """Share of the engine's time that these ask for if all are there at once; infinite if it
    depends on luck whether all can be served.

    Per token of an answer: its part of a step of as many as surely fit together, of its prompt, and
    of bringing its KV back each time after a minimum run, if not all fit into the pool.
    """
    blocks = [num_blocks(r, engine) for r in present]
    fixed = [b for r, b in zip(present, blocks, strict=True) if not r.pausable]
    if 2 * len(fixed) > engine.max_batch_size or 2 * sum(fixed) > engine.num_total_blocks:
        return math.inf  # beyond the half that kinds which are never paused may hold
    room = engine.num_total_blocks - sum(fixed)
    if max(blocks) > room:
        return math.inf
    context = sum(map(mid_life, present)) / len(present)
    # What is left of the pool may be less than the largest needs.
    in_pool = (engine.num_total_blocks - max(blocks)) / (sum(blocks) / len(blocks)) + 1.0
    batch = max(1, int(min(len(present), engine.max_batch_size, in_pool)))
    seconds = step_s(engine, batch, context)
    if max(map(rate, present)) * seconds > CLEARLY:
        return math.inf  # faster than anybody can be given tokens
    return sum(
        rate(r)
        * (
            seconds / batch
            + r.num_prompt_tokens / engine.prefill_tokens_per_s / r.max_tokens
            + (sum(blocks) > engine.num_total_blocks) * _back_s(r, engine) / _turn(r, seconds)
        )
        for r in present
    )


def schedulable_part(requests: Sequence[SimRequest], engine: SimEngine) -> list[SimRequest]:
    """Those of `requests`, in order of arrival, that `engine` can clearly carry together: one that
    would ask for too much beside those who are there then is left out."""
    kept: list[SimRequest] = []
    for request in sorted(requests, key=lambda r: r.arrival_time):
        if share_asked([*there_at(request, kept), request], engine) <= CLEARLY:
            kept.append(request)
    return kept


def there_at(request: SimRequest, others: Sequence[SimRequest]) -> list[SimRequest]:
    """Those of `others` who came before `request` and whose readers are not done when it comes."""
    return [
        r
        for r in others
        if r.arrival_time
        <= request.arrival_time
        < r.arrival_time + _LATEST_START_S + r.max_tokens / rate(r)
    ]


def peak_share(requests: Sequence[SimRequest], engine: SimEngine) -> float:
    """`share_asked` at the worst arrival."""
    return max(share_asked([*there_at(r, requests), r], engine) for r in requests)


def first_token_bound_s(
    request: SimRequest, requests: Sequence[SimRequest], engine: SimEngine
) -> float:
    """Seconds within which the first token of `request` has come, in a load that can be carried.

    It waits for its share of the prefill backlog: of everybody who comes so long before or after
    it, one prefill, a step and a plan. While there are more of them than places, it waits for
    rounds: in each, those in the engine stay until they may yield. And others may pass it by for
    `max_bypass_s`.
    """
    bound = 0.0
    while True:
        crowd = [r for r in requests if abs(r.arrival_time - request.arrival_time) <= bound]
        longer = POLICY.max_bypass_s + _backlog_s(crowd, engine) + _rounds_s(crowd, engine)
        if longer <= bound:
            return bound
        bound = longer


def turn_s(crowd: Sequence[SimRequest], engine: SimEngine) -> float:
    """Seconds after which one of `crowd` may yield again: its minimum run, or until it has the
    slack for a round trip (it gets at least two tokens for each that it reads)."""
    context = sum(map(mid_life, crowd)) / len(crowd)
    seconds = step_s(engine, min(len(crowd), engine.max_batch_size), context)
    away_s = copies_s = 0.0
    if engine.num_host_blocks:
        block_s = engine.block_bytes / engine.copy_bytes_per_s
        away_s = engine.num_total_blocks * block_s / POLICY.link_share
        copies_s = 2 * context / engine.tokens_per_block * block_s
    round_trip_s = _ROUND_TRIP_STEPS * seconds + engine.plan_interval_s + copies_s
    slack_s = POLICY.conservativeness * round_trip_s + POLICY.slack_margin_s + away_s
    return max(POLICY.min_quantum_s, away_s, slack_s) + engine.plan_interval_s + 2 * seconds


def _backlog_s(crowd: Sequence[SimRequest], engine: SimEngine) -> float:
    context = sum(map(mid_life, crowd)) / len(crowd)
    seconds = step_s(engine, min(len(crowd), engine.max_batch_size), context)
    prefill_s = sum(r.num_prompt_tokens for r in crowd) / engine.prefill_tokens_per_s
    return prefill_s + len(crowd) * (seconds + engine.plan_interval_s)


def _rounds_s(crowd: Sequence[SimRequest], engine: SimEngine) -> float:
    fixed = [r for r in crowd if not r.pausable]
    blocks = [num_blocks(r, engine) for r in crowd]
    slots = engine.max_batch_size - min(len(fixed), engine.max_batch_size // 2)
    held = min(sum(num_blocks(r, engine) for r in fixed), engine.num_total_blocks // 2)
    # Of the pool, too, what is left over may be less than the largest needs.
    room = max(engine.num_total_blocks - held - max(blocks), max(blocks))
    num_rounds = max(len(crowd) / slots, sum(blocks) / room)
    return _LEFT_OVER * num_rounds * turn_s(crowd, engine) if num_rounds > 1 else 0.0


def _back_s(request: SimRequest, engine: SimEngine) -> float:
    """Seconds of the engine for bringing back its KV."""
    computed_s = mid_life(request) / engine.prefill_tokens_per_s
    if not engine.num_host_blocks:
        return computed_s
    copied_bytes = mid_life(request) / engine.tokens_per_block * engine.block_bytes
    return min(computed_s, 2 * copied_bytes / engine.copy_bytes_per_s)


def _turn(request: SimRequest, seconds: float) -> float:
    """Tokens that it is given at a time, with steps of so many seconds."""
    return min(request.max_tokens, max(1.0, POLICY.min_quantum_s / seconds))
