"""Cells of an experiment: a policy on a set-up with a seed, run to the end and measured.

Owns the way from names to records. A cell is a value: it can be run in another process, and gives
the same record wherever it is run, but for what depends on the machine (measures.WALL_KEYS).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from perf.lab import setups
from perf.lab.arrivals import Burst, Poisson
from perf.lab.bounds import prefill_bound_s, raw_throughput_bound
from perf.lab.measures import Effort, Load, Record, measure
from perf.lab.policies import PolicyRow, planner_of, policies
from perf.lab.roofline import RooflineCosts
from perf.lab.series import Series, series
from perf.lab.setups import Setup
from perf.lab.timeline import Timeline
from perf.lab.workloads import Conversations, Singles
from perf.virtual.values import SimEngine, SimRequest
from tokenflow.coordinator import Planner
from tokenflow.policies import TokenflowPolicy
from tokenflow.types import Decision, Snapshot

_UNTIL_S = 86_400.0
"""Virtual time after the last arrival in which everybody must have ended."""

_LOOK_S = 1.0
"""Between two looks of a worker for its parent."""
_GB = 1e9

_SEEDS_APART = 1_000_003
"""From the seed of what is asked to those of what was answered before."""

_NUM_ANSWERED = 1000
"""Requests that a server has answered before, at least."""

ENGINE_PARAMETERS = (
    "plan_interval_s",
    "lease_tokens",
    "max_num_tokens",
    "max_batch_size",
    "learn_output_lengths",
)
"""Fields of SimEngine that a cell may change."""

ROW_PARAMETERS = ("capacity_policy", "has_retention")
"""Fields of PolicyRow that a cell may change."""

VARIED = ("tokenflow", "tokenflow-tiering")
"""Rows that plan by the default TokenflowPolicy, whose fields a cell may change."""

Changes = tuple[tuple[str, Any], ...]
"""(name, value): one of ROW_PARAMETERS, of ENGINE_PARAMETERS, or a field of TokenflowPolicy."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is run.

    work: instead of the set-up's own requests, from a source named `source`. changes: see Changes.
    with_series: also gather what pictures are drawn from.
    """

    setup: Setup
    policy: str
    seed: int
    work: tuple[SimRequest, ...] | None = None
    source: str = ""
    changes: Changes = ()
    with_series: bool = False

    @property
    def label(self) -> str:
        """The policy with its changes: what tables call it."""
        return " ".join([self.policy, *(f"{name}={_shown(value)}" for name, value in self.changes)])

    @property
    def name(self) -> str:
        """What progress and errors call it."""
        return f"{self.setup.name} {self.label} seed {self.seed}"

    def requests(self) -> list[SimRequest]:
        """Its work, in order of arrival."""
        return setups.requests(self.setup, self.seed) if self.work is None else list(self.work)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a cell; series: None unless asked for, and for more than one machine."""

    cell: Cell
    record: Record
    series: Series | None


def run_cells(
    cells: Sequence[Cell], *, jobs: int = 1, done: Callable[[Run], None] | None = None
) -> list[Run]:
    """Run all, in `jobs` processes if there are several; the results are in the order of `cells`.

    done: called with each as it is known, in that order. Raises RuntimeError that names the cell
    when a run does not come to its end, ValueError for jobs < 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    runs = []
    for run in _results(cells, jobs):
        runs.append(run)
        if done is not None:
            done(run)
    return runs


def check(cells: Sequence[Cell]) -> None:
    """Refuse what cannot be run, before anything is. Raises as `run_cell`, ConfigError for an
    engine that cannot be, and ValueError for a request that its engine would refuse or cut short:
    what was asked for would not be what is measured."""
    with without_warnings():
        for cell in {(cell.setup, cell.policy, cell.changes): cell for cell in cells}.values():
            _row(cell).check(_base(cell))
    for cell in cells:
        _check_lengths(cell)


def _check_lengths(cell: Cell) -> None:
    """Of work from elsewhere; the set-ups' own fits their engines."""
    engine = setups.engine(cell.setup)
    longest, pool = engine.max_seq_len, engine.num_total_blocks * engine.tokens_per_block
    for request in cell.work or ():
        num_tokens = request.num_prompt_tokens + request.max_tokens
        limit = request.num_prompt_tokens + (request.limit_tokens or request.max_tokens)
        if num_tokens > longest or min(limit, longest) - 1 > pool:  # the last one needs no block
            raise ValueError(
                f"the request that arrives at {request.arrival_time:g} s has {num_tokens} tokens, "
                f"up to {limit}: {cell.setup.name} takes {longest}, and {pool} in its KV pool"
            )


