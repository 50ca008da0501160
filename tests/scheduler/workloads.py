"""Fixed workloads for the simulation: the demo's burst and a sustained stream of requests."""

from __future__ import annotations

import dataclasses
import random

from perf.virtual_values import SimRequest


def demo(*, num_newcomers: int = 16, rate: float = 4.0, seed: int = 1) -> list[SimRequest]:
    """8 readers 0.3 s apart with long answers; a burst of short questions within 1 s at 10 s."""
    rng = random.Random(seed)
    readers = [
        SimRequest(
            arrival_time=0.3 * i,
            num_prompt_tokens=rng.randint(60, 140),
            max_tokens=rng.randint(320, 400),
            read_rate=rate,
        )
        for i in range(8)
    ]
    newcomers = [
        SimRequest(
            arrival_time=10.0 + i / num_newcomers,
            num_prompt_tokens=rng.randint(30, 60),
            max_tokens=rng.randint(40, 60),
            read_rate=rate,
            kind="newcomer",
        )
        for i in range(num_newcomers)
    ]
    return readers + newcomers


def machines(requests: list[SimRequest], every: int) -> list[SimRequest]:
    """Every n-th request has no reader."""
    return [
        dataclasses.replace(r, read_rate=None) if i % every == 0 else r
        for i, r in enumerate(requests)
    ]


def sustained(arrivals_per_s: float, *, num: int = 40, seed: int = 5) -> list[SimRequest]:
    """Arrivals at random, lengths from 60 to 400 tokens, readers of 3 to 6 tokens/s."""
    rng = random.Random(seed)
    now, result = 0.0, []
    for _ in range(num):
        now += rng.expovariate(arrivals_per_s)
        result.append(
            SimRequest(
                arrival_time=now,
                num_prompt_tokens=rng.randint(30, 150),
                max_tokens=rng.choice([60, 150, 300, 400]),
                read_rate=rng.choice([3.0, 4.0, 5.0, 6.0]),
                kind="newcomer",
            )
        )
    return result
