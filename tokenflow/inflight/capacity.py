"""Who holds a batch slot and blocks in the next step: the engine's two capacity policies.

Both walk the active sequences front to back (descending priority, first come first served inside),
take blocks as they go and never let more than `max_batch_size` be started at once. They are
TensorRT-LLM's, restated:

GuaranteedNoEvict starts a sequence only if prompt + max_tokens - 1 tokens fit beside everything the
started ones may still grow to, and stops at the first that does not fit. A started one is never
stopped. Reservations count blocks shared by reuse once per sequence, which is safe.

MaxUtilization takes blocks as they are needed. When a sequence does not fit, the last started one
from there on (lowest priority, newest; possibly itself) is paused: its KV is stored for reuse, its
output becomes context, and it stays active. A batch slot alone never makes it pause somebody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenflow.errors import InternalError
from tokenflow.executor.api import CapacitySchedulerPolicy, num_blocks_needed
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.sequence import SequenceState, started


class CapacityPolicy(Protocol):
    """Decides who holds blocks.

    waits_for_an_end: whom it did not start it does not start before somebody has ended.
    """

    @property
    def waits_for_an_end(self) -> bool: ...

    def schedule(
        self, active: Sequence[SequenceState], kv: KvCacheManager, max_batch_size: int
    ) -> int:
        """Start, grow and pause sequences of `active` (sorted) for one step, so that every started
        one has blocks for the token it computes next. Returns how many were paused."""
        ...


class GuaranteedNoEvict:
    """Reserve the whole length of a request before it starts."""

    waits_for_an_end = True

    def schedule(
        self, active: Sequence[SequenceState], kv: KvCacheManager, max_batch_size: int
    ) -> int:
        """See the module's text. Raises InternalError if a reservation was not kept."""
        running = started(active)
        for sequence in running:
            if not _grow(sequence, kv):
                raise InternalError(f"no block for reserved request {sequence.request_id}")
        num_started = len(running)
        if num_started == len(active):
            return 0
        num_reserved = sum(_num_reserved_blocks(sequence, kv) for sequence in running)
        for sequence in active:
            if sequence.is_started:
                continue
            num_needed = _num_reserved_blocks(sequence, kv)
            if num_started == max_batch_size or num_reserved + num_needed > kv.num_total_blocks:
                break
            if not sequence.start(kv):
                raise InternalError(f"no block for reserved request {sequence.request_id}")
            num_reserved += num_needed
            num_started += 1
        return 0


class MaxUtilization:
    """Take blocks as they are needed; pause the last started sequence when they run out."""

    waits_for_an_end = False

    def schedule(
        self, active: Sequence[SequenceState], kv: KvCacheManager, max_batch_size: int
    ) -> int:
        """See the module's text."""
        num_free_slots = max_batch_size - len(started(active))
        num_paused = 0
        i, end = 0, len(active)
        while i < end:
            sequence = active[i]
            if sequence.is_started:
                fits = _grow(sequence, kv)
            elif num_free_slots <= 0:
                i += 1
                continue
            else:
                fits = sequence.start(kv)
                num_free_slots -= fits
            if fits:
                i += 1
                continue
            victim = next((j for j in range(end - 1, i - 1, -1) if active[j].is_started), None)
            if victim is None:
                break
            active[victim].stop(kv, keep=True)
            num_free_slots += 1
            num_paused += 1
            end = victim
        return num_paused


def capacity_policy(policy: CapacitySchedulerPolicy) -> CapacityPolicy:
    """The policy of a configuration."""
    if policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
        return GuaranteedNoEvict()
    return MaxUtilization()


def _num_reserved_blocks(sequence: SequenceState, kv: KvCacheManager) -> int:
    if not sequence.num_final_blocks:
        sequence.num_final_blocks = num_blocks_needed(
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            kv.tokens_per_block,
            sequence.num_prompt_tokens,
            sequence.max_tokens,
        )
    return sequence.num_final_blocks


def _grow(sequence: SequenceState, kv: KvCacheManager) -> bool:
    blocks, num_tokens = sequence.blocks, len(sequence.token_ids)
    assert blocks is not None
    if num_tokens <= len(blocks.blocks) * kv.tokens_per_block:
        return True
    return kv.grow(blocks, num_tokens)
