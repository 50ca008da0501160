"""What the planner derives once from a snapshot, and the draft it fills.

Owns: which rows run, start, leave, wait and are paused; the free slots and blocks they leave; what
each row is charged when it is placed and gives back when it is paused; what its way back costs.

Invariants: the snapshot's arrays are only read; a draft never goes below the free slots or blocks
by placing (it may start below, when the pool is about to run out).

A RUNNING row one token short of its end ends in the step in flight, so its slot and blocks are
free for whoever is enqueued now: the engine's queue holds the newcomer for that one boundary.
PAUSING and CANCELLING rows count as gone for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.policies import TokenflowPolicy
from tokenflow.scheduler_tiers import Overflow, ResumeWays, link_block_s, overflow_of, resume_ways
from tokenflow.types import Decision, FloatArray, IntArray, SessionState, Snapshot

# Looking up an enum member costs more than comparing a column with a plain number.
WAITING = int(SessionState.WAITING)
PREFILLING = int(SessionState.PREFILLING)
RUNNING = int(SessionState.RUNNING)
PAUSING = int(SessionState.PAUSING)
PREEMPTED = int(SessionState.PREEMPTED)
RESUMING = int(SessionState.RESUMING)
CANCELLING = int(SessionState.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Rows are positions in the snapshot's columns; `running` does not hold those about to end.

    waiting and paused leave out what is larger than the whole pool, and what its client holds.
    num_tokens [n]: prompt and generated. ways: how a paused row would come back. overflow: what of
    the KV the device will not hold. need [n]: blocks charged when placed. frees [n]: blocks
    given back when paused. step_s: seconds of a step of the present batch.
    free_blocks: after the growth of those that stay, until a pause decided now takes effect.
    reserve: further growth that placing anybody must leave room for. Both growths are 0 in
    GUARANTEED_NO_EVICT, which reserves to the end.
    """

    snapshot: Snapshot
    policy: TokenflowPolicy
    running: IntArray
    starting: IntArray
    pausing: IntArray
    waiting: IntArray
    paused: IntArray
    num_tokens: IntArray
    ways: ResumeWays
    overflow: Overflow
    need: IntArray
    frees: IntArray
    step_s: float
    free_slots: int
    free_blocks: int
    reserve: int

    def resume_s(self, num_tokens: IntArray, num_blocks: IntArray) -> FloatArray:
        """Seconds from enqueue to first token of resumes that compute `num_tokens` each, besides
        the one they give, and load `num_blocks` from the host."""
        costs = self.snapshot.costs
        result: FloatArray = costs.resume_s + num_tokens / costs.prefill_tokens_per_s
        return result + num_blocks * costs.onboard_block_s

    @property
    def round_trip_s(self) -> float:
        """Pause, resume with all KV kept in one of the tiers, and the wait for the plan that orders
        it."""
        costs = self.snapshot.costs
        round_trip_s = costs.pause_s + costs.resume_s + costs.plan_interval_s
        return round_trip_s + self.overflow.mean_copy_s

    def engine_s(self, row: int) -> float:
        """Seconds for which bringing back the paused `row` keeps everybody in the engine waiting:
        what it computes, and its copies as far as steps wait for them."""
        costs, ways = self.snapshot.costs, self.ways
        computed_s = float(ways.num_tokens[row] - 1) / costs.prefill_tokens_per_s
        copied_s = float(ways.num_blocks[row]) * costs.onboard_block_s
        return computed_s + costs.copy_wait_share * copied_s

    @property
    def quantum_s(self) -> float:
        """Time in the engine before a stream yields to others."""
        return max(self.policy.min_quantum_s, self.away_s)

    @property
    def away_s(self) -> float:
        """Time for which a paused stream is away at least: where pauses move KV, as long as taking
        turns must last to leave the link most of its time; else none."""
        if not self.overflow.mean_copy_s:
            return 0.0
        pool_s = self.snapshot.kv.num_total_blocks * link_block_s(self.snapshot)
        return pool_s / self.policy.link_share

    @property
    def pause_slack_s(self) -> float:
        """Slack beyond which a mean stream may be paused."""
        policy = self.policy
        away_s = policy.slack_margin_s + self.away_s
        return policy.conservativeness * self.round_trip_s + away_s


