"""What tests ask of a run in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from perf.virtual.simulation import Simulation
from perf.virtual.values import SimEngine, SimRequest, SimResult, SimStep
from tests.support.tracer import ListTracer
from tokenflow.metrics import percentile, raw_throughput, stalls, ttft_s
from tokenflow.policies import Policy, TokenflowPolicy
from tokenflow.scheduler import plan

NO_EVICT = "guaranteed_no_evict"
MAX_UTIL = "max_utilization"


class Outcome:
    """A run with everything seen: result, trace and, if `watch`, the steps of the engine."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        engine: SimEngine,
        policy: Policy | None = None,
        *,
        watch: bool = False,
    ) -> None:
        policy = policy or TokenflowPolicy()
        self.tracer = ListTracer()
        self.steps: list[SimStep] = []
        self.result = Simulation(
            requests,
            lambda snapshot: plan(snapshot, policy),
            engine,
            tracer=self.tracer,
            observe=self.steps.append if watch else None,
        ).run()

    def pauses(self) -> list[dict]:
        return self.tracer.named("pause")

    def ttft(self, kind: str) -> list[float]:
        return [ttft_s(stream) for stream in self.result.streams(kind)]

    def num_pauses(self) -> list[int]:
        return [seq.num_pauses for seq in self.result.seqs]

    def step_times(self, handle: int) -> list[float]:
        """Starts of the steps that computed something for a request (1, 2, … by arrival)."""
        return [step.start_time for step in self.steps if handle in step.handles]


def ttft(result: SimResult, q: float) -> float:
    return percentile((ttft_s(s) for s in result.streams("newcomer")), q)


def worst_stall_s(result: SimResult) -> float:
    found = [stall.duration_s for s in result.streams() for stall in stalls(s)]
    return max(found, default=0.0)


def throughput_ratio(result: SimResult, baseline: SimResult) -> float:
    return raw_throughput(result.streams()) / raw_throughput(baseline.streams())


def all_served(result: SimResult) -> bool:
    """Every request got exactly the tokens it asked for."""
    return all(len(q.token_times) == q.request.max_tokens for q in result.seqs)
