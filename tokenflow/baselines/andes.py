"""The QoE knapsack: Andes (arXiv 2404.16283).

Owns the expected gain of serving each request, and the choice of who is served. Rules:
- the QoE of a request is 1 − (area by which what its reader has taken falls short of the expected
  timeline) / (area under the expected timeline); the expected timeline begins one second after the
  arrival and rises at the reading rate;
- the gain of serving i over the next horizon in a batch of B is Q_serve(B) − Q_wait; its priority
  is that gain over its context length, the memory that it takes;
- greedy: requests by priority as long as they fit, for each B in [Bmin, Bmax]; the B with the
  highest sum of gains wins. Bmin: the largest batch in which everybody decodes as fast as the
  fastest reader reads; Bmax: the most that fit at all;
- only once the engine is nearly full (90 %), and once per interval; otherwise free room is given by
  priority;
- a pause loses its KV (no host tier), and the mean number of pauses per request is capped; each
  request is charged one block more than it has, and who is being served counts half as much again
  (both from its authors' code).

Readings: the horizon and the interval are those of its authors' and of the TokenFlow authors' code,
the cap on pauses is 1 (not verified against the paper) and counts those of the knapsack only.
B is tried at a few evenly spaced values. Requests without a reader count with their
reference rate; what they have is never unread. Where the pool is about to run out, the newest are
taken out first, as in the engine that Andes was built on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenflow.baselines.room import Room
from tokenflow.types import Decision, FloatArray, IntArray, Snapshot

_NUM_BATCH_SIZES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AndesPolicy:
    """horizon_s: over which the QoE is foreseen. expected_ttft_s: when the expected timeline
    begins. full_share: of slots or blocks from which it reschedules, every interval_s.
    preemption_cap: pauses per request, on average. served_bonus: factor on the gain of whoever is
    being served."""

    horizon_s: float = 10.0
    expected_ttft_s: float = 1.0
    full_share: float = 0.9
    interval_s: float = 1.0
    preemption_cap: float = 1.0
    served_bonus: float = 1.5


class AndesPlanner:
    """Plans for one run; remembers when it last rescheduled, how many requests it has seen, up to
    which arrival, and how many it has preempted."""

    def __init__(self, policy: AndesPolicy | None = None) -> None:
        self.policy = policy or AndesPolicy()
        self._last_time = self._last_arrival_time = -math.inf
        self._num_seen = self._num_preempted = 0

    def plan(self, snapshot: Snapshot) -> Decision:
        """The decision for this instant."""
        room = Room(snapshot, reserve_tokens=snapshot.kv.tokens_per_block)
        self._count(snapshot)
        room.relieve(room.pausable[::-1].tolist())
        if len(room.outside) and room.blocks >= 0:
            if self._is_due(room):
                self._last_time = snapshot.now
                self._reschedule(room)
            elif not room.pause:
                self._fill(room)
        return room.decision()

    def _count(self, snapshot: Snapshot) -> None:
        arrivals = snapshot.sessions.arrival_time
        if len(arrivals):
            self._num_seen += int((arrivals > self._last_arrival_time).sum())
            self._last_arrival_time = max(self._last_arrival_time, float(arrivals.max()))

    def _is_due(self, room: Room) -> bool:
        if room.snapshot.now - self._last_time < self.policy.interval_s:
            return False
        kv, full_share = room.snapshot.kv, self.policy.full_share
        num_waiting = int(room.need[room.outside].sum())
        fits_all = len(room.outside) <= room.slots and num_waiting <= room.blocks
        used_slots = 1 - room.slots / kv.max_batch_size
        used_blocks = 1 - max(0, room.free_blocks) / kv.num_total_blocks
        # A burst fills an empty engine within one interval: that counts as full, too.
        return not fits_all or max(used_slots, used_blocks) >= full_share

    def _fill(self, room: Room) -> None:
        rows = room.outside
        batch_size = min(room.snapshot.kv.max_batch_size, room.num_staying + len(rows))
        gains = expected_gains(room, rows, batch_size, self.policy)
        order = np.argsort(-gains / room.num_tokens[rows], kind="stable")
        for row in rows[order].tolist():
            if not room.fits(row):
                return
            room.place(row, "free room")

    def _reschedule(self, room: Room) -> None:
        """Serve the best set that the cap on pauses lets be reached."""
        served = room.pausable
        rows = np.concatenate([served, room.outside])  # ties stay with who is served
        best = max(
            (self._packed(room, rows, len(served), b) for b in self._batch_sizes(room, rows)),
            key=lambda packed: packed[0],
        )
        chosen, in_engine = set(best[1]), set(served.tolist())
        worst_first = [row for row in best[2] if row in in_engine]
        num_allowed = int(self.policy.preemption_cap * self._num_seen) - self._num_preempted
        victims = [row for row in worst_first if row not in chosen][: max(0, num_allowed)]
        self._num_preempted += len(victims)
        for row in victims:
            room.take_out(row, "lower gain")
        outside = set(room.outside.tolist())
        for row in best[1]:
            if row in outside and room.fits(row):
                room.place(row, "higher gain")

    def _batch_sizes(self, room: Room, rows: IntArray) -> list[int]:
        """Values of B: from the largest in which nobody reads faster than it decodes, to the most
        that fit."""
        s, kv, costs = room.snapshot.sessions, room.snapshot.kv, room.snapshot.costs
        blocks = np.cumsum(np.sort(room.need[rows]))
        num_blocks = room.blocks + int(room.frees[room.pausable].sum())
        num_fixed = room.num_staying - len(room.pausable)
        most = num_fixed + int(np.searchsorted(blocks, num_blocks, side="right"))
        most = max(1, min(most, kv.max_batch_size))
        context = float(room.num_tokens[rows].mean())
        sizes = np.arange(1, most + 1)
        step_s = costs.step_base_s + sizes * (
            costs.step_per_sequence_s + costs.step_per_context_token_s * context
        )
        fast = sizes[step_s * float(s.read_rate[rows].max()) <= 1.0]
        least = int(fast[-1]) if len(fast) else 1
        spaced = np.linspace(least, most, min(_NUM_BATCH_SIZES, most - least + 1))
        return [int(b) for b in np.unique(np.round(spaced))]

    def _packed(
        self, room: Room, rows: IntArray, num_served: int, batch_size: int
    ) -> tuple[float, list[int], list[int]]:
        """(sum of gains, chosen rows best first, all rows worst first) for a batch size."""
        gains = expected_gains(room, rows, batch_size, self.policy)
        gains[:num_served] *= self.policy.served_bonus
        order = np.argsort(-gains / room.num_tokens[rows], kind="stable")
        served = rows[:num_served]
        weights = np.concatenate([room.keeps[served], room.need[rows[num_served:]]])
        num_slots = min(batch_size - (room.num_staying - num_served), room.slots + num_served)
        num_blocks = room.blocks + int(room.frees[served].sum())
        total, chosen = 0.0, []
        for i in order.tolist():
            if num_slots < 1:
                break
            if weights[i] <= num_blocks:
                num_slots, num_blocks = num_slots - 1, num_blocks - int(weights[i])
                total += float(gains[i])
                chosen.append(int(rows[i]))
        return total, chosen, rows[order[::-1]].tolist()


def expected_gains(room: Room, rows: IntArray, batch_size: int, policy: AndesPolicy) -> FloatArray:
    """Q_serve(B) − Q_wait of `rows` over the horizon.

    A reader with S seconds of unread text whose stream is served again after o seconds, at v
    tokens/s, has taken min(R·(x − m), v·(x − o)) more tokens after x seconds than if it were not
    served, from m = max(S, o) on. The gain is the area under that line over the area under the
    expected timeline at the end of the horizon.
    """
    s, costs = room.snapshot.sessions, room.snapshot.costs
    context = float(room.num_tokens[rows].mean())
    speed = 1.0 / costs.step_s(batch_size, batch_size * context)
    rate, horizon_s = s.read_rate[rows], policy.horizon_s
    in_engine = np.isin(rows, room.running)
    overhead_s = np.where(in_engine, 0.0, room.prefill_s(rows))
    buffer_s = np.where(s.has_reader[rows], room.buffer_s[rows], 0.0)
    begin_s = np.minimum(np.maximum(buffer_s, overhead_s), horizon_s)
    slow = rate > speed
    gap = np.where(slow, rate - speed, 1.0)
    meet_s = np.where(slow, (rate * begin_s - speed * overhead_s) / gap, horizon_s)
    meet_s = np.minimum(np.maximum(meet_s, begin_s), horizon_s)
    area = 0.5 * rate * (meet_s - begin_s) ** 2
    behind = (horizon_s - overhead_s) ** 2 - (meet_s - overhead_s) ** 2
    area += np.where(slow & (meet_s < horizon_s), 0.5 * speed * behind, 0.0)
    num_left = s.max_tokens[rows] - s.num_generated[rows]
    area = np.minimum(area, num_left * (horizon_s - begin_s))
    return np.asarray(area / _expected_area(room, rows, policy), dtype=np.float64)


def _expected_area(room: Room, rows: IntArray, policy: AndesPolicy) -> FloatArray:
    """Area in token·s under the expected timeline of `rows` until the end of the horizon."""
    s = room.snapshot.sessions
    age_s = room.snapshot.now - s.arrival_time[rows] + policy.horizon_s - policy.expected_ttft_s
    age_s = np.maximum(age_s, 0.1 * policy.horizon_s)
    rise_s = np.minimum(age_s, s.max_tokens[rows] / s.read_rate[rows])
    area: FloatArray = s.read_rate[rows] * rise_s * (age_s - 0.5 * rise_s)
    return area
