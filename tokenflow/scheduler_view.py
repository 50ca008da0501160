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
from itertools import accumulate

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.lazy import lazy
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler_tiers import Overflow, ResumeWays, link_block_s, overflow_of, resume_ways
from tokenflow.types import BoolArray, FloatArray, IntArray, SessionState, Snapshot

# Looking up an enum member costs more than comparing a column with a plain number.
WAITING = int(SessionState.WAITING)
PREFILLING = int(SessionState.PREFILLING)
RUNNING = int(SessionState.RUNNING)
PAUSING = int(SessionState.PAUSING)
PREEMPTED = int(SessionState.PREEMPTED)
RESUMING = int(SessionState.RESUMING)
CANCELLING = int(SessionState.CANCELLING)
_NUM_STATES = len(SessionState)

_FAR = 1
"""Until the quantum is over, in what sequences grow."""

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class View:
    """Rows are positions in the snapshot's columns; `running` does not hold those about to end.

    waiting and paused leave out what is larger than the whole pool, and what its client holds.
    num_in_state: how many rows are in each SessionState. num_tokens [n]: prompt and generated.
    num_to_come [n]: tokens that may still be generated. num_expected [n], num_expected_to_come [n]:
    tokens of the whole answers, and of what is left, as far as can be known.
    in_engine: those that run or start. step_s: seconds of a step of the present batch.
    free_blocks: after the growth of those that stay, until a pause decided now takes effect.
    reserve: further growth that placing anybody must leave room for. Both growths are 0 in
    GUARANTEED_NO_EVICT, which reserves to the end.

    What not every plan looks at is derived when it is asked for.
    """

    num_in_state: list[int]
    running: IntArray
    starting: IntArray
    in_engine: IntArray
    waiting: IntArray
    paused: IntArray
    num_tokens: IntArray
    num_to_come: IntArray
    step_s: float
    free_slots: int
    free_blocks: int
    reserve: int

    def __init__(self, snapshot: Snapshot, policy: TokenflowPolicy) -> None:
        self.snapshot = snapshot
        by = snapshot.kv.capacity_policy
        self._is_reserved = by is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
        self.policy = policy
        s = snapshot.sessions
        self.num_in_state = np.bincount(s.state, minlength=_NUM_STATES).tolist()
        self._ends = list(accumulate(self.num_in_state))
        # Numbers of one byte are put in order in one pass.
        self._by_state = s.state.astype(np.int8).argsort(kind="stable")
        self.num_tokens = s.num_prompt_tokens + s.num_generated
        self.num_to_come = s.max_tokens - s.num_generated
        self.running, ending = self._in_state(RUNNING), _NO_ROWS
        to_come = self.num_to_come[self.running]
        if len(to_come) and lowest(to_come) <= 1:
            self.running, ending = self.running[to_come > 1], self.running[to_come <= 1]
        self.starting = self.waiting = self.paused = _NO_ROWS
        self._find_others()
        self.in_engine = self.running
        if len(self.starting):
            self.in_engine = np.concatenate([self.running, self.starting])
        self._find_room(self.in_engine)
        if len(ending):
            self._come_free(s.num_blocks_held[ending])

    def _in_state(self, state: int) -> IntArray:
        """Rows that are in `state`, in order."""
        end = self._ends[state]
        return self._by_state[end - self.num_in_state[state] : end]

    def _find_others(self) -> None:
        """Who is being started, waits, or is paused."""
        self.starting, resuming = self._in_state(PREFILLING), self._in_state(RESUMING)
        if len(resuming):
            self.starting = np.sort(np.concatenate([self.starting, resuming]))
        self.waiting, self.paused = self._in_state(WAITING), self._in_state(PREEMPTED)
        s, num_total_blocks = self.snapshot.sessions, self.snapshot.kv.num_total_blocks
        if not len(self.waiting) + len(self.paused):
            return
        num_most = max(highest(s.num_blocks_needed), highest(s.num_blocks_final))
        if num_most > num_total_blocks or np.count_nonzero(s.held):
            num_blocks = np.maximum(s.num_blocks_needed, s.num_blocks_final)
            may = (num_blocks <= num_total_blocks) & ~s.held
            self.waiting = self.waiting[may[self.waiting]]
            self.paused = self.paused[may[self.paused]]

    def _find_room(self, staying: IntArray) -> None:
        """What `staying` leaves free, with what is held by those that were told to leave."""
        s, kv = self.snapshot.sessions, self.snapshot.kv
        num_tokens = float(np.add.reduce(self.num_tokens[staying]))
        self.step_s = self.snapshot.costs.step_s(max(1, len(staying)), num_tokens)
        self.free_slots, self.reserve = kv.max_batch_size - len(staying), 0
        if self._is_reserved:
            num_reserved = int(np.add.reduce(s.num_blocks_needed[staying]))
            self.free_blocks = kv.num_total_blocks - num_reserved
            return
        near, far = np.add.reduce(self._growth.take(staying, axis=1), axis=1).tolist()
        self.free_blocks, self.reserve = kv.num_free_blocks - near, far - near
        for state in (PAUSING, CANCELLING):
            if self.num_in_state[state]:
                self._come_free(s.num_blocks_held[self._in_state(state)])

    @lazy
    def _growth(self) -> IntArray:
        """Blocks [2, n] that sequences take on until a pause decided now takes effect, and until a
        row placed now has run its least quantum, never past their full length. Not where they
        reserve."""
        num_blocks = self._num_blocks
        later = np.minimum(num_blocks[1:], self.snapshot.sessions.num_blocks_final) - num_blocks[0]
        result: IntArray = np.maximum(later, 0)
        return result

    @lazy
    def _num_blocks(self) -> IntArray:
        """Blocks [3, n] that sequences fill now, and at the two times of `_growth`."""
        costs, size = self.snapshot.costs, self.snapshot.kv.tokens_per_block
        near_s = costs.pause_s + costs.plan_interval_s
        far_s = near_s + self.policy.min_quantum_s
        near, far = math.ceil(near_s / self.step_s) + 1, math.ceil(far_s / self.step_s) + 1
        num_more = np.array([[size - 1], [near + size - 1], [far + size - 1]])
        num_blocks: IntArray = (self.num_tokens + num_more) // size
        return num_blocks

    def _come_free(self, num_blocks: IntArray) -> None:
        """So many blocks each are held by streams that leave; reserved ones are not counted so."""
        if not self._is_reserved:
            self.free_blocks += int(num_blocks.sum())

    @lazy
    def pausing(self) -> IntArray:
        """Rows whose pause is under way."""
        return self._in_state(PAUSING)

    @lazy
    def all_read(self) -> bool:
        """True if every row has a reader."""
        has_reader = self.snapshot.sessions.has_reader
        return np.count_nonzero(has_reader) == len(has_reader)

    @lazy
    def all_pausable(self) -> bool:
        """True if no row is of a kind that can never be paused."""
        pausable = self.snapshot.sessions.pausable
        return np.count_nonzero(pausable) == len(pausable)

    @lazy
    def unread(self) -> FloatArray:
        """Tokens [n] that a reader has left; NaN before the first, infinite without a reader."""
        result: FloatArray = self.snapshot.sessions.slack_s * self.snapshot.sessions.read_rate
        return result

    @lazy
    def load(self) -> float:
        """What all that started read, as a share of what the engine makes with those in it now."""
        s = self.snapshot.sessions
        rate = float(np.add.reduce(s.read_rate[s.started & ~s.held]))
        return rate * self.step_s / max(1, len(self.in_engine))

    @lazy
    def ways(self) -> ResumeWays:
        """How a paused row would come back."""
        return resume_ways(self.snapshot)

    @lazy
    def overflow(self) -> Overflow:
        """What of the KV the device will not hold."""
        return overflow_of(self.snapshot, self.num_tokens, self._num_blocks[0])

    @lazy
    def need(self) -> IntArray:
        """Blocks [n] charged when placed."""
        needed = self.snapshot.sessions.num_blocks_needed
        return needed if self._is_reserved else needed + self._growth[_FAR]

    @lazy
    def frees(self) -> IntArray:
        """Blocks [n] given back when paused."""
        s = self.snapshot.sessions
        return s.num_blocks_needed if self._is_reserved else s.num_blocks_held + self._growth[_FAR]

    @lazy
    def num_expected(self) -> IntArray:
        """See View."""
        s, lengths = self.snapshot.sessions, self.snapshot.lengths
        if lengths is None:
            return s.max_tokens
        return lengths.expected(s.num_generated, s.max_tokens)

    @lazy
    def num_expected_to_come(self) -> IntArray:
        """See View."""
        if self.snapshot.lengths is None:
            return self.num_to_come
        return self.num_expected - self.snapshot.sessions.num_generated

    @lazy
    def num_in_load(self) -> IntArray:
        """Tokens [n] of whole answers, for the load: what may come, or what is expected."""
        if self.policy.load_by_expectation:
            return self.num_expected
        return self.snapshot.sessions.max_tokens

    @property
    def num_in_load_to_come(self) -> IntArray:
        """The same of what is left."""
        return self.num_expected_to_come if self.policy.load_by_expectation else self.num_to_come

    @lazy
    def num_left(self) -> int:
        """Tokens that everybody together is expected to generate yet."""
        return int(np.add.reduce(self.num_expected_to_come))

    @lazy
    def more_come(self) -> bool:
        """True as long as the last arrival is no longer ago than is usual between two of them."""
        times = self.snapshot.sessions.arrival_time
        first, last = float(times[0]), float(times[-1])
        since_s = self.snapshot.now - last
        return since_s * (len(times) - 1) <= self.policy.max_arrival_gaps * (last - first)

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
        """Time for which a paused stream is away at least: where pauses move KV, or lose it, so
        long as turns must last to leave the link, or the engine, time for the rest; else none."""
        policy = self.policy
        return self._turn_s(policy.link_share, policy.turn_recompute_share)

    @lazy
    def turn_s(self) -> float:
        """As `away_s`, for taking turns that go on for long."""
        policy = self.policy
        return self._turn_s(policy.turn_link_share, policy.turn_recompute_share)

    def _turn_s(self, link_share: float, recompute_share: float) -> float:
        """Seconds in which all that the pool holds may be moved, and what is lost of it computed
        again, with such shares of the link and of the engine."""
        return max(self._moving_s / link_share, self._computing_s / recompute_share)

    @lazy
    def _moving_s(self) -> float:
        """Seconds for moving all that the pool holds, where pauses move KV."""
        if not self.mean_copy_s:
            return 0.0
        return self.snapshot.kv.num_total_blocks * link_block_s(self.snapshot)

    @lazy
    def _computing_s(self) -> float:
        """Seconds for computing again what pauses lose, if all that are in the engine yield."""
        if not self.overflow.lost_share:
            return 0.0
        num_tokens = float(np.add.reduce(self.num_tokens[self.in_engine]))
        return self.overflow.lost_share * num_tokens / self.snapshot.costs.prefill_tokens_per_s

    @lazy
    def turn_slack_s(self) -> float:
        """Slack with which a mean stream yields in turns that go on for long."""
        policy = self.policy
        turn_s = policy.slack_margin_s + self.turn_s
        return policy.conservativeness * self.round_trip_s + turn_s


def view_of(snapshot: Snapshot, policy: TokenflowPolicy) -> View:
    """Derive the planner's view; every array is new or untouched."""
    return View(snapshot, policy)


def num_first(flags: BoolArray) -> int:
    """How many are True before the first that is not."""
    return len(flags) if np.count_nonzero(flags) == len(flags) else int(flags.argmin())


def lowest(values: FloatArray | IntArray) -> float:
    """As values.min(), which takes several times as long for a few hundred."""
    return float(values[values.argmin()])


def highest(values: FloatArray | IntArray) -> float:
    """As values.max(); see `lowest`."""
    return float(values[values.argmax()])
