"""The set-ups: what Table 1 prints, their load, and that their engines can run them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from perf.lab import setups
from perf.lab.lengths import Fixed
from perf.lab.mixes import Mix, OneRate
from perf.lab.setups import SETUPS, TABLE_1, Setup
from perf.lab.workloads import Singles
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest
from tokenflow.policies import FcfsReservePolicy
from tokenflow.scheduler import plan

# Requests, mean prompt, mean answer, arrivals/s (0: a burst); H200 answers are doubled.
PRINTED = {
    "h200-a": (400, 512, 4096, 0),
    "h200-b": (200, 1024, 4096, 0),
    "h200-c": (300, 512, 4096, 5),
    "h200-d": (300, 512, 4096, 10),
    "4090-a": (60, 512, 2048, 0),
    "4090-b": (80, 1024, 2048, 0),
    "4090-c": (200, 512, 2048, 2),
    "4090-d": (200, 512, 2048, 4),
}


def test_table_1_is_as_printed() -> None:
    assert set(TABLE_1) == set(PRINTED)
    for name, (num, prompt, answer, rate) in PRINTED.items():
        many = [r for seed in range(10) for r in setups.requests(SETUPS[name], seed)]
        assert len(many) == 10 * num, name
        assert np.mean([r.num_prompt_tokens for r in many]) == pytest.approx(prompt, rel=0.03)
        assert np.mean([r.max_tokens for r in many]) == pytest.approx(answer, rel=0.03)
        last = np.mean([setups.requests(SETUPS[name], seed)[-1].arrival_time for seed in range(10)])
        assert last == pytest.approx(num / rate, rel=0.1) if rate else last <= 1e-3 * num
        assert {r.read_rate for r in many} == {6.0}


def test_pools_are_those_of_the_paper() -> None:
    """About 200,000 tokens on the H200 at 0.3, about 40,000 on the 4090; 9 and 4 times as much is
    asked for by their first bursts."""
    for name, tokens, times in (("h200-a", 200_000, 9.2), ("4090-a", 40_000, 3.8)):
        machine = setups.engine(SETUPS[name])
        pool = machine.num_total_blocks * machine.tokens_per_block
        assert pool == pytest.approx(tokens, rel=0.1)
        wanted = sum(r.num_prompt_tokens + r.max_tokens for r in setups.requests(SETUPS[name], 0))
        assert wanted / pool == pytest.approx(times, rel=0.1)


@pytest.mark.parametrize("name", SETUPS)
def test_every_request_of_a_set_up_can_run_on_its_engine(name: str) -> None:
    setup = SETUPS[name]
    machine = setups.engine(setup)
    work = setups.requests(setup, seed=1)
    assert work == setups.requests(setup, seed=1)
    assert work != setups.requests(setup, seed=2)
    assert work == sorted(work, key=lambda r: r.arrival_time)
    for request in work:
        num_tokens = request.num_prompt_tokens + request.max_tokens
        assert num_tokens <= machine.max_seq_len
        assert num_tokens <= machine.num_total_blocks * machine.tokens_per_block
    assert machine.max_batch_size * np.mean(
        [r.num_prompt_tokens + r.max_tokens / 2 for r in work]
    ) > (machine.num_total_blocks * machine.tokens_per_block), "slots are short, not KV"


def test_a_set_up_at_another_rate_is_the_same_work() -> None:
    slow, fast = (
        setups.requests(setups.with_rate(SETUPS["h200-c"], rate), 1) for rate in setups.READ_RATES
    )
    assert {r.read_rate for r in fast} == {20.0}
    assert [dataclasses.replace(r, read_rate=6.0) for r in fast] == slow
    assert setups.with_rate(SETUPS["4090-a"], 20.0).read_rate == 20.0
    assert SETUPS["mixed-readers"].read_rate is None


def test_host_memory_is_as_asked_for() -> None:
    for gigabytes in (0, 32, 128):
        machine = setups.engine(setups.with_host(SETUPS["h200-a"], gigabytes))
        assert machine.num_host_blocks == gigabytes * 10**9 // machine.block_bytes
    setups.engine(setups.with_host(SETUPS["h200-a"], setups.MAX_HOST_GB)).config()
    for wrong in (-1, setups.MAX_HOST_GB + 1):
        with pytest.raises(ValueError, match="gigabytes"):
            setups.with_host(SETUPS["h200-a"], wrong)


def test_an_unknown_set_up_is_named() -> None:
    assert setups.find("4090-d") is SETUPS["4090-d"]
    with pytest.raises(ValueError, match="no set-up named 'h100-a'; there are h200-a"):
        setups.find("h100-a")


def test_engine_rules_are_passed_on() -> None:
    machine = setups.engine(
        SETUPS["4090-a"],
        capacity_policy="max_utilization",
        kv_tiering=True,
        enable_chunked_context=False,
        lease_tokens=256,
    )
    assert machine.capacity_policy == "max_utilization"
    assert machine.kv_tiering
    assert not machine.enable_chunked_context
    assert machine.lease_tokens == 256


def test_load_is_that_of_the_worst_moment_at_mid_life() -> None:
    """Readers stay 10 s each; the first has gone when the third comes. Two streams of 150 tokens
    at mid-life decode together."""
    work = [
        SimRequest(arrival_time=at, num_prompt_tokens=100, max_tokens=100, read_rate=10.0)
        for at in (0.0, 5.0, 10.0)
    ]
    machine = setups.engine(SETUPS["4090-a"])
    load = setups.schedulable(machine, work)
    assert load.sum_rate == 20.0
    assert load.capacity == pytest.approx(setups.decode_capacity(machine, 2, 150.0))
    machines = [dataclasses.replace(r, read_rate=None) for r in work]
    assert setups.schedulable(machine, machines).sum_rate == 18.0
    with pytest.raises(ValueError, match="no work"):
        setups.schedulable(machine, [])


def test_capacity_is_what_a_full_pool_decodes() -> None:
    machine = SimEngine(max_batch_size=10, num_total_blocks=100, tokens_per_block=10)
    step_s = 0.045 + 0.0013 * 4 + 2.6e-6 * 4 * 250
    assert setups.decode_capacity(machine, 9, 250.0) == pytest.approx(4 / step_s)
    assert setups.decode_capacity(machine, 2, 250.0) < setups.decode_capacity(machine, 9, 250.0)
    step_s = 0.045 + 0.0013 * 10 + 2.6e-6 * 10 * 50
    assert setups.decode_capacity(machine, 99, 50.0) == pytest.approx(10 / step_s)


def test_the_papers_bursts_are_schedulable_at_6_and_not_at_20_tokens_per_s() -> None:
    for name in ("h200-a", "4090-a", "4090-b"):
        slow, fast = (
            setups.schedulable(setups.engine(setup), setups.requests(setup, 0))
            for setup in (setups.with_rate(SETUPS[name], rate) for rate in setups.READ_RATES)
        )
        assert slow.sum_rate < slow.capacity
        assert fast.sum_rate > fast.capacity


def test_a_small_form_of_a_set_up_runs() -> None:
    setup = SETUPS["4090-a"]
    assert isinstance(setup.workload, Singles)
    small: Setup = dataclasses.replace(
        setup,
        workload=dataclasses.replace(
            setup.workload,
            num_requests=12,
            answers=Fixed(20),
            mix=Mix(readers=OneRate(6.0), machine_share=0.5),
        ),
    )
    result = Simulation(
        setups.requests(small, 1),
        lambda snap: plan(snap, FcfsReservePolicy()),
        setups.engine(small),
    ).run()
    assert [len(q.token_times) for q in result.seqs] == [20] * 12
