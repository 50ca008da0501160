"""Who watches for which tokens below one block of the mirror of a KV cache.

Owns the handles by the tokens that each looks for next. Invariant: `related_to` costs a search and
what it yields, however many watch: thousands of paused streams may have nothing but the root in
common.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

_Entry = tuple[tuple[int, ...], int]


class Watches:
    """Handles by the tokens they look for."""

    __slots__ = ("_entries", "_keys", "_lengths")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, ...]] = {}
        self._entries: list[_Entry] = []
        self._lengths: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def add(self, handle: int, key: tuple[int, ...]) -> None:
        """`handle`, which is not there, looks for `key`."""
        self._keys[handle] = key
        insort(self._entries, (key, handle))
        self._lengths[len(key)] = self._lengths.get(len(key), 0) + 1

    def discard(self, handle: int) -> None:
        """`handle` watches no more; nothing happens if it does not."""
        key = self._keys.pop(handle, None)
        if key is None:
            return
        del self._entries[bisect_left(self._entries, (key, handle))]
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]

    def related_to(self, tokens: tuple[int, ...]) -> Iterator[int]:
        """Those who look for tokens that begin with `tokens`, or with which `tokens` begin."""
        entries = self._entries
        yield from self._beginning_with(entries, tokens)
        for length in self._lengths:
            if length < len(tokens):
                yield from self._looking_for(entries, tokens[:length])

    @staticmethod
    def _beginning_with(entries: list[_Entry], tokens: tuple[int, ...]) -> Iterator[int]:
        for i in range(bisect_left(entries, (tokens, -1)), len(entries)):
            key, handle = entries[i]
            if key[: len(tokens)] != tokens:
                return
            yield handle

    @staticmethod
    def _looking_for(entries: list[_Entry], key: tuple[int, ...]) -> Iterator[int]:
        for i in range(bisect_left(entries, (key, -1)), len(entries)):
            if entries[i][0] != key:
                return
            yield entries[i][1]
