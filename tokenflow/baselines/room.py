"""The room of the engine as every baseline sees it, and the decision it fills.

Owns which rows run, start, wait and are paused, the slots and blocks that are free, and what each
row takes and gives back. Invariants: the snapshot is only read; placing never leaves fewer than 0
slots or blocks (blocks may be below 0 from the start, when the pool is about to run out); a row is
named once.

A RUNNING row one token short of its end ends in the step in flight, and PAUSING and CANCELLING rows
are on their way out: their slots and blocks count as free for whoever is enqueued now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

import numpy as np

from tokenflow.executor.api import CapacitySchedulerPolicy
from tokenflow.types import Decision, FloatArray, IntArray, SessionState, Snapshot

Planner = Callable[[Snapshot], Decision]

_WAITING = int(SessionState.WAITING)
_PREFILLING = int(SessionState.PREFILLING)
_RUNNING = int(SessionState.RUNNING)
_PAUSING = int(SessionState.PAUSING)
_PREEMPTED = int(SessionState.PREEMPTED)
_RESUMING = int(SessionState.RESUMING)
_CANCELLING = int(SessionState.CANCELLING)


class Room:
    """A decision under construction.

    running, starting, waiting, paused: rows (positions in the snapshot's columns), in order of
        arrival; `running` without those about to end, `waiting` and `paused` without those that
        their clients hold or that are larger than the pool.
    outside: waiting and paused. num_tokens [n]: prompt and generated. step_s: seconds of a step of
        the present batch. slots: free ones. blocks: free ones after the growth of those that stay,
        until a pause decided now takes effect; free_blocks: without that growth.
    need, frees, keeps [n]: blocks taken when placed, given back when paused, and wanted by one that
        runs on; the first and the last with a reserve for that growth, at least for
        `reserve_tokens` tokens. Under GUARANTEED_NO_EVICT all are the reservation.
    """

    def __init__(self, snapshot: Snapshot, reserve_tokens: int = 0) -> None:
        s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
        self.snapshot = snapshot
        state = s.state
        in_step = state == _RUNNING
        ending = in_step & (s.num_generated >= s.max_tokens - 1)
        leaving = ending | (state == _PAUSING) | (state == _CANCELLING)
        may_start = np.maximum(s.num_blocks_needed, s.num_blocks_final) <= kv.num_total_blocks
        may_start &= ~s.held
        self.running: IntArray = np.flatnonzero(in_step & ~ending)
        self.starting: IntArray = np.flatnonzero((state == _PREFILLING) | (state == _RESUMING))
        self.waiting: IntArray = np.flatnonzero((state == _WAITING) & may_start)
        self.paused: IntArray = np.flatnonzero((state == _PREEMPTED) & may_start)
        self.outside: IntArray = np.sort(np.concatenate([self.waiting, self.paused]))
        self.num_tokens: IntArray = s.num_prompt_tokens + s.num_generated
        staying = np.concatenate([self.running, self.starting])
        self._num_staying = len(staying)
        self.step_s = costs.step_s(max(1, len(staying)), float(self.num_tokens[staying].sum()))
        self.slots = kv.max_batch_size - len(staying)
        self.need: IntArray
        self.frees: IntArray
        self.keeps: IntArray
        if kv.capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            self.need = self.frees = self.keeps = s.num_blocks_needed
            self.free_blocks = kv.num_total_blocks - int(s.num_blocks_needed[staying].sum())
            self.blocks = self.free_blocks
        else:
            num_steps = math.ceil((costs.pause_s + costs.plan_interval_s) / self.step_s) + 1
            growth = self._growth(num_steps)
            reserve = growth
            if reserve_tokens > num_steps:
                reserve = self._growth(reserve_tokens)
            self.need, self.keeps = s.num_blocks_needed + reserve, s.num_blocks_held + reserve
            self.frees = s.num_blocks_held + growth
            self.free_blocks = kv.num_free_blocks + int(s.num_blocks_held[leaving].sum())
            self.blocks = self.free_blocks - int(growth[staying].sum())
        self.pause: list[int] = []
        self.placed: list[int] = []
        self._forced: list[int] = []
        self._offload: list[tuple[int, int]] = []
        self._why: dict[int, str] = {}

    def _growth(self, num_steps: int) -> IntArray:
        """Blocks [n] that each sequence takes on in so many steps, never past its full length."""
        size = self.snapshot.kv.tokens_per_block
        later = -(-(self.num_tokens + num_steps) // size)
        later = np.minimum(later, self.snapshot.sessions.num_blocks_final)
        result: IntArray = np.maximum(later - -(-self.num_tokens // size), 0)
        return result

    @property
    def num_staying(self) -> int:
        """Rows that run or start and are not paused."""
        return self._num_staying - len(self.pause)

    @property
    def pausable(self) -> IntArray:
        """Running rows that the product allows to be paused at all, without those that were."""
        s = self.snapshot.sessions
        may = s.pausable & s.started
        may[self.pause] = False
        result: IntArray = self.running[may[self.running]]
        return result

    @property
    def buffer_s(self) -> FloatArray:
        """Seconds of unread text [n]: 0 before the first token, +inf without a reader."""
        s = self.snapshot.sessions
        result: FloatArray = np.where(s.started, s.slack_s, 0.0)
        return result

    def prefill_s(self, rows: IntArray) -> FloatArray:
        """Seconds of prefill to start each of `rows`, with what the cache still has of them."""
        tokens = self.snapshot.sessions.num_resume_tokens[rows]
        result: FloatArray = tokens / self.snapshot.costs.prefill_tokens_per_s
        return result

    def fits(self, row: int) -> bool:
        """True if `row` can be placed as things are."""
        return self.slots >= 1 and self.blocks >= int(self.need[row])

    def place(self, row: int, why: str) -> None:
        """Start or resume `row`."""
        assert self.fits(row), "placed without room"
        assert row not in self._why, "named twice"
        self.placed.append(row)
        self._why[row] = why
        self.slots -= 1
        self.blocks -= int(self.need[row])

    def take_out(self, row: int, why: str, *, forced: bool = False) -> None:
        """Pause `row`. forced: because the pool would have run out."""
        assert row not in self._why, "named twice"
        self.pause.append(row)
        if forced:
            self._forced.append(row)
        self._why[row] = why
        self.slots += 1
        self.blocks += int(self.frees[row])
        self.free_blocks += int(self.snapshot.sessions.num_blocks_held[row])

    def relieve(self, rows: Iterable[int], spared: Collection[int] = ()) -> None:
        """Where the pool is about to run out, pause `rows` in this order until the growth of those
        that stay fits; one stream goes on, or nothing would ever be freed. spared: those who can
        be paused without harm; the others are forced."""
        for row in rows:
            if self.blocks >= 0 or self.num_staying <= 1:
                return
            self.take_out(row, "no room to grow", forced=row not in spared)

    def copy_out(self, row: int, num_blocks: int) -> None:
        """Copy that many more of the oldest blocks of `row` to the host."""
        self._offload.append((row, num_blocks))
        self._why.setdefault(row, "write-through")

    def decision(self, recomputes: IntArray | None = None) -> Decision:
        """What was decided, in slots. recomputes: rows whose blocks on the host are given up, if
        they are resumed."""
        s = self.snapshot.sessions
        slot = s.slot
        resume = [row for row in self.placed if s.state[row] == _PREEMPTED]
        given_up = set() if recomputes is None else set(recomputes.tolist())
        return Decision(
            pause=tuple(int(slot[row]) for row in self.pause),
            resume=tuple(int(slot[row]) for row in resume),
            admit=tuple(int(slot[row]) for row in self.placed if s.state[row] == _WAITING),
            forced=tuple(int(slot[row]) for row in self._forced),
            recompute=tuple(int(slot[row]) for row in resume if row in given_up),
            offload=tuple((int(slot[row]), num_blocks) for row, num_blocks in self._offload),
            why={int(slot[row]): why for row, why in self._why.items()},
        )
