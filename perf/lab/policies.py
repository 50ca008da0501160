"""The policies under test, by name: planner and engine settings of each.

Owns the table. A row gives every policy what its own field gives it: the engine's capacity policy,
chunked prefill, block reuse, and the host tier where that scheduler has one: the first-come and the
other baselines recompute, as their fields do, and rows named `-host` give them the tier. Rows under
TensorRT-LLM's rules are the default; `-tiering` rows have an engine that moves KV when it is told
to. Invariant: a row makes a new planner for each run, so that runs share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from perf.lab import disaggregated
from perf.lab.warm_up import learned_costs, learned_lengths
from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult, SimStep
from tokenflow.baselines import guide
from tokenflow.baselines.andes import AndesPlanner
from tokenflow.baselines.guide import GuidePolicy
from tokenflow.baselines.paper import PaperPlanner
from tokenflow.baselines.paper_rules import PaperPolicy
from tokenflow.baselines.sglang import SglangPlanner
from tokenflow.coordinator import Planner
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.trace import Tracer

_NO_EVICT = "guaranteed_no_evict"
_MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """A policy as it is run.

    words: what it is, for a table. make_planner: a new planner for one run. capacity_policy: of the
    engine. has_host: uses the set-up's host tier. kv_tiering: moves KV there ahead of need.
    is_chunked: prefill in chunks. overlap_copies: see SimEngine. has_retention: requests say what
    their blocks are worth. num_machines: engines that it needs; with more than 1 it is run by
    disaggregated.py, and its figures count per machine.
    """

    name: str
    words: str
    make_planner: Callable[[], Planner]
    capacity_policy: str = _MAX_UTILIZATION
    has_host: bool = False
    kv_tiering: bool = False
    is_chunked: bool = True
    overlap_copies: bool = True
    has_retention: bool = False
    num_machines: int = 1

    def engine(self, base: SimEngine) -> SimEngine:
        """`base`, the machine of a set-up with its host tier, with the settings of this row.

        A prompt is prefilled whole without chunks, and so is what a pause gave up: then one step
        must hold the longest sequence."""
        num_host_blocks = base.num_host_blocks if self.has_host else 0
        max_num_tokens = base.max_num_tokens
        if not self.is_chunked:
            max_num_tokens = max(max_num_tokens, base.max_seq_len)
        return replace(
            base,
            capacity_policy=self.capacity_policy,
            num_host_blocks=num_host_blocks,
            kv_tiering=self.kv_tiering and num_host_blocks > 0,
            enable_chunked_context=self.is_chunked,
            max_num_tokens=max_num_tokens,
            overlap_copies=self.overlap_copies,
            has_retention=self.has_retention,
        )

    def check(self, base: SimEngine) -> None:
        """Raises ConfigError where `base` with the settings of this row is no engine."""
        if self.num_machines > 1:
            disaggregated.run((), self.engine(base))
        else:
            Simulation((), self.make_planner(), self.engine(base))

    def run(
        self,
        requests: Sequence[SimRequest],
        base: SimEngine,
        *,
        until: float = 600.0,
        answered: Sequence[SimRequest] = (),
        tracer: Tracer | None = None,
        observe: Callable[[SimStep], None] | None = None,
    ) -> SimResult:
        """Run `requests` to their ends on `base` with the settings of this row. answered: others
        that the server has answered before, if it is warm. tracer, observe: see Simulation. Two
        machines have none of these."""
        engine = self.engine(base)
        if self.num_machines > 1:
            return disaggregated.run(requests, engine, until=until)
        costs, lengths = None, None
        if engine.is_warm:
            costs, lengths = learned_costs(engine), learned_lengths(answered)
        return Simulation(
            requests,
            self.make_planner(),
            engine,
            tracer=tracer,
            observe=observe,
            costs=costs,
            lengths=lengths,
        ).run(until)


def planner_of(policy: Policy) -> Callable[[], Planner]:
    """Makes planners that follow a policy of the product."""
    return lambda: lambda snapshot: plan(snapshot, policy)


def _sglang() -> Planner:
    return SglangPlanner().plan


def _andes() -> Planner:
    return AndesPlanner().plan


def _paper(policy: PaperPolicy) -> Callable[[], Planner]:
    return lambda: PaperPlanner(policy).plan


def _guide(policy: GuidePolicy) -> Callable[[], Planner]:
    return lambda: lambda snapshot: guide.plan(snapshot, policy)


_fcfs = planner_of(FcfsReservePolicy())


def _slack(name: str, words: str, policy: TokenflowPolicy | None = None) -> PolicyRow:
    """A row of the product's own scheduler, under TensorRT-LLM's rules."""
    return PolicyRow(
        name=name,
        words=words,
        make_planner=planner_of(policy or TokenflowPolicy()),
        has_host=True,
        has_retention=True,
    )


def _tiering(row: PolicyRow) -> PolicyRow:
    """The same row with KvTiering."""
    return replace(
        row, name=f"{row.name}-tiering", words=f"{row.words}, KvTiering", kv_tiering=True
    )


def _part_off(row: PolicyRow, part: str, without: PolicyRow) -> PolicyRow:
    """`without`, which is `row` without a part of it, under its own name."""
    words = f"{row.words}, no {part.replace('-', ' ')}"
    return replace(without, name=f"{row.name}-no-{part}", words=words)


def _unchunked(row: PolicyRow) -> PolicyRow:
    return replace(
        row, name=f"{row.name}-unchunked", words=f"{row.words}, whole prompts", is_chunked=False
    )


def _with_host(row: PolicyRow) -> PolicyRow:
    return replace(row, name=f"{row.name}-host", words=f"{row.words}, host tier", has_host=True)


FCFS_RESERVE = PolicyRow(
    name="fcfs-reserve",
    words="first come first served, full reservation (stock Triton)",
    make_planner=_fcfs,
    capacity_policy=_NO_EVICT,
)
FCFS_MAX_UTILIZATION = PolicyRow(
    name="fcfs-max-utilization",
    words="first come first served, blocks as needed, recompute when full (vLLM's way)",
    make_planner=_fcfs,
)
SGLANG_LIKE = PolicyRow(
    name="sglang-like",
    words="conservative admission, prefill first, retraction (SGLang's way)",
    make_planner=_sglang,
)
ANDES = PolicyRow(name="andes", words="QoE knapsack, recompute (Andes)", make_planner=_andes)
TOKENFLOW_PAPER = PolicyRow(
    name="tokenflow-paper",
    words="TokenFlow as in its paper",
    make_planner=_paper(PaperPolicy()),
    has_host=True,
    has_retention=True,
)
TOKENFLOW_GUIDE = PolicyRow(
    name="tokenflow-guide",
    words="TokenFlow as in the guide",
    make_planner=_guide(GuidePolicy()),
    has_host=True,
    has_retention=True,
)
TOKENFLOW = _slack("tokenflow", "slack priority (this project)")
TOKENFLOW_TIERING = _tiering(TOKENFLOW)
DISAGGREGATED = PolicyRow(
    name="disaggregated",
    words="one machine prefills, another decodes (DistServe's way)",
    make_planner=_fcfs,
    num_machines=disaggregated.NUM_MACHINES,
)

_NO_EMA = planner_of(TokenflowPolicy(anticipate=False))
_NO_WRITES = planner_of(TokenflowPolicy(write_through=False))
_NO_PREFETCH = planner_of(TokenflowPolicy(prefetch=False))

_NO_OFFLOAD = replace(
    TOKENFLOW,
    name="tokenflow-tiering-no-offload",
    words=f"{TOKENFLOW.words}, no host tier: what a pause gives up is computed again",
    has_host=False,
)
"""Without a host tier there is nothing for KvTiering to do, so this is both modes' row."""

