"""A small engine with readers in virtual time, driving `plan` through its seams.

Owns the engine's rules that matter to a plan: iteration boundaries (commands given during a step
act at its end, the token of a cancelled request is lost), the two capacity policies, chunked
prefill, and a cache from which paused KV is evicted oldest first. Step times come from a fixed
cost model, times an optional factor per step; nothing is random. Costs are learned by the real
CostModel, readers are the real Reader, measures the real metrics.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenflow.costs import CostModel
from tokenflow.executor.api import (
    CapacitySchedulerPolicy,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    num_blocks_needed,
)
from tokenflow.metrics import Stream
from tokenflow.reader import Reader
from tokenflow.types import Decision, KvView, SessionColumns, SessionState, Snapshot

S = SessionState


@dataclass(frozen=True, kw_only=True)
class SimRequest:
    """One request. read_rate None: no reader (it counts with the default rate)."""

    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    read_rate: float | None = 4.0
    priority: float = 0.5
    pausable: bool = True
    kind: str = "reader"


@dataclass(frozen=True, kw_only=True)
class SimEngine:
    """Limits and true costs; the defaults are the fitted CPU engine of the demo."""

    max_batch_size: int = 8
    num_total_blocks: int = 128
    tokens_per_block: int = 32
    max_num_tokens: int = 512
    capacity_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    step_base_s: float = 0.045
    step_per_sequence_s: float = 0.0013
    step_per_context_token_s: float = 2.6e-6
    prefill_tokens_per_s: float = 2600.0
    plan_interval_s: float = 0.05
    response_delay_s: float = 0.002
    step_factors: tuple[float, ...] = (1.0,)


@dataclass(eq=False)
class Seq:
    """A session and, while the engine holds it, its sequence."""

    slot: int
    request: SimRequest
    reader: Reader
    state: SessionState = S.WAITING
    num_generated: int = 0
    num_pauses: int = 0
    wait_since_time: float = 0.0
    running_since_time: float = 0.0
    pause_time: float = 0.0
    num_to_prefill: int = 0
    num_cached_tokens: int = 0
    cancelled: bool = False
    token_times: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens + self.num_generated

    @property
    def num_resume_tokens(self) -> int:
        return max(1, self.num_tokens - self.num_cached_tokens)


@dataclass(kw_only=True)
class SimResult:
    """What happened. idle_slot_s: slot seconds that stood empty while somebody waited."""

    seqs: list[Seq]
    num_pauses: int = 0
    num_forced: int = 0
    num_internal_pauses: int = 0
    num_recomputed_tokens: int = 0
    idle_slot_s: float = 0.0
    busy_slot_s: float = 0.0

    def streams(self, kind: str | None = None) -> list[Stream]:
        return [
            Stream(
                arrival_time=q.request.arrival_time,
                token_times=np.array(q.token_times),
                read_rate=q.request.read_rate,
            )
            for q in self.seqs
            if kind is None or q.request.kind == kind
        ]


class Simulation:
    """Runs `requests` on `engine` with `planner`; see `run`."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        planner: Callable[[Snapshot], Decision],
        engine: SimEngine | None = None,
        *,
        on_plan: Callable[[Snapshot, Decision], None] | None = None,
        default_read_rate: float = 6.0,
    ) -> None:
        self.engine = engine or SimEngine()
        self._planner = planner
        self._on_plan = on_plan
        ordered = sorted(requests, key=lambda r: r.arrival_time)
        self._arrivals = [
            Seq(i, r, Reader(r.read_rate, default_read_rate), wait_since_time=r.arrival_time)
            for i, r in enumerate(ordered)
        ]
        self.result = SimResult(seqs=list(self._arrivals))
        self._costs = CostModel()
        self._live: list[Seq] = []
        self._queue: list[Seq] = []
        self._active: list[Seq] = []
        self._cancels: list[Seq] = []
        self._cached: OrderedDict[int, Seq] = OrderedDict()
        self._step_end = math.inf
        self._step_start = 0.0
        self._chunks: dict[int, int] = {}
        self._iter = 0

    def run(self, until: float = 600.0) -> SimResult:
        """Run to the end of all requests; AssertionError if they have not ended by `until`."""
        next_plan, arrivals = math.inf, list(self._arrivals)
        responses: list[tuple[float, Callable[[float], None]]] = []
        while arrivals or self._live:
            arrival = arrivals[0].request.arrival_time if arrivals else math.inf
            response = responses[0][0] if responses else math.inf
            now = min(arrival, self._step_end, response, next_plan)
            assert now <= until, f"not done at {until} s: {[q.state.name for q in self._live]}"
            if now == self._step_end:
                self._end_step(now, responses)
                self._start_step(now)
                continue
            needs_plan = now == next_plan
            while arrivals and arrivals[0].request.arrival_time <= now:
                self._live.append(arrivals.pop(0))
                needs_plan = True
            while responses and responses[0][0] <= now:
                responses.pop(0)[1](now)
                needs_plan = True
            if needs_plan:
                self._plan(now)
                if self._step_end == math.inf:
                    self._start_step(now)
            waits = any(q.state in (S.WAITING, S.PREEMPTED) for q in self._live)
            next_plan = now + self.engine.plan_interval_s if waits else math.inf
        return self.result

    # -- the session side ------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        snapshot = self.snapshot(now)
        decision = self._planner(snapshot)
        if self._on_plan is not None:
            self._on_plan(snapshot, decision)
        by_slot = {q.slot: q for q in self._live}
        for slot in decision.pause:
            q = by_slot[slot]
            assert q.state is S.RUNNING
            q.state, q.pause_time = S.PAUSING, now
            q.num_pauses += 1
            self.result.num_pauses += 1
            self._cancels.append(q)
        self.result.num_forced += len(decision.forced)
        for slot in (*decision.resume, *decision.admit):
            q = by_slot[slot]
            assert q.state in (S.WAITING, S.PREEMPTED)
            q.state = S.PREFILLING if q.state is S.WAITING else S.RESUMING
            q.running_since_time = now
            self._queue.append(q)

    def snapshot(self, now: float) -> Snapshot:
        e, rows = self.engine, self._live
        ints = {name: [] for name in SessionColumns.__dataclass_fields__}
        for q in rows:
            r, in_engine = q.request, q.state in (S.PREFILLING, S.RUNNING, S.PAUSING, S.RESUMING)
            needed = self._need(q)
            values = {
                "slot": q.slot,
                "state": q.state,
                "arrival_time": r.arrival_time,
                "wait_since_time": q.wait_since_time,
                "running_since_time": q.running_since_time,
                "slack_s": self._slack(q, now),
                "read_rate": q.reader.rate,
                "has_reader": r.read_rate is not None,
                "started": q.num_generated > 0,
                "pausable": r.pausable,
                "priority": r.priority,
                "num_prompt_tokens": r.num_prompt_tokens,
                "num_generated": q.num_generated,
                "max_tokens": r.max_tokens,
                "num_blocks_held": needed if in_engine else 0,
                "num_blocks_needed": needed,
                "num_blocks_final": self._blocks_at(r.num_prompt_tokens + r.max_tokens - 1),
                "num_resume_tokens": q.num_resume_tokens,
                "num_pauses": q.num_pauses,
            }
            for name, value in values.items():
                ints[name].append(value)
        floats = {"arrival_time", "wait_since_time", "running_since_time"}
        floats |= {"slack_s", "read_rate", "priority"}
        bools = {"has_reader", "started", "pausable"}
        columns = {
            name: np.array(
                values, dtype=float if name in floats else bool if name in bools else np.int64
            )
            for name, values in ints.items()
        }
        held = sum(ints["num_blocks_held"])
        return Snapshot(
            now=now,
            sessions=SessionColumns(**columns),
            kv=KvView(
                capacity_policy=e.capacity_policy,
                tokens_per_block=e.tokens_per_block,
                num_total_blocks=e.num_total_blocks,
                num_free_blocks=max(0, e.num_total_blocks - held),
                max_batch_size=e.max_batch_size,
            ),
            costs=self._costs.estimate(e.plan_interval_s),
        )

    def _slack(self, q: Seq, now: float) -> float:
        if not q.reader.started:
            return math.nan
        return q.reader.slack_s(now) if q.request.read_rate is not None else math.inf

    def _need(self, q: Seq) -> int:
        e = self.engine
        left = max(1, q.request.max_tokens - q.num_generated)
        return num_blocks_needed(e.capacity_policy, e.tokens_per_block, q.num_tokens, left)

    def _blocks_at(self, num_tokens: int) -> int:
        return -(-num_tokens // self.engine.tokens_per_block)

    # -- the engine side -------------------------------------------------------------------------

    def _blocks(self, q: Seq) -> int:
        """Blocks counted against the pool while active."""
        if self.engine.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            return self._need(q)
        return -(-q.num_tokens // self.engine.tokens_per_block)

    def _end_step(self, now: float, responses: list[tuple[float, Callable[[float], None]]]) -> None:
        told = now + self.engine.response_delay_s
        self._observe(now)
        cancelled, self._cancels = self._cancels, []
        for q in list(self._active):
            chunk = self._chunks.get(q.slot)
            if chunk is None:
                continue
            if q.num_to_prefill:
                q.num_to_prefill -= chunk
                if q.num_to_prefill:
                    continue
            ends = q.num_generated + 1 >= q.request.max_tokens
            if q in cancelled and not ends:
                continue
            q.num_generated += 1
            if ends:
                self._active.remove(q)
            responses.append((told, self._token(q, ends)))
        for q in cancelled:
            if q in self._active:
                self._active.remove(q)
                q.num_cached_tokens = q.num_tokens - 1
                self._cached[q.slot] = q
                responses.append((told, self._paused(q)))
        responses.sort(key=lambda item: item[0])
        self._step_end = math.inf

    def _token(self, q: Seq, ends: bool) -> Callable[[float], None]:
        def deliver(now: float) -> None:
            q.reader.deliver(1, now)
            q.token_times.append(now)
            if q.state is S.RESUMING:
                self._costs.observe_resume(now - q.running_since_time, 1)
            if q.state in (S.PREFILLING, S.RESUMING):
                q.state = S.RUNNING
            if ends:
                q.state = S.FINISHED
                self._live.remove(q)

        return deliver

    def _paused(self, q: Seq) -> Callable[[float], None]:
        def tell(now: float) -> None:
            self._costs.observe_pause(now - q.pause_time)
            q.state, q.wait_since_time = S.PREEMPTED, now

        return tell

    def _start_step(self, now: float) -> None:
        e = self.engine
        used = sum(self._blocks(q) for q in self._active)
        while e.capacity_policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
            used = sum(self._blocks(q) for q in self._active)
            if used <= e.num_total_blocks:
                break
            loser = self._active.pop()
            self.result.num_internal_pauses += 1
            loser.num_cached_tokens = 0
            self._queue.insert(0, loser)
        while self._queue and len(self._active) < e.max_batch_size:
            q = self._queue[0]
            if used + self._blocks(q) > e.num_total_blocks:
                break
            self._queue.pop(0)
            self._cached.pop(q.slot, None)
            q.num_to_prefill = q.num_resume_tokens
            if q.num_generated:
                self.result.num_recomputed_tokens += q.num_to_prefill - 1
            used += self._blocks(q)
            self._active.append(q)
        self._evict()
        if not self._active:
            return
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        e = self.engine
        decoding = [q for q in self._active if not q.num_to_prefill]
        budget = e.max_num_tokens - len(decoding)
        self._chunks = {q.slot: 1 for q in decoding}
        for q in self._active:
            if q.num_to_prefill and budget > 0:
                self._chunks[q.slot] = min(budget, q.num_to_prefill)
                budget -= self._chunks[q.slot]
        self._num_gen = len(decoding)
        self._num_context = sum(q.num_tokens for q in decoding)
        self._num_ctx_tokens = sum(self._chunks.values()) - len(decoding)
        seconds = (
            e.step_base_s
            + e.step_per_sequence_s * self._num_gen
            + e.step_per_context_token_s * self._num_context
            + self._num_ctx_tokens / e.prefill_tokens_per_s
        )
        seconds *= e.step_factors[self._iter % len(e.step_factors)]
        waiting = sum(q.state in (S.WAITING, S.PREEMPTED) for q in self._live)
        idle = min(waiting + len(self._queue), e.max_batch_size - len(self._active))
        self.result.idle_slot_s += idle * seconds
        self.result.busy_slot_s += len(self._active) * seconds
        self._step_start, self._step_end = now, now + seconds

    def _evict(self) -> None:
        size = self.engine.tokens_per_block
        room = self.engine.num_total_blocks
        room -= sum(-(-(q.num_tokens + 1) // size) for q in self._active)
        cached = sum(-(-q.num_cached_tokens // size) for q in self._cached.values())
        for slot, q in list(self._cached.items()):
            if cached <= room:
                break
            blocks = -(-q.num_cached_tokens // size)
            kept = max(0, blocks - (cached - room))
            cached -= blocks - kept
            q.num_cached_tokens = kept * size
            if not kept:
                del self._cached[slot]

    def _observe(self, now: float) -> None:
        self._iter += 1
        e = self.engine
        self._costs.observe_iteration(
            IterationStats(
                iter=self._iter,
                iter_latency_ms=(now - self._step_start) * 1e3,
                num_active_requests=len(self._active),
                num_queued_requests=len(self._queue),
                num_completed_requests=0,
                max_num_active_requests=e.max_batch_size,
                kv_cache_stats=KvCacheStats(
                    max_num_blocks=e.num_total_blocks,
                    free_num_blocks=0,
                    used_num_blocks=0,
                    tokens_per_block=e.tokens_per_block,
                ),
                inflight_batching_stats=InflightBatchingStats(
                    num_scheduled_requests=len(self._chunks),
                    num_context_requests=len(self._chunks) - self._num_gen,
                    num_gen_requests=self._num_gen,
                    num_paused_requests=0,
                    num_ctx_tokens=self._num_ctx_tokens,
                ),
                end_time=now,
                num_gen_context_tokens=self._num_context,
            )
        )
