"""What `kv_api.KvTiering` asks for, on the cache itself; only between steps.

Owns the way from tokens to blocks. Tokens name a prefix as a request with them would find it: the
last one is never looked up, and a block that they fill in part is found if it begins with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow.executor.kv_api import KvLocation
from tokenflow.inflight.block_store import BlockStore
from tokenflow.inflight.block_use import BlockUse
from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.tiers import BlockTiers


class KvAhead:
    """Looks up, copies, brings back and gives up."""

    def __init__(
        self, store: BlockStore, tiers: BlockTiers, use: BlockUse, tokens_per_block: int
    ) -> None:
        self._store = store
        self._tiers = tiers
        self._use = use
        self._tokens_per_block = tokens_per_block

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """See KvTiering."""
        match = self._store.match(token_ids, cache_salt_id)
        path = match.path
        device = [block for block in path if block.slot is not None]
        num_copied = next(
            (i for i, block in enumerate(device) if block.host_slot is None), len(device)
        )
        return KvLocation(
            num_tokens=len(match.blocks) * self._tokens_per_block + match.num_partial_tokens,
            num_device_blocks=len(device),
            num_host_blocks=len(path) - len(device),
            num_copied_blocks=num_copied,
        )

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """See KvTiering."""
        self._tiers.ahead.offload(self._own(token_ids, cache_salt_id), max_blocks)

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        path = self._store.match(token_ids, cache_salt_id).path
        there = [block for block in path if block.slot is not None]
        self._use.pin(there)  # so that room for the rest is not taken from them
        self._tiers.ahead.onboard(path)
        self._use.unpin(there)
        for block in reversed(there):
            if not block.ref_count:
                self._use.touch(block, ended=False)
        self._use.want([block for block in path if block.slot is not None or block.in_transit])

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """See KvTiering."""
        self._tiers.give_up(self._own(token_ids, cache_salt_id))

    def _own(self, token_ids: Sequence[int], cache_salt_id: int | None) -> list[Block]:
        """The blocks that hold these tokens and no others."""
        match = self._store.match(token_ids, cache_salt_id)
        return match.path if self._store.covers_partial(match, token_ids) else match.blocks
