"""TokenFlow as its paper describes it (EuroSys'26, section 4), with gaps filled from a public
development tree that looks like its authors'.

Owns the passes, and the order in which each gives the memory away. Rules (those that allow are in
paper_rules.py):
- time is sliced: one pass per interval, and only under stress (somebody waits, or a paused
  reader's buffer is critical); else, and between passes, only free room is given away;
- Eq. 4 and 5: at most W_static = M/β streams hold memory, less λ·(W_static − N) while fewer run
  than there are slots; β: prompt, output so far and a reserve, mean;
- a running stream may be paused iff its buffer lasts for μ·(evict + load + interval), behind the
  copies queued before, or for computing it again where that is faster;
- greedy: those that may be paused, with all outside who are nearly empty or have not started, by
  (buffer, faster reader first) as long as they fit. Then a local search: one out, one in, while the
  objective Σ v·(usable time) − γ·Σ(predicted shortfall) rises, with v = exp(−buffer);
- starts and recomputations under way: at most 40 % of the slots;
- load or compute, whichever is faster (4.2.3); everything is copied to the host as it is written,
  larger buffers first (5.1, 5.2), as much as the link takes;
- if Σ R of what started exceeds Γ as it is now: no pauses, free room to who is paused, first come
  first served, and nobody new (4.3).

Readings. Buffers are compared in seconds of reading, not in tokens: exp(−b) of tokens would order
nobody, and readers differ in speed. λ, W_max, T_critical, γ and μ are not printed: 0.1, the slots,
2 s and, from the development code, 0.001 and 1. In a pass a stream is paused only for somebody who
takes its room, or if its reserve does not fit. Without KvTiering nothing can be written through and
the engine always loads what it finds: that is this scheduler on TensorRT-LLM's rules. Where the
pool is about to run out, the largest buffers yield.
"""

from __future__ import annotations

import math

import numpy as np

from tokenflow.baselines.paper_rules import (
    Capacity,
    PaperPolicy,
    io_s,
    num_scheduled,
    recompute_s,
    victims,
)
from tokenflow.baselines.room import Room
from tokenflow.baselines.writes import write_through
from tokenflow.scheduler_tiers import resume_ways
from tokenflow.types import Decision, FloatArray, IntArray, Snapshot

_MAX_SWAPS = 16


class PaperPlanner:
    """Plans for one run; remembers when the last time slice began."""

    def __init__(self, policy: PaperPolicy | None = None) -> None:
        self.policy = policy or PaperPolicy()
        self._slice_time = -math.inf

    def plan(self, snapshot: Snapshot) -> Decision:
        """The decision for this instant."""
        policy = self.policy
        room = Room(snapshot, reserve_tokens=policy.reserve_tokens)
        is_new_slice = snapshot.now - self._slice_time >= policy.interval_s
        if is_new_slice:
            self._slice_time = snapshot.now
        by_buffer = room.pausable[np.argsort(-room.buffer_s[room.pausable], kind="stable")]
        if room.blocks < 0:
            room.relieve(by_buffer.tolist(), spared=victims(room, policy).tolist())
        if len(room.outside) and room.blocks >= 0:
            _give_away(room, policy, is_new_slice)
        if policy.write_through:
            write_through(room, by_buffer)
        return room.decision(np.flatnonzero(resume_ways(snapshot).recomputes))


def _give_away(room: Room, policy: PaperPolicy, is_new_slice: bool) -> None:
    capacity = Capacity(room)
    if not capacity.is_kept():
        for row in room.paused.tolist():
            if not room.fits(row):
                return
            room.place(row, "arrival")
        return
    needy = room.outside[room.buffer_s[room.outside] <= policy.critical_s]
    budget = _Budget(room, policy, capacity)
    if is_new_slice and len(needy):
        _pass(room, policy, budget, needy)
    named = set(room.placed)
    for row in _by_need(room, room.outside).tolist():
        if row not in named and room.fits(row) and budget.allows(row):
            room.place(row, "free room")
            budget.take(row)


