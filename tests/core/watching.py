"""Watchers at the seams: a planner and an engine that check each call.

Both are what the coordinator talks to, so nothing is patched. What they find is an AssertionError
out of the call that was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import msgspec
import numpy as np

from tests.scheduler.test_plan_properties import rows_of, staying, within_budget
from tests.support.failing import FailingRunner
from tests.support.stepped import SteppedExecutor
from tokenflow.executor.api import CapacitySchedulerPolicy, ExecutorConfig, Response, Result
from tokenflow.inflight.runner import Runner
from tokenflow.policies import FcfsReservePolicy, Policy, TokenflowPolicy
from tokenflow.types import Decision, SessionState, Snapshot

S = SessionState
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class WatchedPlanner:
    """Passes on what `planner` decides after checking it against its snapshot.

    policy: whose rules a decision must keep; None for a planner that pauses whom it likes.
    on_snapshot: called with each snapshot, before the planner sees it.
    again: plans once more every so often: the same snapshot must give the same decision.
    """

    def __init__(
        self,
        planner: Callable[[Snapshot], Decision],
        policy: Policy | None,
        on_snapshot: Callable[[Snapshot], None],
        again: int = 8,
    ) -> None:
        self._planner = planner
        self._policy = policy
        self._on_snapshot = on_snapshot
        self._again = again
        self._num_plans = 0
        self.num_forced = 0

    def __call__(self, snapshot: Snapshot) -> Decision:
        self._on_snapshot(snapshot)
        decision = self._planner(snapshot)
        self._num_plans += 1
        if self._policy is not None and self._num_plans % self._again == 0:
            assert self._planner(snapshot) == decision
        _check_names(snapshot, decision)
        if isinstance(self._policy, FcfsReservePolicy):
            assert not decision.pause
        else:
            _check_room(snapshot, decision)
        if isinstance(self._policy, TokenflowPolicy):
            _check_rules(snapshot, decision, self._policy)
        self.num_forced += len(decision.forced)
        return decision


def _check_names(snapshot: Snapshot, decision: Decision) -> None:
    s = snapshot.sessions
    named = (*decision.pause, *decision.resume, *decision.admit)
    assert len(set(named)) == len(named)
    assert set(decision.forced) <= set(decision.pause)
    for slots, state in (
        (decision.pause, S.RUNNING),
        (decision.resume, S.PREEMPTED),
        (decision.admit, S.WAITING),
    ):
        assert all(s.state[i] == state for i in rows_of(snapshot, slots))
    for i in rows_of(snapshot, decision.pause):
        assert s.pausable[i]
        assert s.started[i]
    for i in rows_of(snapshot, (*decision.resume, *decision.admit)):
        assert not s.held[i]
        assert s.num_blocks_needed[i] <= snapshot.kv.num_total_blocks


def _check_room(snapshot: Snapshot, decision: Decision) -> None:
    placed = rows_of(snapshot, (*decision.resume, *decision.admit))
    if placed:
        assert within_budget(snapshot, rows_of(snapshot, decision.pause), placed)


def _check_rules(snapshot: Snapshot, decision: Decision, policy: TokenflowPolicy) -> None:
    """Who may be paused, no more victims than needed, and fixed kinds within their half."""
    s, costs = snapshot.sessions, snapshot.costs
    round_trip_s = costs.pause_s + costs.resume_s + costs.plan_interval_s
    least_s = policy.conservativeness * round_trip_s + policy.slack_margin_s
    pause = rows_of(snapshot, decision.pause)
    placed = rows_of(snapshot, (*decision.resume, *decision.admit))
    for slot, i in zip(decision.pause, pause, strict=True):
        if slot in decision.forced:
            assert snapshot.kv.capacity_policy is not NO_EVICT
            continue
        assert s.slack_s[i] >= least_s
        if decision.why[slot] in ("for waiting", "for balance"):
            assert s.has_reader[i] or s.num_pauses[i] < policy.max_machine_pauses
            assert snapshot.now - s.running_since_time[i] >= policy.min_quantum_s
        if snapshot.kv.capacity_policy is NO_EVICT:
            assert not within_budget(snapshot, [j for j in pause if j != i], placed)
    admitted = [i for i in rows_of(snapshot, decision.admit) if not s.pausable[i]]
    if admitted:
        inside = [int(i) for i in np.flatnonzero(staying(snapshot)) if not s.pausable[i]]
        fixed = [*inside, *admitted]
        if len(fixed) > 1:
            assert 2 * len(fixed) <= snapshot.kv.max_batch_size
            assert 2 * int(s.num_blocks_final[fixed].sum()) <= snapshot.kv.num_total_blocks


class WatchedExecutor(SteppedExecutor):
    """The stepped engine that notices what may not be asked of it.

    is_being_emptied: everything may be cancelled now; else nothing that has not said a token since
        its enqueue.
    joins: what a request said in several steps comes in one response, if it is heard at once.
    cancelled_ids: whose end was asked for.
    num_free_low: fewest blocks that were neither used nor cached after a step; above 0, nothing
        was ever evicted.
    """

    def __init__(self, runner: Runner, config: ExecutorConfig) -> None:
        super().__init__(runner, config)
        self._config = config
        self._have_spoken: set[int] = set()
        self.cancelled_ids: set[int] = set()
        self.joins = False
        self.is_being_emptied = False
        self.num_free_low = self.batcher.kv.num_total_blocks

    @property
    def unfinished_ids(self) -> set[int]:
        """Requests whose end was not heard."""
        return set(self._unfinished)

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        responses = super().await_responses(timeout)
        if self.joins:
            responses = _joined(responses)
        for response in responses:
            if response.payload is not None and response.payload.output_token_ids[0]:
                self._have_spoken.add(response.request_id)
        return responses

    def cancel_request(self, id: int) -> None:
        assert id in self._have_spoken or self.is_being_emptied, "cancelled before its first token"
        assert id in self.requests
        self.cancelled_ids.add(id)
        super().cancel_request(id)

    def begin(self, now: float) -> None:
        super().begin(now)
        if not self.is_lost:
            self._check_room()

    def end(self, now: float) -> None:
        super().end(now)
        kv = self.batcher.kv
        tiers = kv.tier_stats()
        num_free = kv.num_total_blocks - kv.num_used_blocks
        num_free -= tiers.num_device_cached_blocks + tiers.num_device_in_transit_blocks
        self.num_free_low = min(self.num_free_low, num_free)

    def _check_room(self) -> None:
        """What the step in flight holds: slots, reservations, blocks."""
        started = [s for s in self.batcher._active if s.is_started]
        assert len(started) <= self._config.max_batch_size
        for sequence in started:
            request = self.requests[sequence.request_id]
            assert tuple(sequence.token_ids[: len(request.input_token_ids)]) == (
                request.input_token_ids
            )
        if self._config.scheduler_config.capacity_scheduler_policy is NO_EVICT:
            num_reserved = sum(self.num_reserved_blocks(s.request_id) for s in started)
            assert num_reserved <= self.batcher.kv.num_total_blocks

    def num_reserved_blocks(self, request_id: int) -> int:
        """Blocks of a request at the full length of its enqueue."""
        request = self.requests[request_id]
        num_prompt = len(request.input_token_ids)
        num_tokens = num_prompt + min(request.max_tokens, self._config.max_seq_len - num_prompt)
        return -(-(num_tokens - 1) // self._config.tokens_per_block)

    def handles_in_error(self) -> list[int]:
        """Whom the responses that were not heard tell of an error."""
        return [r.client_id for r in self._responses if r.has_error() and r.client_id is not None]

    @property
    def num_failures(self) -> int:
        """Failures of the runner so far."""
        assert isinstance(self.batcher._runner, FailingRunner)
        return self.batcher._runner.num_failures


def _joined(responses: list[Response]) -> list[Response]:
    """The same tokens in one response per request; an end without tokens stays apart."""
    last: dict[int, Result] = {}
    result: list[Response] = []
    for response in reversed(responses):
        payload, later = response.payload, last.get(response.request_id)
        if payload is None or not payload.output_token_ids[0]:
            result.append(response)
            continue
        if later is not None:
            payload = _join(payload, later)
            result = [r for r in result if r.payload is not later]
        last[response.request_id] = payload
        result.append(msgspec.structs.replace(response, payload=payload))
    return result[::-1]


def _join(first: Result, second: Result) -> Result:
    log_probs = None
    if first.log_probs is not None and second.log_probs is not None:
        log_probs = [first.log_probs[0] + second.log_probs[0]]
    return msgspec.structs.replace(
        second,
        output_token_ids=[first.output_token_ids[0] + second.output_token_ids[0]],
        log_probs=log_probs,
    )