ROWS = (
    FCFS_RESERVE,
    FCFS_MAX_UTILIZATION,
    SGLANG_LIKE,
    ANDES,
    TOKENFLOW_PAPER,
    TOKENFLOW_GUIDE,
    TOKENFLOW,
    TOKENFLOW_TIERING,
    _tiering(TOKENFLOW_PAPER),
    _tiering(TOKENFLOW_GUIDE),
    DISAGGREGATED,
    _unchunked(FCFS_RESERVE),
    _unchunked(FCFS_MAX_UTILIZATION),
    _unchunked(SGLANG_LIKE),
    _with_host(FCFS_RESERVE),
    _with_host(FCFS_MAX_UTILIZATION),
    _with_host(SGLANG_LIKE),
    _part_off(TOKENFLOW, "ema", replace(TOKENFLOW, make_planner=_NO_EMA)),
    _NO_OFFLOAD,
    _part_off(
        TOKENFLOW_TIERING, "write-through", replace(TOKENFLOW_TIERING, make_planner=_NO_WRITES)
    ),
    _part_off(TOKENFLOW_TIERING, "prefetch", replace(TOKENFLOW_TIERING, make_planner=_NO_PREFETCH)),
    _part_off(TOKENFLOW_TIERING, "overlap", replace(TOKENFLOW_TIERING, overlap_copies=False)),
    _part_off(TOKENFLOW_TIERING, "ema", replace(TOKENFLOW_TIERING, make_planner=_NO_EMA)),
)

POLICIES = {row.name: row for row in ROWS}
"""Every row by its name, in the order of tables."""

HEADLINE = (
    FCFS_RESERVE,
    FCFS_MAX_UTILIZATION,
    SGLANG_LIKE,
    ANDES,
    TOKENFLOW_PAPER,
    TOKENFLOW_GUIDE,
    TOKENFLOW,
)
"""What the main table compares."""

ABLATION = (
    TOKENFLOW_TIERING,
    *(row for row in ROWS if row.name.startswith("tokenflow-tiering-no-")),
)
"""The paper's table of parts left out, ours."""


def policies(names: Iterable[str]) -> list[PolicyRow]:
    """The rows with these names, in this order. Raises ValueError naming the first unknown one."""
    rows = []
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"no such policy: {name!r} (there are {', '.join(POLICIES)})")
        rows.append(POLICIES[name])
    return rows