def view_of(snapshot: Snapshot, policy: TokenflowPolicy) -> View:
    """Derive the planner's view; every array is new or untouched."""
    s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
    state = s.state
    in_step = state == RUNNING
    ending = in_step & (s.num_generated >= s.max_tokens - 1)
    running = np.flatnonzero(in_step & ~ending)
    starting = np.flatnonzero((state == PREFILLING) | (state == RESUMING))
    pausing = state == PAUSING
    staying = np.concatenate([running, starting])
    num_tokens = s.num_prompt_tokens + s.num_generated
    step_s = costs.step_s(max(1, len(staying)), float(num_tokens[staying].sum()))
    fits = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= kv.num_total_blocks
    may_start = fits & ~s.held
    if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
        need = frees = s.num_blocks_needed
        free_blocks = kv.num_total_blocks - int(need[staying].sum())
        reserve = 0
    else:
        near_s = costs.pause_s + costs.plan_interval_s
        near = _growth(snapshot, num_tokens, near_s, step_s)
        far = _growth(snapshot, num_tokens, near_s + policy.min_quantum_s, step_s)
        need, frees = s.num_blocks_needed + far, s.num_blocks_held + far
        leaving = pausing | (state == CANCELLING) | ending
        free_blocks = kv.num_free_blocks + int(s.num_blocks_held[leaving].sum())
        free_blocks -= int(near[staying].sum())
        reserve = int((far - near)[staying].sum())
    return View(
        snapshot=snapshot,
        policy=policy,
        running=running,
        starting=starting,
        pausing=np.flatnonzero(pausing),
        waiting=np.flatnonzero((state == WAITING) & may_start),
        paused=np.flatnonzero((state == PREEMPTED) & may_start),
        num_tokens=num_tokens,
        ways=resume_ways(snapshot),
        overflow=overflow_of(snapshot, num_tokens),
        need=need,
        frees=frees,
        step_s=step_s,
        free_slots=kv.max_batch_size - len(staying),
        free_blocks=free_blocks,
        reserve=reserve,
    )


