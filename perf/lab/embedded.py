"""The embedded engine's own costs, fitted to steps of it, for runs in virtual time.

Owns the fit: seconds of a step = base + per sequence * generating + per context token * positions
read + prefill tokens / prefill rate, the form that SimEngine takes and `tokenflow.costs` learns
online. All coefficients are >= 0. Errors count relative to the step, and outliers are weighed down
by their distance in medians (Huber), so that a neighbour on the machine does not move the fit. What
is left over is kept as factors, observed over fitted: they are the jitter of virtual runs.

Pure; where the steps come from is measure_embedded.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from perf.virtual.values import SimEngine
from tokenflow.config import ServingConfig
from tokenflow.types import FloatArray

_NUM_REWEIGHTS = 4
_HUBER = 2.0
"""Residuals up to so many medians count in full."""
_NUM_FACTORS = 1 << 12


class Step(NamedTuple):
    """One measured step: sequences that generated, positions they read, prefill tokens, seconds."""

    num_gen: int
    num_context_tokens: int
    num_prefill_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedCosts:
    """The fit; fields as SimEngine's. factors: observed over fitted seconds of every step."""

    step_base_s: float
    step_per_sequence_s: float
    step_per_context_token_s: float
    prefill_tokens_per_s: float
    factors: tuple[float, ...]

    def step_s(self, step: Step) -> float:
        """Fitted seconds of a step with that work."""
        return (
            self.step_base_s
            + self.step_per_sequence_s * step.num_gen
            + self.step_per_context_token_s * step.num_context_tokens
            + step.num_prefill_tokens / self.prefill_tokens_per_s
        )

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads, and percentiles of the residuals."""
        percentiles = zip(
            ("p05", "p50", "p95"), np.percentile(self.factors, (5, 50, 95)), strict=True
        )
        return {
            **asdict(self),
            "factors": [round(factor, 4) for factor in self.factors],
            "ratio": {name: float(value) for name, value in percentiles},
        }


def from_json(values: dict[str, Any]) -> EmbeddedCosts:
    """The costs that `as_json` wrote. Raises KeyError for a file that is something else."""
    names = ("step_base_s", "step_per_sequence_s", "step_per_context_token_s")
    return EmbeddedCosts(
        **{name: float(values[name]) for name in names},
        prefill_tokens_per_s=float(values["prefill_tokens_per_s"]),
        factors=tuple(values["factors"]),
    )


def fit(steps: Sequence[Step]) -> EmbeddedCosts:
    """Fit `steps`. Raises ValueError when they do not tell the coefficients apart (fewer than four
    kinds of work), or one took no time."""
    features = np.array(
        [(1.0, s.num_gen, s.num_context_tokens, s.num_prefill_tokens) for s in steps]
    )
    seconds = np.array([step.seconds for step in steps])
    if len(steps) < 4 or np.linalg.matrix_rank(features) < 4:
        raise ValueError("the steps do not differ enough to be fitted")
    if not (seconds > 0).all():
        raise ValueError("a step without a duration")
    relative = features / seconds[:, None]
    weights, theta = np.ones(len(steps)), np.zeros(4)
    for _ in range(_NUM_REWEIGHTS):
        theta = _solve_nonnegative(relative, weights)
        distances = np.abs(relative @ theta - 1.0)
        spread = _HUBER * float(np.median(distances)) + 1e-6
        weights = np.minimum(1.0, spread / np.maximum(distances, 1e-12))
    if not theta[3] > 0:
        raise ValueError("prefill costs nothing in these steps")
    return EmbeddedCosts(
        step_base_s=float(theta[0]),
        step_per_sequence_s=float(theta[1]),
        step_per_context_token_s=float(theta[2]),
        prefill_tokens_per_s=float(1.0 / theta[3]),
        factors=tuple((seconds / (features @ theta)).tolist()),
    )


def _solve_nonnegative(relative: FloatArray, weights: FloatArray) -> FloatArray:
    """Least squares of relative @ theta = 1 with theta >= 0: of all sets of coefficients that may
    be positive, the one with the least error. Four coefficients have 15 sets, so all are tried."""
    roots = np.sqrt(weights)
    scales = np.abs(relative).max(axis=0)
    rows, target = relative / scales * roots[:, None], roots
    best, least = np.zeros(relative.shape[1]), float("inf")
    for mask in range(1, 1 << relative.shape[1]):
        chosen = [i for i in range(relative.shape[1]) if mask >> i & 1]
        solution = np.linalg.lstsq(rows[:, chosen], target, rcond=None)[0]
        error = float(((rows[:, chosen] @ solution - target) ** 2).sum())
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(relative.shape[1]), error
            best[chosen] = solution
    return np.asarray(best / scales, dtype=np.float64)


def embedded_engine(
    costs: EmbeddedCosts, config: ServingConfig, *, seed: int | None = None, level: float = 1.0
) -> SimEngine:
    """The engine of `config` in virtual time with these costs.

    seed: of the jitter: each step takes a factor drawn from the fit's; None: no jitter.
    level: multiple of all seconds (a machine that is busy with something else beside).
    Raises ValueError for what the costs say nothing of: a host tier, a batch_scheduler_policy auto.
    """
    factors: tuple[float, ...] = (level,)
    if seed is not None:
        rng = random.Random(seed)
        factors = tuple(level * f for f in rng.choices(costs.factors, k=_NUM_FACTORS))
    batch_policy = config.batch_scheduler_policy
    if batch_policy == "auto":
        raise ValueError("batch_scheduler_policy must be named: auto depends on the policy")
    if config.kv_cache_host_memory_bytes:
        raise ValueError("kv_cache_host_memory_bytes must be 0: what copies cost is not measured")
    return SimEngine(
        max_batch_size=config.max_batch_size,
        num_total_blocks=config.max_tokens_in_paged_kv_cache // config.tokens_per_block,
        tokens_per_block=config.tokens_per_block,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        enable_chunked_context=config.enable_chunked_context,
        capacity_policy=batch_policy,
        lease_tokens=config.lease_tokens,
        max_queue_size=config.max_queue_size,
        has_kv_events=config.kv_event_buffer_max_size > 0,
        has_retention=config.scheduling_policy == "tokenflow",
        plan_interval_s=config.plan_interval_s,
        learn_output_lengths=config.learn_output_lengths,
        step_base_s=costs.step_base_s,
        step_per_sequence_s=costs.step_per_sequence_s,
        step_per_context_token_s=costs.step_per_context_token_s,
        prefill_tokens_per_s=costs.prefill_tokens_per_s,
        step_factors=factors,
    )
