"""What the planner derives once from a snapshot.

Owns: which rows run, start, leave, wait and are paused; the free slots and blocks they leave; what
each row is charged when it is placed and gives back when it is paused; what its way back costs.

Invariants: the snapshot's arrays are only read; what was derived does not change.

A RUNNING row one token short of its end ends in the step in flight, so its slot and blocks are
free for whoever is enqueued now: the engine's queue holds the newcomer for that one boundary.
PAUSING and CANCELLING rows count as gone for the same reason.
"""

from __future__ import annotations

import math

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.lazy import lazy
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler_tiers import Overflow, ResumeWays, link_block_s, overflow_of, resume_ways
from tokenflow.types import FloatArray, IntArray, SessionState, Snapshot

# Looking up an enum member costs more than comparing a column with a plain number.
WAITING = int(SessionState.WAITING)
PREFILLING = int(SessionState.PREFILLING)
RUNNING = int(SessionState.RUNNING)
PAUSING = int(SessionState.PAUSING)
PREEMPTED = int(SessionState.PREEMPTED)
RESUMING = int(SessionState.RESUMING)
CANCELLING = int(SessionState.CANCELLING)
_NUM_STATES = len(SessionState)

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class View:
    """Rows are positions in the snapshot's columns; `running` does not hold those about to end.

    waiting and paused leave out what is larger than the whole pool, and what its client holds.
    num_in_state: how many rows are in each SessionState. num_tokens [n]: prompt and generated.
    step_s: seconds of a step of the present batch.
    free_blocks: after the growth of those that stay, until a pause decided now takes effect.
    reserve: further growth that placing anybody must leave room for. Both growths are 0 in
    GUARANTEED_NO_EVICT, which reserves to the end.

    What not every plan looks at is derived when it is asked for.
    """

    num_in_state: list[int]
    running: IntArray
    starting: IntArray
    waiting: IntArray
    paused: IntArray
    num_tokens: IntArray
    step_s: float
    free_slots: int
    free_blocks: int
    reserve: int

    def __init__(self, snapshot: Snapshot, policy: TokenflowPolicy) -> None:
        self.snapshot = snapshot
        self.policy = policy
        s = snapshot.sessions
        self.num_in_state = np.bincount(s.state, minlength=_NUM_STATES).tolist()
        self.num_tokens = s.num_prompt_tokens + s.num_generated
        in_step = (s.state == RUNNING).nonzero()[0]
        goes_on = s.max_tokens[in_step] - s.num_generated[in_step] > 1
        self.running = in_step[goes_on]
        self.starting = self.waiting = self.paused = _NO_ROWS
        self._find_others()
        staying = self.running
        if len(self.starting):
            staying = np.concatenate([staying, self.starting])
        self._find_room(staying)
        if len(self.running) < len(in_step):
            self._come_free(s.num_blocks_held[in_step[~goes_on]])

    def _find_others(self) -> None:
        """Who is being started, waits, or is paused."""
        s, num, state = self.snapshot.sessions, self.num_in_state, self.snapshot.sessions.state
        if num[PREFILLING] or num[RESUMING]:
            self.starting = ((state == PREFILLING) | (state == RESUMING)).nonzero()[0]
        if num[WAITING] or num[PREEMPTED]:
            num_blocks = np.maximum(s.num_blocks_needed, s.num_blocks_final)
            may_not = (num_blocks > self.snapshot.kv.num_total_blocks) | s.held
            place = np.where(may_not, -1, state)
            self.waiting = (place == WAITING).nonzero()[0]
            self.paused = (place == PREEMPTED).nonzero()[0]

    def _find_room(self, staying: IntArray) -> None:
        """What `staying` leaves free, with what is held by those that were told to leave."""
        s, kv, costs = self.snapshot.sessions, self.snapshot.kv, self.snapshot.costs
        tokens = self.num_tokens[staying]
        self.step_s = costs.step_s(max(1, len(staying)), float(tokens.sum()))
        self.free_slots, self.reserve = kv.max_batch_size - len(staying), 0
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            self.free_blocks = kv.num_total_blocks - int(s.num_blocks_needed[staying].sum())
            return
        near_s = costs.pause_s + costs.plan_interval_s
        far_s = near_s + self.policy.min_quantum_s
        growth = self._growth(tokens, s.num_blocks_final[staying], near_s, far_s)
        near, far = growth.sum(axis=1).tolist()
        self.free_blocks, self.reserve = kv.num_free_blocks - near, far - near
        if self.num_in_state[PAUSING] or self.num_in_state[CANCELLING]:
            self._come_free(s.num_blocks_held[(s.state == PAUSING) | (s.state == CANCELLING)])

    def _come_free(self, num_blocks: IntArray) -> None:
        """So many blocks each are held by streams that leave; reserved ones are not counted so."""
        if self.snapshot.kv.capacity_policy is not CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            self.free_blocks += int(num_blocks.sum())

    @lazy
    def pausing(self) -> IntArray:
        """Rows whose pause is under way."""
        result: IntArray = (self.snapshot.sessions.state == PAUSING).nonzero()[0]
        return result

    @lazy
    def ways(self) -> ResumeWays:
        """How a paused row would come back."""
        return resume_ways(self.snapshot)

    @lazy
    def overflow(self) -> Overflow:
        """What of the KV the device will not hold."""
        return overflow_of(self.snapshot, self.num_tokens)

    @lazy
    def need(self) -> IntArray:
        """Blocks [n] charged when placed."""
        needed = self.snapshot.sessions.num_blocks_needed
        return needed if self._far is None else needed + self._far

    @lazy
    def frees(self) -> IntArray:
        """Blocks [n] given back when paused."""
        s = self.snapshot.sessions
        return s.num_blocks_needed if self._far is None else s.num_blocks_held + self._far

    @lazy
    def _far(self) -> IntArray | None:
        """Growth [n] until a row placed now has run its quantum; None where it is reserved."""
        snapshot, costs = self.snapshot, self.snapshot.costs
        kv, final = snapshot.kv, snapshot.sessions.num_blocks_final
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            return None
        far_s = costs.pause_s + costs.plan_interval_s + self.policy.min_quantum_s
        result: IntArray = self._growth(self.num_tokens, final, far_s)[0]
        return result

    def _growth(
        self, num_tokens: IntArray, num_blocks_final: IntArray, *seconds: float
    ) -> IntArray:
        """Blocks [len(seconds), n] that sequences of `num_tokens` take on within each of `seconds`,
        never past their full length."""
        size = self.snapshot.kv.tokens_per_block
        num_steps = [0, *(math.ceil(s / self.step_s) + 1 for s in seconds)]
        num_blocks = (num_tokens + np.array(num_steps)[:, None] + (size - 1)) // size
        later = np.minimum(num_blocks[1:], num_blocks_final) - num_blocks[0]
        result: IntArray = np.maximum(later, 0)
        return result

    @lazy
    def num_left(self) -> int:
        """Tokens that everybody together has still to generate."""
        s = self.snapshot.sessions
        return int(s.max_tokens.sum()) - int(s.num_generated.sum())

    def resume_s(self, num_tokens: IntArray, num_blocks: IntArray) -> FloatArray:
        """Seconds from enqueue to first token of resumes that compute `num_tokens` each, besides
        the one they give, and load `num_blocks` from the host."""
        costs = self.snapshot.costs
        result: FloatArray = costs.resume_s + num_tokens / costs.prefill_tokens_per_s
        return result + num_blocks * costs.onboard_block_s if costs.onboard_block_s else result

    @lazy
    def round_trip_s(self) -> float:
        """Pause, resume with all KV kept in one of the tiers, and the wait for the plan that orders
        it."""
        costs = self.snapshot.costs
        round_trip_s = costs.pause_s + costs.resume_s + costs.plan_interval_s
        return round_trip_s + self.mean_copy_s

    def engine_s(self, row: int) -> float:
        """Seconds for which bringing back the paused `row` keeps everybody in the engine waiting:
        what it computes, and its copies as far as steps wait for them."""
        costs, ways = self.snapshot.costs, self.ways
        computed_s = float(ways.num_tokens[row] - 1) / costs.prefill_tokens_per_s
        copied_s = float(ways.num_blocks[row]) * costs.onboard_block_s
        return computed_s + costs.copy_wait_share * copied_s

    def engine_s_of(self, rows: IntArray) -> FloatArray:
        """As `engine_s`, of each of several rows."""
        costs, ways = self.snapshot.costs, self.ways
        computed_s: FloatArray = (ways.num_tokens[rows] - 1) / costs.prefill_tokens_per_s
        return computed_s + costs.copy_wait_share * (ways.num_blocks[rows] * costs.onboard_block_s)

    @lazy
    def mean_copy_s(self) -> float:
        """Seconds of copying, both ways, in the mean pause; 0 while the device holds all KV."""
        return self.overflow.mean_copy_s if self.snapshot.kv.num_host_blocks else 0.0

    @lazy
    def quantum_s(self) -> float:
        """Time in the engine before a stream yields to others."""
        return max(self.policy.min_quantum_s, self.away_s)

    @lazy
    def away_s(self) -> float:
        """Time for which a paused stream is away at least: where pauses move KV, as long as taking
        turns must last to leave the link most of its time; else none."""
        if not self.mean_copy_s:
            return 0.0
        pool_s = self.snapshot.kv.num_total_blocks * link_block_s(self.snapshot)
        return pool_s / self.policy.link_share

    @lazy
    def pause_slack_s(self) -> float:
        """Slack beyond which a mean stream may be paused."""
        policy = self.policy
        away_s = policy.slack_margin_s + self.away_s
        return policy.conservativeness * self.round_trip_s + away_s


def view_of(snapshot: Snapshot, policy: TokenflowPolicy) -> View:
    """Derive the planner's view; every array is new or untouched."""
    return View(snapshot, policy)