def _growth(snapshot: Snapshot, num_tokens: IntArray, seconds: float, step_s: float) -> IntArray:
    """Blocks [n] that each sequence takes on within `seconds`, never past its full length."""
    s, size = snapshot.sessions, snapshot.kv.tokens_per_block
    num_steps = math.ceil(seconds / step_s) + 1
    later = np.minimum(-(-(num_tokens + num_steps) // size), s.num_blocks_final)
    result: IntArray = np.maximum(later - -(-num_tokens // size), 0)
    return result


class Draft:
    """A decision under construction: free room, and who was placed or paused so far.

    slots, blocks: what is free after everything drafted.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.slots = view.free_slots
        self.blocks = view.free_blocks
        self.pause: list[int] = []
        self.resume: list[int] = []
        self.admit: list[int] = []
        self.forced: list[int] = []
        self.prefetch: list[int] = []
        self.offload: list[tuple[int, int]] = []
        self._why: dict[int, str] = {}

    def copy(self) -> Draft:
        """A draft of its own that starts with everything drafted here."""
        other = Draft(self._view)
        other.adopt(self)
        return other

    def adopt(self, other: Draft) -> None:
        """Take over what `other`, a draft of the same view, holds."""
        self.slots, self.blocks = other.slots, other.blocks
        self.pause, self.forced = list(other.pause), list(other.forced)
        self.resume, self.admit = list(other.resume), list(other.admit)
        self.prefetch, self.offload = list(other.prefetch), list(other.offload)
        self._why = dict(other._why)

    def fits(self, row: int) -> bool:
        """True if `row` can be placed without another pause."""
        return self.slots >= 1 and self.blocks >= int(self._view.need[row])

    def victims_for(self, row: int, candidates: Iterable[int]) -> list[int] | None:
        """The fewest of `candidates`, best first, whose pause makes room for `row`.

        [] if it fits as it is, None if all of them do not make enough room. Dropping any one of
        the result leaves too little.
        """
        return self.victims_to_reach(1, int(self._view.need[row]), candidates)

    def victims_to_reach(
        self, num_slots: int, num_blocks: int, candidates: Iterable[int]
    ) -> list[int] | None:
        """As `victims_for`, for a number of free slots and blocks."""
        frees = self._view.frees
        slots, blocks = self.slots - num_slots, self.blocks - num_blocks
        chosen: list[int] = []
        if slots < 0 or blocks < 0:
            for candidate in candidates:
                chosen.append(candidate)
                slots, blocks = slots + 1, blocks + int(frees[candidate])
                if slots >= 0 and blocks >= 0:
                    break
        if slots < 0 or blocks < 0:
            return None
        for candidate in reversed(chosen[:-1]):
            freed = int(frees[candidate])
            if slots >= 1 and blocks >= freed:
                chosen.remove(candidate)
                slots, blocks = slots - 1, blocks - freed
        return chosen

    def take_out(self, row: int, why: str, *, forced: bool = False) -> None:
        """Pause `row`."""
        self.pause.append(row)
        if forced:
            self.forced.append(row)
        self._why[row] = why
        self.slots += 1
        self.blocks += int(self._view.frees[row])

    def place(self, row: int, why: str, victims: Sequence[int] = ()) -> None:
        """Start or resume `row`, after pausing `victims` for it."""
        for victim in victims:
            self.take_out(victim, f"for {why}")
        assert self.fits(row), "placed without room"
        started = self._view.snapshot.sessions.state[row] == PREEMPTED
        (self.resume if started else self.admit).append(row)
        self._why[row] = why
        self.slots -= 1
        self.blocks -= int(self._view.need[row])

    def fetch(self, row: int) -> None:
        """Bring what the host holds of the paused `row` to the device."""
        self.prefetch.append(row)
        self._why[row] = "prefetch"
        self.blocks -= int(self._view.ways.num_blocks[row])

    def copy_out(self, row: int, num_blocks: int) -> None:
        """Copy that many more of the oldest blocks of `row` to the host."""
        self.offload.append((row, num_blocks))
        self._why.setdefault(row, "write-through")

    def prune(self) -> None:
        """Take back pauses that a later, larger one made unnecessary."""
        for row in self.pause[::-1]:
            freed = int(self._view.frees[row])
            if self.slots >= 1 and self.blocks >= freed:
                self.pause.remove(row)
                del self._why[row]
                self.slots, self.blocks = self.slots - 1, self.blocks - freed
        self.forced = [row for row in self.forced if row in self._why]

    def named(self, row: int) -> bool:
        """True if `row` was placed or paused."""
        return row in self._why

    def decision(self) -> Decision:
        """The drafted decision, in slots."""
        slot = self._view.snapshot.sessions.slot
        recomputes = self._view.ways.recomputes
        return Decision(
            pause=tuple(int(slot[row]) for row in self.pause),
            resume=tuple(int(slot[row]) for row in self.resume),
            admit=tuple(int(slot[row]) for row in self.admit),
            forced=tuple(int(slot[row]) for row in self.forced),
            recompute=tuple(int(slot[row]) for row in self.resume if recomputes[row]),
            prefetch=tuple(int(slot[row]) for row in self.prefetch),
            offload=tuple((int(slot[row]), num_blocks) for row, num_blocks in self.offload),
            why={int(slot[row]): why for row, why in self._why.items()},
        )
