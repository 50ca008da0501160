"""Cells: figures are those of the engine that runs, what cannot be run is refused before."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext

import pytest

from perf.lab import runs, setups
from perf.lab.measures import deterministic
from perf.lab.runs import Cell, Changes, CountingPlanner
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimRequest
from tokenflow.errors import ConfigError
from tokenflow.policies import FcfsReservePolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision, EndReason

WORK = tuple(
    SimRequest(arrival_time=0.01 * i, num_prompt_tokens=300, max_tokens=30, read_rate=6.0)
    for i in range(12)
)


def cell(policy: str = "tokenflow", changes: Changes = (), setup: str = "4090-a") -> Cell:
    return Cell(
        setup=setups.find(setup), policy=policy, seed=1, work=WORK, source="x", changes=changes
    )


def test_the_load_is_that_on_the_engine_that_runs() -> None:
    engine = setups.engine(setups.find("4090-a"))
    as_it_is, narrow = (
        runs.run_cell(cell(changes=changes)).record for changes in ((), (("max_batch_size", 4),))
    )
    assert as_it_is["capacity"] == setups.decode_capacity(engine, 12, 315.0)
    assert narrow["capacity"] == setups.decode_capacity(engine, 4, 315.0)
    assert narrow["load"] == narrow["sum_rate"] / narrow["capacity"]
    assert narrow["raw_throughput"] <= narrow["raw_bound"] < as_it_is["raw_bound"]


def test_larger_steps_have_a_bound_of_their_own() -> None:
    """Without chunks a step holds a whole prompt, so prompts take fewer steps."""
    work = tuple(
        SimRequest(arrival_time=0.0, num_prompt_tokens=1500, max_tokens=1) for _ in range(20)
    )
    chunked, whole = (
        runs.run_cell(dataclasses.replace(cell(name), work=work)).record
        for name in ("fcfs-reserve", "fcfs-reserve-unchunked")
    )
    assert chunked["raw_throughput"] <= chunked["raw_bound"] < whole["raw_bound"]
    assert chunked["raw_bound"] < whole["raw_throughput"] <= whole["raw_bound"]


def test_there_may_be_more_requests_than_a_vocabulary_has_tokens() -> None:
    """Prompts differ by their handles, which count the requests."""
    policy = FcfsReservePolicy()
    result = Simulation(
        WORK[:1],
        lambda snapshot: plan(snapshot, policy),
        prompts=lambda handle, request: (100_000 + handle,) * request.num_prompt_tokens,
    ).run()
    assert result.seqs[0].end is EndReason.LENGTH


def test_labels_say_what_runs() -> None:
    one = cell("tokenflow")
    assert (runs.labels(one)["uses_host"], runs.labels(one)["read_rate"]) == (True, 6.0)
    mixed = dataclasses.replace(WORK[0], read_rate=20.0)
    assert runs.labels(dataclasses.replace(one, work=(*WORK, mixed)))["read_rate"] is None
    less_than_a_block = setups.with_host(one.setup, 1e-4)
    assert not runs.labels(dataclasses.replace(one, setup=less_than_a_block))["uses_host"]


def test_cells_run_in_processes_give_the_same_records() -> None:
    cells = [cell(name) for name in ("fcfs-reserve", "tokenflow")]
    told: list[str] = []
    here = runs.run_cells(cells)
    there = runs.run_cells(cells, jobs=2, done=lambda run: told.append(run.cell.policy))
    assert [deterministic(a.record) for a in here] == [deterministic(b.record) for b in there]
    assert told == ["fcfs-reserve", "tokenflow"]


def test_a_policy_for_two_machines_counts_per_machine() -> None:
    record = runs.run_cell(cell("disaggregated")).record
    assert record["num_machines"] == 2
    assert record["raw_throughput"] * record["virtual_s"] * 2 == pytest.approx(
        record["num_output_tokens"]
    )
    assert record["num_stalls_pause"] is record["num_plans"] is None
    json.dumps(record, allow_nan=False)


def test_a_counted_planner_decides_as_the_one_that_it_counts() -> None:
    decision = Decision()
    planner = CountingPlanner(lambda snapshot: decision)
    assert [planner(None) for _ in range(3)] == [decision] * 3
    assert planner.num_plans == 3


def test_an_answer_that_may_be_longer_than_the_pool_is_refused_and_one_that_is_not_runs() -> None:
    """The engine looks at the limit that a request names, within the length of its sequences."""
    setup = dataclasses.replace(setups.find("4090-a"), memory_fraction=0.7)
    engine = setups.engine(setup)
    pool = engine.num_total_blocks * engine.tokens_per_block
    assert pool < engine.max_seq_len
    for limit, is_refused in ((pool - 19, False), (pool - 18, True)):
        request = SimRequest(
            arrival_time=0.0, num_prompt_tokens=20, max_tokens=5, limit_tokens=limit
        )
        one = Cell(setup=setup, policy="fcfs-reserve", seed=1, work=(request,), source="x")
        assert runs.run_cell(one).record["num_failed"] == is_refused
        with pytest.raises(ValueError, match="pool") if is_refused else nullcontext():
            runs.check([one])


@pytest.mark.parametrize("policy", ["tokenflow", "disaggregated"])
def test_a_machine_that_is_no_engine_is_refused_before_anything_is_run(policy: str) -> None:
    with pytest.raises(ConfigError, match="must hold one token for each of max_batch_size"):
        runs.check([cell(policy, (("max_num_tokens", 16),))])


def test_changes_that_a_row_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="only tokenflow and tokenflow-tiering have parameters"):
        runs.run_cell(cell("andes", (("conservativeness", 2.0),)))
