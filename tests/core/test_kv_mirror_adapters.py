"""The mirror of a cache with KV of LoRA adapters: nobody's is taken for another's, and nothing is
kept of an adapter that has no blocks and that nobody watches."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
)
from tokenflow.kv_mirror import KvMirror

SIZE = 2
CHAIN = (1, 2, 3, 4, 5, 6)  # three blocks, the same tokens for every adapter
ADAPTERS = (None, 7, 8)


class Fed:
    """A mirror and the events of its engine."""

    def __init__(self) -> None:
        self.mirror = KvMirror(SIZE)
        self._next_id = 0
        self.say(KVCacheCreatedData([8, 0]))

    def say(self, data: KVCacheEventData) -> None:
        self.mirror.apply([KVCacheEvent(self._next_id, data)])
        self._next_id += 1

    def store(
        self, lora_id: int | None, tokens: Sequence[int], block_hash: int, parent: int | None = None
    ) -> None:
        block = KVCacheStoredBlockData(
            block_hash=block_hash, tokens=list(tokens), cache_level=0, priority=35, lora_id=lora_id
        )
        self.say(KVCacheStoredData(parent_hash=parent, blocks=[block]))

    @property
    def adapters(self) -> set[int | None]:
        """Those of which something is kept."""
        return set(self.mirror._tree._roots)


def test_looking_keeps_nothing() -> None:
    fed = Fed()
    for lora_id in range(100):
        assert fed.mirror.locate(CHAIN, lora_id).num_tokens == 0
    assert not fed.adapters


def test_an_adapter_is_forgotten_with_its_last_block_and_its_last_watch() -> None:
    fed = Fed()
    for lora_id in range(100):
        fed.mirror.watch(1, CHAIN, lora_id)
        assert fed.adapters == {lora_id}
        fed.store(lora_id, CHAIN[:2], block_hash=5)
        assert fed.mirror.changed() == [1]
        assert fed.mirror.watch(1, CHAIN, lora_id).num_tokens == 2
        fed.mirror.unwatch(1)
        assert fed.adapters == {lora_id}
        fed.say(KVCacheRemovedData([5]))
        assert not fed.adapters


def test_a_block_whose_name_is_given_to_other_tokens_is_found_under_its_adapter() -> None:
    fed = Fed()
    fed.store(7, (1, 2), block_hash=5)
    fed.store(7, (3, 4), block_hash=5)
    assert fed.adapters == {7}
    assert fed.mirror.locate((3, 4), 7).num_tokens == 2
    assert fed.mirror.locate((1, 2), 7).num_tokens == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "watch", "unwatch", "locate"]),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_each_adapter_has_its_own_blocks(steps: list[tuple[str, int, int]]) -> None:
    fed = Fed()
    depth = [0, 0, 0]  # blocks of the chain, by adapter
    watched: dict[int, int] = {}
    for what, adapter, number in steps:
        before = list(depth)
        if what == "store" and depth[adapter] < 3:
            at = depth[adapter]
            name = 10 * adapter + at
            tokens = CHAIN[SIZE * at : SIZE * at + SIZE]
            fed.store(ADAPTERS[adapter], tokens, name, name - 1 if at else None)
            depth[adapter] += 1
        elif what == "remove" and number < depth[adapter]:
            fed.say(KVCacheRemovedData([10 * adapter + number]))
            depth[adapter] = number
        elif what == "watch":
            found = fed.mirror.watch(number, CHAIN, ADAPTERS[adapter])
            assert found.num_tokens == SIZE * depth[adapter]
            watched[number] = adapter
        elif what == "unwatch":
            fed.mirror.unwatch(number)
            watched.pop(number, None)
        changed = fed.mirror.changed()
        for handle, of in watched.items():
            assert depth[of] == before[of] or handle in changed
            if handle in changed:
                fed.mirror.watch(handle, CHAIN, ADAPTERS[of])
        for lora_id, num in zip(ADAPTERS, depth, strict=True):
            assert fed.mirror.locate(CHAIN, lora_id).num_tokens == SIZE * num
        used = {of for of, num in enumerate(depth) if num} | set(watched.values())
        assert fed.adapters == {ADAPTERS[of] for of in used}
