"""What the two tiers of KV hold, and what that makes a pause and a resume cost.

Owns the choice between loading a paused stream's blocks from the host and computing them again,
and the forecast of where the KV of a stream that is paused now will be when it comes back. All are
functions of a snapshot.

The KV of all that started is kept on the device as long as it fits there. What overflows goes to
the host and costs a copy there and one back; what overflows both tiers is computed again. The
engine lets go first of what was paused first, which is due first: so the whole overflow meets each
resume, up to its own length.

By TensorRT-LLM's rules the host holds only what the device does not, the engine loads what it
finds, and steps wait for copies. With KvTiering blocks may be on both, so the two tiers hold less
in all; copies run beside the steps; and the host's part may be given up where computing is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenflow.types import BoolArray, FloatArray, IntArray, SessionState, Snapshot

_PREFILLING = int(SessionState.PREFILLING)
_RESUMING = int(SessionState.RESUMING)


class ResumeWays(NamedTuple):
    """How each row [n] would come back.

    num_tokens: tokens that it computes. num_blocks: blocks that it loads from the host.
    recomputes: it computes what it could load.
    """

    num_tokens: IntArray
    num_blocks: IntArray
    recomputes: BoolArray


def resume_ways(snapshot: Snapshot) -> ResumeWays:
    """The cheaper of load (onboard + what neither tier has) and recompute (all behind the device's
    part), where the engine can be told (TokenFlow, section 4.2.3); else what it does: load."""
    s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
    none = np.zeros(len(s), dtype=np.bool_)
    if not kv.has_tiering or not s.num_host_blocks.any():
        return ResumeWays(
            num_tokens=s.num_resume_tokens, num_blocks=s.num_host_blocks, recomputes=none
        )
    num_queued = int(s.num_host_blocks[s.state == _RESUMING].sum())  # before it on the link
    load_s = (s.num_host_blocks + num_queued) * costs.onboard_block_s
    everything = s.num_prompt_tokens + s.num_generated
    behind = s.num_resume_tokens + s.num_host_blocks * kv.tokens_per_block
    behind = np.minimum(behind, np.maximum(everything, s.num_resume_tokens))
    recompute_s = (behind - s.num_resume_tokens) / costs.prefill_tokens_per_s
    recomputes = (s.num_host_blocks > 0) & (recompute_s < load_s)
    return ResumeWays(
        num_tokens=np.where(recomputes, behind, s.num_resume_tokens),
        num_blocks=np.where(recomputes, 0, s.num_host_blocks),
        recomputes=recomputes,
    )


class Overflow(NamedTuple):
    """What the tiers will not hold once everybody paused has gone on.

    num_started_blocks: KV of all that started. num_blocks: what the device does not hold of it.
    is_lost: not all of that fits on the host either. lost_share: what of a mean stream's KV is
    computed again, from 0 to 1.
    mean_copy_s: seconds of copying, both ways, in the mean pause; 0 while the device holds all.
    """

    snapshot: Snapshot
    num_tokens: IntArray
    num_started_blocks: int
    num_blocks: int
    is_lost: bool
    lost_share: float
    mean_copy_s: float

    def after_pause(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """(tokens computed, blocks loaded) by a resume of each of `rows`, now in the engine."""
        if not self.num_blocks:
            return np.ones(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        if self.is_lost:
            return self.num_tokens[rows], np.zeros(len(rows), dtype=np.int64)
        num_blocks = self._moved(rows)
        if not loads(self.snapshot):
            size = self.snapshot.kv.tokens_per_block
            tokens = np.minimum(num_blocks * size, self.num_tokens[rows])
            return tokens, np.zeros(len(rows), dtype=np.int64)
        return np.ones(len(rows), dtype=np.int64), num_blocks

    def offload_s(self, rows: IntArray) -> FloatArray:
        """Seconds of copying the blocks of `rows` to the host that the pool is going to need."""
        kv, costs = self.snapshot.kv, self.snapshot.costs
        if not self.num_blocks or not kv.num_host_blocks:
            return np.zeros(len(rows))
        copied = self.snapshot.sessions.num_copied_blocks[rows]
        result: FloatArray = costs.offload_block_s * np.maximum(self._moved(rows) - copied, 0)
        return result

    def _moved(self, rows: IntArray) -> IntArray:
        num_blocks = -(-self.num_tokens[rows] // self.snapshot.kv.tokens_per_block)
        result: IntArray = np.minimum(num_blocks, self.num_blocks)
        return result


def overflow_of(snapshot: Snapshot, num_tokens: IntArray, num_filled: IntArray) -> Overflow:
    """The forecast for `snapshot`; num_tokens [n]: prompt and generated of each row; num_filled
    [n]: the blocks that they fill."""
    s, kv, costs = snapshot.sessions, snapshot.kv, snapshot.costs
    is_in_pool = s.started | (s.state == _PREFILLING)
    if np.count_nonzero(s.held):
        is_in_pool &= ~s.held  # its KV goes first
    cached = num_filled[is_in_pool]
    num_started_blocks = int(np.add.reduce(cached))
    num_blocks = max(0, num_started_blocks - kv.num_total_blocks)
    num_kept = kv.num_host_blocks
    if num_blocks and kv.has_tiering:
        num_kept -= int(s.num_copied_blocks.sum())  # on both tiers
    is_lost = num_blocks > num_kept
    lost_share = mean_copy_s = 0.0
    num_lost_blocks = num_blocks - (num_kept if loads(snapshot) else 0)
    if num_lost_blocks > 0:
        lost_share = min(1.0, num_lost_blocks * len(cached) / num_started_blocks)
    if num_blocks and kv.num_host_blocks:
        mean = min(num_blocks, num_started_blocks / len(cached))
        comes_back = loads(snapshot) and not is_lost
        mean_copy_s = mean * (costs.offload_block_s + (costs.onboard_block_s if comes_back else 0))
    return Overflow(
        snapshot=snapshot,
        num_tokens=num_tokens,
        num_started_blocks=num_started_blocks,
        num_blocks=num_blocks,
        is_lost=is_lost,
        lost_share=lost_share,
        mean_copy_s=mean_copy_s,
    )


def loads(snapshot: Snapshot) -> bool:
    """True if a block that went to the host comes back from there: always by TensorRT-LLM's rules;
    with KvTiering where loading one is not slower than computing it."""
    kv, costs = snapshot.kv, snapshot.costs
    if not kv.num_host_blocks:
        return False
    computed_s = kv.tokens_per_block / costs.prefill_tokens_per_s
    return not kv.has_tiering or costs.onboard_block_s <= computed_s


def link_block_s(snapshot: Snapshot) -> float:
    """Seconds of the link per block that leaves the device and comes back: one way at a time where
    steps wait for both; the slower way where the two run side by side."""
    costs = snapshot.costs
    if snapshot.kv.has_tiering:
        return max(costs.offload_block_s, costs.onboard_block_s)
    return costs.offload_block_s + costs.onboard_block_s
