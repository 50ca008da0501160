"""Fixed workloads for virtual time: who asks what, when, and how fast they read.

Owns the lengths and instants; a prompt is only its length here. Invariant: same arguments, same
workload, from a fixed seed.
"""

from __future__ import annotations

import dataclasses
import random

from perf.virtual.values import SimRequest


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


def long_outputs(*, num_readers: int = 12, num_newcomers: int = 12) -> list[SimRequest]:
    """Readers of 4 tokens/s, one a second, whose answers are long; every five seconds from 20 s on
    a short question."""
    rng = random.Random(3)
    readers = [
        SimRequest(
            arrival_time=1.0 * i,
            num_prompt_tokens=rng.randint(60, 140),
            max_tokens=rng.randint(900, 1400),
        )
        for i in range(num_readers)
    ]
    newcomers = [
        SimRequest(
            arrival_time=20.0 + 5.0 * i,
            num_prompt_tokens=rng.randint(30, 60),
            max_tokens=rng.randint(40, 60),
            kind="newcomer",
        )
        for i in range(num_newcomers)
    ]
    return readers + newcomers


def crowd(requests: list[SimRequest], *, span_s: float = 4.0) -> list[SimRequest]:
    """Newcomers all at once after `span_s`, the others evenly over the first half of it."""
    others = [r for r in requests if r.kind != "newcomer"]
    step_s = 0.5 * span_s / len(others)
    at_once = [r for r in requests if r.kind == "newcomer"]
    return [
        *(dataclasses.replace(r, arrival_time=step_s * i) for i, r in enumerate(others)),
        *(dataclasses.replace(r, arrival_time=span_s) for r in at_once),
    ]


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
