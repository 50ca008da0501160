"""What TokenFlow's paper lets be done: who may be paused, how many may hold memory, who may start.

Owns the knobs and the tests of paper.py, which says where each is from. All functions only read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenflow.baselines.room import Room
from tokenflow.types import FloatArray, IntArray, SessionState


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy:
    """interval_s: of passes. conservativeness: μ. adjustment: λ of Eq. 5. critical_s: buffer, in
    seconds of reading, under which a reader is critical and a paused stream a candidate.
    reserve_tokens: added to each footprint. prefill_share: of the slots, that starts and
    recomputations may hold at once. shortfall_weight: γ of the objective. write_through: copy KV to
    the host as it is written (KvTiering)."""

    interval_s: float = 1.0
    conservativeness: float = 1.0
    adjustment: float = 0.1
    critical_s: float = 2.0
    reserve_tokens: int = 64
    prefill_share: float = 0.4
    shortfall_weight: float = 1e-3
    write_through: bool = True


class Capacity:
    """Σ R of what started against Γ as it is now, newcomers added one by one (section 4.3)."""

    def __init__(self, room: Room) -> None:
        s = room.snapshot.sessions
        served = s.started & (s.state != SessionState.CANCELLING)
        served |= (s.state == SessionState.PREFILLING) | (s.state == SessionState.RESUMING)
        served &= ~s.held
        self._room = room
        self._num = int(served.sum())
        self._rate = float(s.read_rate[served].sum())
        self._tokens = float(room.num_tokens[served].sum())

    def is_kept(self) -> bool:
        """True if what started can be carried."""
        return self._holds(self._num, self._rate, self._tokens)

    def admits(self, row: int) -> bool:
        """True if it still can with `row`; one alone always."""
        return not self._num or self._holds(*self._with(row))

    def add(self, row: int) -> None:
        """Count `row` as started."""
        self._num, self._rate, self._tokens = self._with(row)

    def _with(self, row: int) -> tuple[int, float, float]:
        rate = float(self._room.snapshot.sessions.read_rate[row])
        tokens = float(self._room.num_tokens[row])
        return self._num + 1, self._rate + rate, self._tokens + tokens

    def _holds(self, num: int, rate: float, tokens: float) -> bool:
        """Γ: decode speed of the largest batch of such streams, at their present lengths."""
        if not num:
            return True
        kv, mean = self._room.snapshot.kv, tokens / num
        in_pool = kv.num_total_blocks * kv.tokens_per_block / max(1.0, mean)
        batch_size = max(1, int(min(kv.max_batch_size, num, in_pool)))
        return rate <= batch_size / self._room.snapshot.costs.step_s(batch_size, batch_size * mean)


def num_scheduled(room: Room, policy: PaperPolicy) -> int:
    """Streams that may hold memory: Eq. 4 and 5, never fewer than one."""
    kv, num_running = room.snapshot.kv, room.num_staying
    known = np.concatenate([room.running, room.starting, room.outside])
    if not len(known):
        return 1
    tokens = room.num_tokens[known] + policy.reserve_tokens
    footprint = float((-(-tokens // kv.tokens_per_block)).mean())
    static = int(kv.num_total_blocks / footprint)
    if num_running >= kv.max_batch_size:
        return max(1, static)
    return max(1, math.ceil(static - policy.adjustment * (static - num_running)))


def recompute_s(room: Room) -> FloatArray:
    """Seconds [n] in which all KV of each row is computed again."""
    result: FloatArray = room.num_tokens / room.snapshot.costs.prefill_tokens_per_s
    return result


def io_s(room: Room) -> FloatArray:
    """t_IO [n]: evict what has no copy and load it all back, behind the copies queued already;
    +inf without a host tier."""
    s, kv, costs = room.snapshot.sessions, room.snapshot.kv, room.snapshot.costs
    if not kv.num_host_blocks:
        return np.full(len(s), np.inf)
    blocks = -(-room.num_tokens // kv.tokens_per_block)
    leaving = s.state == SessionState.PAUSING
    queued_out = int(np.maximum(s.num_blocks_held - s.num_copied_blocks, 0)[leaving].sum())
    queued_in = int(s.num_host_blocks[s.state == SessionState.RESUMING].sum())
    evict_s = costs.offload_block_s * (queued_out + np.maximum(blocks - s.num_copied_blocks, 0))
    result: FloatArray = evict_s + costs.onboard_block_s * (queued_in + blocks)
    return result


def victims(room: Room, policy: PaperPolicy) -> IntArray:
    """Running rows whose buffer covers a pause, in order of arrival."""
    costs, rows = room.snapshot.costs, room.pausable
    away_s = np.minimum(io_s(room), recompute_s(room))[rows]
    away_s += costs.pause_s + costs.resume_s + policy.interval_s
    result: IntArray = rows[room.buffer_s[rows] >= policy.conservativeness * away_s]
    return result
