"""Copies to the host before a pause, as the baselines with a host tier of their own make them.

Owns how much is asked for: full blocks without a copy, the oldest of each stream first, as many as
the link takes in its share of the time until the next plan and as the host has room for. Only
engines with KvTiering are asked.
"""

from __future__ import annotations

import numpy as np

from tokenflow.baselines.room import Room
from tokenflow.types import IntArray, SessionState

_UNKNOWN_NUM_BLOCKS = 8
"""Blocks copied per plan until it is known what a copy costs."""


def write_through(room: Room, rows: IntArray, share: float = 1.0) -> None:
    """Copy blocks of the running `rows`, first come first, in `share` of the link's time."""
    s, kv, costs = room.snapshot.sessions, room.snapshot.kv, room.snapshot.costs
    if not kv.has_tiering:
        return
    num_left = _UNKNOWN_NUM_BLOCKS
    if costs.offload_block_s > 0:
        num_left = max(1, int(share * costs.plan_interval_s / costs.offload_block_s))
    num_left = min(num_left, kv.num_host_blocks - _num_spoken_for(room))
    # The KV of the last token is written by the next step.
    full = (room.num_tokens - 1) // kv.tokens_per_block - s.num_copied_blocks
    paused = set(room.pause)
    for row in rows[full[rows] > 0].tolist():
        if num_left < 1:
            return
        if row not in paused:
            num_blocks = min(num_left, int(full[row]))
            room.copy_out(row, num_blocks)
            num_left -= num_blocks


def _num_spoken_for(room: Room) -> int:
    """Host blocks in use or to be: the KV of all that is paused, copies of what runs, and what
    resumes under way load."""
    s = room.snapshot.sessions
    resuming = s.state == SessionState.RESUMING
    num_blocks = s.num_copied_blocks + np.where(resuming, s.num_host_blocks, 0)
    out = (s.state == SessionState.PREEMPTED) | (s.state == SessionState.PAUSING)
    out[room.pause] = True
    num_blocks[out] = -(-room.num_tokens[out] // room.snapshot.kv.tokens_per_block)
    return int(num_blocks.sum())