class _Budget:
    """What one plan may still start: streams in memory, prefills under way, load."""

    def __init__(self, room: Room, policy: PaperPolicy, capacity: Capacity) -> None:
        s = room.snapshot.sessions
        self._started, self._capacity = s.started, capacity
        self._num_left = num_scheduled(room, policy) - room.num_staying
        most = max(1, int(policy.prefill_share * room.snapshot.kv.max_batch_size))
        self._is_prefill = ~s.started | (s.num_resume_tokens > 1)
        self._prefills_left = most - int(self._is_prefill[room.starting].sum())

    def allows(self, row: int) -> bool:
        """True if `row` may be started."""
        if self._num_left < 1 or (self._is_prefill[row] and self._prefills_left < 1):
            return False
        return bool(self._started[row]) or self._capacity.admits(row)

    def take(self, row: int) -> None:
        """Count `row` as started."""
        self._num_left -= 1
        self._prefills_left -= int(self._is_prefill[row])
        if not self._started[row]:
            self._capacity.add(row)

    def leave(self, num: int) -> None:
        """So many running streams leave the memory; fewer than 0: come back to it."""
        self._num_left += num


def _by_need(room: Room, rows: IntArray) -> IntArray:
    """`rows` by (buffer, faster reader first), ties by arrival."""
    order = np.lexsort((-room.snapshot.sessions.read_rate[rows], room.buffer_s[rows]))
    result: IntArray = rows[order]
    return result


def _pass(room: Room, policy: PaperPolicy, budget: _Budget, needy: IntArray) -> None:
    """The greedy choice among the needy and those that may be paused, then the local search."""
    able = victims(room, policy)
    candidates = _by_need(room, np.concatenate([able, needy])).tolist()
    runs = set(able.tolist())
    weight = room.need.copy()
    weight[able] = room.keeps[able]
    slots, blocks = room.slots + len(able), room.blocks + int(room.frees[able].sum())
    budget.leave(len(able))
    chosen: list[int] = []
    for row in candidates:
        if slots < 1:
            break
        if weight[row] <= blocks and (row in runs or budget.allows(row)):
            chosen.append(row)
            slots, blocks = slots - 1, blocks - int(weight[row])
            if row in runs:
                budget.leave(-1)
            else:
                budget.take(row)
    stays = set(chosen)
    left = [row for row in candidates if row not in stays and (row in runs or budget.allows(row))]
    _search(_gains(room, policy, runs), weight, chosen, left, blocks)
    stays = set(chosen)
    for row in able.tolist():
        if row not in stays:
            room.take_out(row, "largest buffer")
    for row in chosen:
        if row not in runs:
            room.place(row, "need")


def _search(
    gains: FloatArray, weight: IntArray, chosen: list[int], left: list[int], blocks: int
) -> None:
    """Exchange one of `chosen` for one of `left`, both in place, while the objective rises and
    memory, of which `blocks` are free, holds."""
    for _ in range(_MAX_SWAPS):
        if not left or not chosen:
            return
        worst = min(chosen, key=lambda row: (gains[row], row))
        fitting = [row for row in left if weight[row] <= blocks + weight[worst]]
        best = max(fitting, key=lambda row: (gains[row], -row), default=worst)
        if gains[best] <= gains[worst]:
            return
        chosen[chosen.index(worst)] = best
        left[left.index(best)] = worst
        blocks += int(weight[worst]) - int(weight[best])


def _gains(room: Room, policy: PaperPolicy, runs: set[int]) -> FloatArray:
    """What serving each row [n] in the next interval adds to the objective."""
    buffer_s, rate = room.buffer_s, room.snapshot.sessions.read_rate
    overhead_s = np.minimum(io_s(room), recompute_s(room))
    overhead_s[list(runs)] = 0.0
    usable_s = np.maximum(policy.interval_s - overhead_s, 0.0)
    left_over = np.where(np.isfinite(buffer_s), buffer_s, 1e6) - policy.interval_s
    served = np.maximum(0.0, -(left_over * rate + usable_s / room.step_s))
    unserved = np.maximum(0.0, -left_over * rate)
    value = np.exp(-buffer_s) * usable_s
    result: FloatArray = value + policy.shortfall_weight * (unserved - served)
    return result
