"""More than ten thousand pauses in virtual time: no order of events makes a reader stall.

Readers with long answers fill all slots, short questions come all the time and each makes somebody
yield. Responses are on their way for up to a step and a half, so that pauses, natural ends, ends of
leases, resumes and cancels by clients meet in every order. The load can be carried at all times.

TOKENFLOW_SOAK=n makes n times as many workloads.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from perf.virtual.values import SimEngine, SimRequest
from tests.scheduler.outcomes import Outcome
from tokenflow.metrics import CLIENT_VISIBLE_STALL_S, stalls
from tokenflow.policies import TokenflowPolicy
from tokenflow.types import EndReason

NUM_SEEDS = 4 * max(1, int(os.environ.get("TOKENFLOW_SOAK", "0")))
NUM_PAUSES = 640
"""At least so many in each run: four seeds in four modes make more than 10,000."""

NUM_SLOTS = 8
NUM_READERS = 14
BURST_S = 70.0
POLICY = TokenflowPolicy(min_quantum_s=0.2)
"""Default margins; streams may be paused more often, so that there is more to go wrong."""


@dataclass(frozen=True)
class Mode:
    name: str
    capacity_policy: str
    lease_tokens: int
    num_total_blocks: int


MODES = (
    Mode("cancel, all reserved", "guaranteed_no_evict", 0, 900),
    Mode("cancel, as needed", "max_utilization", 0, 520),
    Mode("lease 24", "guaranteed_no_evict", 24, 900),
    Mode("lease 9", "guaranteed_no_evict", 9, 900),
)


def workload(seed: int) -> list[SimRequest]:
    """14 readers of 2 or 3 tokens/s and some twelve short questions a second; of all a tenth leave
    before their end."""
    rng = random.Random(seed)

    def leaves(within_s: float) -> float | None:
        return rng.uniform(0.01, within_s) if rng.random() < 0.1 else None

    readers = [
        SimRequest(
            arrival_time=0.1 * i,
            num_prompt_tokens=rng.randint(10, 60),
            max_tokens=rng.randint(640, 880),
            read_rate=rng.choice([2.0, 3.0]),
            cancel_after_s=leaves(BURST_S),
        )
        for i in range(NUM_READERS)
    ]
    questions, now = [], 2.0
    while now < BURST_S:
        now += rng.expovariate(14.0)
        questions.append(
            SimRequest(
                arrival_time=now,
                num_prompt_tokens=rng.randint(5, 40),
                max_tokens=rng.randint(2, 6),
                read_rate=rng.choice([3.0, 5.0]),
                cancel_after_s=leaves(1.0),
            )
        )
    return readers + questions


def engine(mode: Mode) -> SimEngine:
    """Steps of 50 ms; responses arrive 0 to 1.5 steps after they were made."""
    return SimEngine(
        max_batch_size=NUM_SLOTS,
        num_total_blocks=mode.num_total_blocks,
        tokens_per_block=16,
        max_num_tokens=128,
        capacity_policy=mode.capacity_policy,
        lease_tokens=mode.lease_tokens,
        step_base_s=0.04,
        step_per_sequence_s=0.001,
        step_per_context_token_s=1e-7,
        prefill_tokens_per_s=4000.0,
        response_delays_s=(0.002, 0.03, 0.001, 0.075, 0.012),
    )


def num_tokens_after_a_pause(run: Outcome) -> int:
    """Tokens that came between the decision to pause their stream and the engine's answer to it:
    they were on their way already. (What ends a lease is a pause that nothing is answered to.)"""
    num_tokens = 0
    since: dict[str, float] = {}
    for event, time, fields in run.tracer.events:
        if event == "pause" and fields["why"] != "lease":
            since[fields["request_id"]] = time
        elif event == "paused":
            start = since.pop(fields["request_id"])
            times = run.result.seqs[int(fields["request_id"]) - 1].token_times
            num_tokens += sum(start < t <= time for t in times)
    return num_tokens


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_no_race_makes_a_reader_stall(mode: Mode, seed: int) -> None:
    run = Outcome(workload(seed), engine(mode), POLICY)
    result = run.result
    assert result.num_pauses >= NUM_PAUSES
    assert result.num_forced == result.num_internal_pauses == 0
    assert (result.num_lease_ends > 0) == (mode.lease_tokens > 0)
    num_left = 0
    for seq in result.seqs:
        assert not stalls(seq.stream, CLIENT_VISIBLE_STALL_S), seq
        if seq.end is EndReason.CANCELLED:
            assert len(seq.token_times) < seq.request.max_tokens
            assert seq.end_time >= max(seq.token_times, default=0.0)
            num_left += 1
        else:
            assert seq.end is EndReason.LENGTH
            assert len(seq.token_times) == seq.request.max_tokens
    assert num_left >= 10
    assert num_tokens_after_a_pause(run) > 100
