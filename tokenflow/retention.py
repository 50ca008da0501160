"""How long the engine is to keep which blocks of a request: retention priorities.

Owns the few priorities there are and what they are given to. Only scheduling_policy tokenflow gives
any, with a host tier or without one, where they order the victims on the device alone; requests of
the baseline leave the engine's default, as those of a stock deployment do. They are fixed at each
enqueue, when nobody knows whether the request will be paused or end, so they say how likely its
blocks are to be wanted again:

- what several requests begin with is worth more than what one stream needs;
- what one stream needs is the first victim, yet worth a host copy. Among streams, the more a
  request has left to generate, the likelier it is to be paused and to come back, and the less
  likely its blocks are the remains of a request that has ended. Without that the remains of short
  requests, being younger, would outlive the KV of the streams that were paused for them;
- the output of a request that can never be paused ends with it: not worth a copy.

On a resume the old output is a part of the prompt, hence the ranges. What is shared is asked again
then: blocks that a request finds take on its priorities, so a resume that did not know who came
meanwhile would make the common beginning its own again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import timedelta

from tokenflow.config import OFFLOAD_MIN_PRIORITY
from tokenflow.executor.api import KvCacheRetentionConfig, TokenRangeRetentionConfig

SHARED_PRIORITY = 60
"""What several requests began with."""
SHARED_DURATION = timedelta(seconds=60)
"""After so long without a user it is worth no more than anything else: the engine's default."""
PRIVATE_PRIORITIES = range(OFFLOAD_MIN_PRIORITY, 36)
"""What one stream needs, from one that is about to end to one with much left: all worth a host
copy, none above the engine's default of 35, to which expired blocks return."""
TOKENS_PER_PRIORITY = 16
"""Tokens left to generate that raise a stream's blocks by one. By runs in virtual time: with 32,
and with one priority for all, paused KV was lost to ended requests of the demo's burst."""
LEASE_PRIORITY = 36
"""What a stream needs whose lease ends before it does: more than the default, because to the engine
the end of a lease is that of a request, and this one certainly comes back."""
ENDING_PRIORITY = 20
"""Output that nobody will resume (< OFFLOAD_MIN_PRIORITY: dropped without a copy)."""

_MAX_REMEMBERED_BLOCKS = 1 << 16

assert ENDING_PRIORITY < PRIVATE_PRIORITIES[0] <= PRIVATE_PRIORITIES[-1] < LEASE_PRIORITY
assert LEASE_PRIORITY < SHARED_PRIORITY


def retention_config(
    num_shared_tokens: int, num_left: int, *, is_pausable: bool, has_lease: bool = False
) -> KvCacheRetentionConfig:
    """Of one enqueue whose first `num_shared_tokens` tokens other requests began with too, and that
    has `num_left` tokens left to generate, over all its enqueues. has_lease: this enqueue ends
    before that."""
    level = min(num_left // TOKENS_PER_PRIORITY, len(PRIVATE_PRIORITIES) - 1) if is_pausable else 0
    priority = LEASE_PRIORITY if has_lease else PRIVATE_PRIORITIES[level]
    private = TokenRangeRetentionConfig(
        token_start=num_shared_tokens, token_end=None, priority=priority
    )
    shared = TokenRangeRetentionConfig(
        token_start=0,
        token_end=num_shared_tokens,
        priority=SHARED_PRIORITY,
        duration_ms=SHARED_DURATION,
    )
    return KvCacheRetentionConfig(
        token_range_retention_configs=(shared, private) if num_shared_tokens else (private,),
        decode_retention_priority=priority if is_pausable else ENDING_PRIORITY,
    )


class PromptBeginnings:
    """Remembers the whole blocks that recent prompts began with, and which of them several did.

    max_blocks: remembered at most; those longest without a request are forgotten first.
    """

    def __init__(self, tokens_per_block: int, max_blocks: int = _MAX_REMEMBERED_BLOCKS) -> None:
        self._tokens_per_block = tokens_per_block
        self._max_blocks = max_blocks
        self._is_shared: OrderedDict[int, bool] = OrderedDict()

    def observe(
        self,
        token_ids: Sequence[int],
        cache_salt_id: int | None,
        lora_task_id: int | None = None,
    ) -> int:
        """A request with this prompt came: how many of its leading tokens, in whole blocks, an
        earlier one began with too."""
        num_shared = 0
        for end, chain in self._blocks(token_ids, cache_salt_id, lora_task_id):
            is_known = chain in self._is_shared
            if is_known and end == num_shared + self._tokens_per_block:
                num_shared = end
            self._is_shared[chain] = is_known
            self._is_shared.move_to_end(chain)
        while len(self._is_shared) > self._max_blocks:
            self._is_shared.popitem(last=False)
        return num_shared

    def num_shared(
        self,
        token_ids: Sequence[int],
        cache_salt_id: int | None,
        lora_task_id: int | None = None,
    ) -> int:
        """Of a prompt that was observed: how many of its leading tokens, in whole blocks, another
        request began with too, before it or since."""
        num_shared = 0
        for end, chain in self._blocks(token_ids, cache_salt_id, lora_task_id):
            if not self._is_shared.get(chain):
                break
            self._is_shared.move_to_end(chain)
            num_shared = end
        return num_shared

    def _blocks(
        self, token_ids: Sequence[int], cache_salt_id: int | None, lora_task_id: int | None
    ) -> Iterator[tuple[int, int]]:
        """(end in tokens, hash of everything up to there) of each whole block."""
        size = self._tokens_per_block
        owner = (cache_salt_id, lora_task_id)  # KV is shared only with the same of both
        chain = hash(tuple(part for id in owner for part in (id is None, id or 0)))
        for end in range(size, len(token_ids) + 1, size):
            chain = hash((chain, tuple(token_ids[end - size : end])))
            yield end, chain
