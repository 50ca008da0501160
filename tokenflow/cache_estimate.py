"""Which released requests' KV an engine still holds, seen from outside by counting blocks.

For engines without KV events, and for what was missed where there are events. Owns the counts and
their order. Unreferenced blocks are given up in order of release, each request's tail first: from
the device to the host tier if there is one, and from the host for good. Sharing between requests
and retention priorities are ignored, which errs towards "more must be computed or brought back".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class CacheEstimate:
    """Blocks by handle in both tiers; `shrink` fits them into the pools.

    num_host_blocks: size of the host tier; may be told later.
    """

    def __init__(self, num_total_blocks: int, num_host_blocks: int = 0) -> None:
        self._num_total_blocks = num_total_blocks
        self._device: OrderedDict[int, int] = OrderedDict()
        self._host: OrderedDict[int, int] = OrderedDict()
        self._num_on_device = 0
        self._num_on_host = 0
        self.num_host_blocks = num_host_blocks

    def released(self, handle: int, num_blocks: int) -> None:
        """The engine let go of `num_blocks` of a request and keeps them for reuse."""
        self.forget(handle)
        if num_blocks > 0:
            self._device[handle] = num_blocks
            self._num_on_device += num_blocks

    def forget(self, handle: int) -> None:
        """The request is (being) started again: its entry leaves."""
        self._num_on_device -= self._device.pop(handle, 0)
        self._num_on_host -= self._host.pop(handle, 0)

    def clear(self) -> None:
        """The engine is gone, and its cache with it."""
        self._device.clear()
        self._host.clear()
        self._num_on_device = self._num_on_host = 0

    def shrink(self, num_used_blocks: int) -> list[int]:
        """Account for `num_used_blocks` referenced in the engine; handles whose blocks moved or
        were lost, each once."""
        hit: dict[int, None] = {}
        surplus = self._num_on_device + num_used_blocks - self._num_total_blocks
        for handle, num_moved in _take(self._device, surplus):
            self._num_on_device -= num_moved
            self._host[handle] = self._host.get(handle, 0) + num_moved
            self._num_on_host += num_moved
            hit[handle] = None
        for handle, num_lost in _take(self._host, self._num_on_host - self.num_host_blocks):
            self._num_on_host -= num_lost
            hit[handle] = None
        return list(hit)

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Requests with blocks on the device and how many, those first that give theirs up first;
        nothing may be released or forgotten meanwhile."""
        return iter(self._device.items())

    def num_blocks(self, handle: int) -> tuple[int, int]:
        """Blocks of the request that are presumably still there: on the device, on the host."""
        return self._device.get(handle, 0), self._host.get(handle, 0)


def _take(entries: OrderedDict[int, int], num_wanted: int) -> list[tuple[int, int]]:
    """Take so many blocks from the first entries on: (handle, blocks) of each that gave some."""
    taken: list[tuple[int, int]] = []
    while num_wanted > 0 and entries:
        handle, num_blocks = next(iter(entries.items()))
        num = min(num_wanted, num_blocks)
        if num == num_blocks:
            del entries[handle]
        else:
            entries[handle] = num_blocks - num
        num_wanted -= num
        taken.append((handle, num))
    return taken
