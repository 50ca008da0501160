"""KV beyond the device pool, as seen from outside an engine: events, statistics, tiering.

Owns the names. Events follow `tensorrt_llm.bindings.executor.kv_cache` of TensorRT-LLM 1.2.x;
cache level 0 is the device, 1 the host. `KvTiering` is a capability of our own that the Executor of
TensorRT-LLM does not have: there a block goes to the host only when its device block is wanted for
something else, and comes back only when a request matches it.

What callers rely on:
- events become visible once per iteration, in order, with consecutive ids; the oldest are discarded
  when the buffer is full, so a gap in the ids means that a mirror must be rebuilt;
- after such a loss our engines tell everything anew, unless it takes more than half of the buffer:
  once the reader has taken what was left, the next iteration gives Created, Stored for all that can
  be found, and Updated for each copy on the host. TensorRT-LLM does not: there a mirror learns what
  is stored from then on, and the rest stays unknown;
- a block is named by a hash chained over its parent's, so equal hashes mean equal histories;
- partial blocks are reported as stored too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

DEVICE_LEVEL = 0
HOST_LEVEL = 1


class KVCacheCreatedData(msgspec.Struct, frozen=True, tag="created"):
    """The pools were made, or (ours) all that is in them follows: what was known before is void.
    num_blocks_per_cache_level: [device, host]."""

    num_blocks_per_cache_level: list[int]


class KVCacheStoredBlockData(msgspec.Struct, frozen=True):
    """A block that can be found from now on. tokens: those whose KV it holds. lora_id: task id of
    the LoRA adapter that it was computed with, and is found by alone; None = of none."""

    block_hash: int
    tokens: list[int]
    cache_level: int
    priority: int
    lora_id: int | None = None


class KVCacheStoredData(msgspec.Struct, frozen=True, tag="stored"):
    """Blocks stored one under the other, the first one under `parent_hash` (None: a root)."""

    parent_hash: int | None
    blocks: list[KVCacheStoredBlockData]


class KVCacheRemovedData(msgspec.Struct, frozen=True, tag="removed"):
    """Blocks that cannot be found any more, in either tier."""

    block_hashes: list[int]


class KVCacheEventDiffInt(msgspec.Struct, frozen=True):
    """A value that changed."""

    old_value: int
    new_value: int


class KVCacheUpdatedData(msgspec.Struct, frozen=True, tag="updated"):
    """A block moved to another tier, or its priority changed.

    has_host_copy (ours): a block on the device got (True) or lost (False) a complete copy on the
    host; None = unchanged. Only engines with `KvTiering` keep such copies.
    """

    block_hash: int
    cache_level: KVCacheEventDiffInt | None = None
    priority: KVCacheEventDiffInt | None = None
    has_host_copy: bool | None = None


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


class KVCacheEvent(msgspec.Struct, frozen=True):
    """One change of what can be reused."""

    event_id: int
    data: KVCacheEventData
    window_size: int = 0
    attention_dp_rank: int | None = None


class KVCacheEventManager(Protocol):
    """Where KV events come from."""

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """Drain the events so far. Pass 0: with None the binding of TensorRT-LLM blocks, with the
        GIL held, until there is one."""
        ...


@runtime_checkable
class KVCacheSnapshots(Protocol):
    """What an event manager of ours can do besides, for a reader that lost events on the way."""

    def request_snapshot(self) -> None:
        """Have everything told anew at the next iteration for which the reader has taken all
        events. Never waits; any thread may call it."""
        ...


class KvTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Both tiers at the end of an iteration (ours; TensorRT-LLM's statistics do not tell).

    Block counts of a tier add up: used + cached + in transit + free = total. A block on both tiers
    counts in both. num_*_in_transit_blocks: targets of copies that are not complete.
    num_offload*/num_onboard*: blocks copied to the host and back, cumulative; failed ones were
    rolled back. offload_s, onboard_s: time those copies took. wait_s: time for which steps waited
    for copies; the rest was hidden behind computing.
    num_host_evicted_blocks: host blocks given up because another one needed the room.
    num_host_full: blocks that were not copied because the host tier had no room for them.
    last_copy_error: why a copy failed last.
    """

    block_bytes: int
    num_device_blocks: int
    num_device_used_blocks: int
    num_device_cached_blocks: int
    num_device_in_transit_blocks: int
    num_host_blocks: int
    num_host_cached_blocks: int
    num_host_in_transit_blocks: int
    num_offloads_started: int = 0
    num_offloads_completed: int = 0
    num_offloads_failed: int = 0
    num_onboards_started: int = 0
    num_onboards_completed: int = 0
    num_onboards_failed: int = 0
    offload_s: float = 0.0
    onboard_s: float = 0.0
    wait_s: float = 0.0
    num_host_evicted_blocks: int = 0
    num_host_full: int = 0
    last_copy_error: str = ""


@runtime_checkable
class KvPools(Protocol):
    """What an engine may say of its pools as soon as it is made (ours); of one that does not, it is
    known with the first iteration.

    num_host_blocks: blocks of the host tier, 0 without one. block_bytes: KV of one block.
    """

    @property
    def num_host_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


class KvLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of the beginning of some tokens is, in blocks (a partial last one counts).

    num_tokens: leading tokens whose KV exists in either tier.
    num_device_blocks: leading blocks on the device. num_host_blocks: those behind them that are on
    the host only. num_copied_blocks: how many of the former have a complete copy on the host too.
    """

    num_tokens: int = 0
    num_device_blocks: int = 0
    num_host_blocks: int = 0
    num_copied_blocks: int = 0


class KvTiering(Protocol):
    """Moves KV between the tiers ahead of need. Prefixes are named by their tokens, the key of
    block reuse. Hints never block. At the next iteration boundary cancels come first, all of them,
    then the hints in the order in which they were given (of a flood, some wait for the next
    boundary), and then requests get their blocks. What cannot be done then (no room, nothing there,
    too many bytes on their way) is left out, never an error; `KvTierStats.num_host_full` counts the
    blocks for which the host had no room. Copies run beside the steps."""

    def locate(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> KvLocation:
        """Where the KV of the beginning of `token_ids` is, as of the next iteration boundary. May
        take as long as a step: not for a loop that must not wait. Raises EngineLostError at once
        when the engine fails or is gone, RuntimeError when it is shut down before it answers,
        EngineError when it does not answer in time."""
        ...

    def offload(
        self, token_ids: Sequence[int], max_blocks: int, cache_salt_id: int | None = None
    ) -> None:
        """Copy up to `max_blocks` blocks of the prefix to the host, oldest first, leaving out those
        that have a copy. The device blocks stay; once unreferenced, one that has a copy can be had
        at once."""
        ...

    def prefetch(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """Bring the blocks of the prefix that are on the host only to the device, if there is room
        that no running request needs. The host copies stay."""
        ...

    def drop_host(self, token_ids: Sequence[int], cache_salt_id: int | None = None) -> None:
        """Give up what the host holds of the prefix and no tier above does, so that the next
        request computes it: for when computing is faster than loading."""
        ...