def run_cell(cell: Cell) -> Run:
    """Run one. Raises as `run_cells`, and ValueError for changes that its row does not take."""
    row, base = _row(cell), _base(cell)
    requests, planner = cell.requests(), CountingPlanner(row.make_planner())
    timeline = Timeline() if row.num_machines == 1 else None
    counted = dataclasses.replace(row, make_planner=lambda: planner)
    start = time.perf_counter()
    try:
        with without_warnings():
            until = _UNTIL_S + max(request.arrival_time for request in requests)
            result = counted.run(
                requests, base, until=until, answered=_answered(cell), tracer=timeline
            )
    except RuntimeError as error:
        raise RuntimeError(f"{cell.name}: {error}") from error
    effort = Effort(
        num_plans=None if timeline is None else planner.num_plans,
        plan_wall_s=planner.wall_s,
        wall_s=time.perf_counter() - start,
    )
    measured = measure(
        result,
        timeline,
        load_of(row.engine(base), requests),
        effort,
        block_bytes=base.block_bytes,
        num_machines=row.num_machines,
    )
    drawn = None
    if cell.with_series and timeline is not None:
        drawn = series(result.streams(), timeline)
    return Run(cell=cell, record={**labels(cell), **measured}, series=drawn)


def _answered(cell: Cell) -> list[SimRequest]:
    """What the server has answered before, of the same kind, where that teaches something."""
    answered: list[SimRequest] = []
    if cell.work is None and any(request.ends_by_itself for request in cell.requests()):
        seed = cell.seed + _SEEDS_APART
        while len(answered) < _NUM_ANSWERED:
            answered += setups.requests(cell.setup, seed)
            seed += _SEEDS_APART
    return answered


def labels(cell: Cell) -> Record:
    """The part of a record that says what was run."""
    return {
        "setup": cell.setup.name if cell.work is None else f"{cell.setup.name} ({cell.source})",
        "arrivals": _arrivals(cell),
        "read_rate": cell.setup.read_rate if cell.work is None else _one_rate(cell.work),
        "host_gb": cell.setup.host_bytes / _GB,
        "policy": cell.label,
        "uses_host": _row(cell).engine(_base(cell)).num_host_blocks > 0,
        "seed": cell.seed,
    }


def _one_rate(work: Sequence[SimRequest]) -> float | None:
    """Tokens/s if all its readers read at one rate, else None."""
    rates = {request.read_rate for request in work if request.read_rate is not None}
    return rates.pop() if len(rates) == 1 else None


def _arrivals(cell: Cell) -> str:
    """The kind of arrivals, on which goals depend."""
    workload = cell.setup.workload
    if cell.work is not None:
        return "trace"
    if isinstance(workload, Conversations):
        return "conversations"
    kinds = {Burst: "burst", Poisson: "poisson"}
    arrivals = workload.arrivals if isinstance(workload, Singles) else None
    return kinds.get(type(arrivals), "other")


def load_of(engine: SimEngine, requests: Sequence[SimRequest]) -> Load:
    """What `requests` ask of `engine`. Raises ValueError where its costs are not those of the
    roofline, from which the bounds are computed."""
    if not isinstance(engine.step_cost, RooflineCosts):
        raise ValueError("the engine has no cost model from first principles")
    bound = prefill_bound_s(
        engine.step_cost,
        [r.num_prompt_tokens for r in requests],
        [r.arrival_time for r in requests],
        engine.max_num_tokens,
    )
    sum_rate, capacity = setups.schedulable(engine, requests)
    return Load(
        ttft_bound_mean_s=bound.mean_s,
        ttft_bound_p99_s=bound.p99_s,
        raw_bound=raw_throughput_bound(engine.step_cost, engine, requests),
        sum_rate=sum_rate,
        capacity=capacity,
    )


def _shown(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


class CountingPlanner:
    """Plans as `planner` does, counts and times the calls."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.num_plans = 0
        self.wall_s = 0.0

    def __call__(self, snapshot: Snapshot) -> Decision:
        """See coordinator.Planner."""
        start = time.perf_counter()
        decision = self._planner(snapshot)
        self.wall_s += time.perf_counter() - start
        self.num_plans += 1
        return decision


def _row(cell: Cell) -> PolicyRow:
    """The cell's row, with the changes that concern it."""
    (row,) = policies([cell.policy])
    changed = dict(cell.changes)
    row = dataclasses.replace(row, **{k: changed.pop(k) for k in ROW_PARAMETERS if k in changed})
    fields = {name: value for name, value in changed.items() if name not in ENGINE_PARAMETERS}
    if not fields:
        return row
    if cell.policy not in VARIED:
        raise ValueError(f"only {' and '.join(VARIED)} have parameters, not {cell.policy}")
    policy = dataclasses.replace(TokenflowPolicy(), **fields)
    return dataclasses.replace(row, make_planner=planner_of(policy))


def _base(cell: Cell) -> SimEngine:
    """The set-up's machine, with the changes that concern it."""
    changed = {name: value for name, value in cell.changes if name in ENGINE_PARAMETERS}
    return dataclasses.replace(setups.engine(cell.setup), **changed)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """What the product warns its operator of (a host tier that is too small) is in the records."""
    logger = logging.getLogger("tokenflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _results(cells: Sequence[Cell], jobs: int) -> Iterator[Run]:
    if jobs == 1 or len(cells) < 2:
        yield from map(run_cell, cells)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(cells)),
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    )
    with pool:
        try:
            yield from pool.map(run_cell, cells)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # what was not begun fails with them
            raise


def _start_worker(parent_pid: int) -> None:
    """An interrupt is the parent's to handle, and a worker does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_S)
    os._exit(1)
