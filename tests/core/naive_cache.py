"""An engine's cache as a flat table: what it holds where, and the events that it gives of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenflow.executor.kv_api import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    KvLocation,
)

SIZE = 2
Tokens = tuple[int, ...]
Key = tuple[int, Tokens]
"""(salt, all tokens from the root to the end of the block)."""


def location(tokens: int, device: int, host: int = 0, copied: int = 0) -> KvLocation:
    return KvLocation(
        num_tokens=tokens,
        num_device_blocks=device,
        num_host_blocks=host,
        num_copied_blocks=copied,
    )


@dataclass
class NaiveCache:
    """An engine's cache as a flat table, and the events that it gives."""

    blocks: dict[Key, list[int]] = field(default_factory=dict)  # [level, has copy]
    events: list[KVCacheEvent] = field(default_factory=list)
    next_id: int = 0

    def say(self, data: KVCacheEventData) -> None:
        self.events.append(KVCacheEvent(self.next_id, data))
        self.next_id += 1

    def drain(self) -> list[KVCacheEvent]:
        events, self.events = self.events, []
        return events

    def create(self) -> None:
        self.blocks.clear()
        self.say(KVCacheCreatedData([8, 8]))

    def tell_anew(self) -> None:
        """All there is, parents before children; then the copies."""
        self.say(KVCacheCreatedData([8, 8]))
        keys = sorted(self.blocks, key=lambda key: len(key[1]))
        for salt, tokens in keys:
            start = (len(tokens) - 1) // SIZE * SIZE
            level = self.blocks[salt, tokens][0]
            block = KVCacheStoredBlockData(hash((salt, tokens)), list(tokens[start:]), level, 35)
            self.say(KVCacheStoredData(hash((salt, tokens[:start])) if start else None, [block]))
        for key in keys:
            if self.blocks[key][1]:
                self.say(KVCacheUpdatedData(hash(key), has_host_copy=True))

    def store(self, salt: int, tokens: tuple[int, ...]) -> None:
        """What of `tokens` is not there, in one event, as engines do."""
        new, parent = [], None
        for start in range(0, len(tokens), SIZE):
            key = (salt, tokens[: start + SIZE])
            if key not in self.blocks:
                self.blocks[key] = [0, 0]
                new.append(KVCacheStoredBlockData(hash(key), list(key[1][start:]), 0, 35))
            elif not new:
                parent = hash(key)
        if new:
            self.say(KVCacheStoredData(parent, new))

    def remove(self, key: Key) -> None:
        """With its subtree, the deepest first."""
        salt, tokens = key
        gone = [k for k in self.blocks if k[0] == salt and k[1][: len(tokens)] == tokens]
        gone.sort(key=lambda k: -len(k[1]))
        for k in gone:
            del self.blocks[k]
        self.say(KVCacheRemovedData([hash(k) for k in gone]))

    def move(self, key: Key) -> None:
        entry = self.blocks[key]
        diff = KVCacheEventDiffInt(entry[0], 1 - entry[0])
        entry[0], entry[1] = 1 - entry[0], 0
        self.say(KVCacheUpdatedData(hash(key), cache_level=diff))

    def copy(self, key: Key) -> None:
        entry = self.blocks[key]
        if entry[0] == 0:
            entry[1] = 1 - entry[1]
            self.say(KVCacheUpdatedData(hash(key), has_host_copy=bool(entry[1])))

    def locate(self, tokens: tuple[int, ...]) -> KvLocation:
        """The least favourable of the salts that are there at each step."""
        salts, num_tokens = {0, 1}, 0
        levels: list[int] = []
        copies: list[bool] = []
        while True:
            step = tokens[num_tokens : num_tokens + SIZE]
            ways = {s: self._longest(s, tokens[:num_tokens], step) for s in salts}
            if num_tokens == 0:  # who has nothing at all is somebody else's salt
                exact = {s for s, way in ways.items() if len(way) == SIZE}
            else:
                exact = (
                    {s for s, way in ways.items() if len(way) == SIZE}
                    if all(len(way) == SIZE for way in ways.values())
                    else set()
                )
            is_last = not exact or not step
            if is_last:
                if num_tokens == 0:
                    known = [w for w in ways.values() if w]
                    way = max(known, key=len, default=())
                    keys = [(s, way) for s in salts if (s, way) in self.blocks]
                else:
                    way = min(ways.values(), key=len)
                    keys = [(s, tokens[:num_tokens] + w) for s, w in ways.items() if w]
                if not way:
                    keys = []
                num_tokens += len(way)
            else:
                keys = [(s, tokens[:num_tokens] + step) for s in exact]
                salts = exact
                num_tokens += SIZE
            if keys:
                levels.append(max(self.blocks[k][0] for k in keys))
                copies.append(all(self.blocks[k][1] for k in keys))
            if is_last:
                break
        num_device = next((i for i, level in enumerate(levels) if level), len(levels))
        num_copied = 0
        while num_copied < num_device and copies[num_copied]:
            num_copied += 1
        return location(num_tokens, num_device, sum(levels), num_copied)

    def _longest(self, salt: int, before: Tokens, step: Tokens) -> Tokens:
        for length in range(len(step), 0, -1):
            if (salt, before + step[:length]) in self.blocks:
                return step[:length]
        return ()
