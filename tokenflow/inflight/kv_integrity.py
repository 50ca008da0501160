"""What must hold of the KV bookkeeping between steps; for tests and idle moments.

Owns the assertions and nothing else. They look at everything, so they cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenflow.inflight.reuse_tree import Block
from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.tiers import BlockTiers


def check_blocks(
    stored: Sequence[Block],
    paths: Iterable[tuple[Sequence[Block], int]],
    tiers: BlockTiers,
    *,
    num_used_blocks: int,
    tokens_per_block: int,
) -> None:
    """Assert that every slot has one owner, every reference is counted, each tier is left from the
    leaves up, and every block that may be evicted is queued for it.

    stored: all blocks of the tree. paths: the blocks of each sequence, and how many of them are
    stored.
    """
    counts: dict[Block, int] = dict.fromkeys(stored, 0)
    for blocks, num_stored in paths:
        assert len(set(blocks)) == len(blocks), "block twice in a sequence"
        for i, block in enumerate(blocks):
            counts[block] = counts.get(block, 0) + 1
            assert block.slot is not None, "used block is not on the device"
            if block.is_stored:
                assert i < num_stored, "block stored out of order"
                assert i == 0 or block.parent is blocks[i - 1], "wrong parent"
    _check_slots(list(counts), tiers)
    used = sum(count > 0 for count in counts.values())
    assert used == num_used_blocks
    for block, count in counts.items():
        assert block.ref_count == count, "reference count differs from the references"
    for block in stored:
        _check_stored(block, tokens_per_block)
    assert tiers.victims.covers(stored), "cached block lost"
    figures = tiers.stats(num_used_blocks)
    num_cached = sum(block.ref_count == 0 and block.slot is not None for block in stored)
    assert figures.num_device_cached_blocks == num_cached
    assert figures.num_host_cached_blocks == sum(b.host_slot is not None for b in stored)


def _check_slots(blocks: Sequence[Block], tiers: BlockTiers) -> None:
    device = [block.slot for block in blocks if block.slot is not None]
    host = [block.host_slot for block in blocks if block.host_slot is not None]
    for flight in tiers.ahead.flights:
        gone = flight.block.parent is None
        if flight.direction is CopyDirection.ONBOARD or gone:
            device.append(flight.device_slot)
        if flight.direction is CopyDirection.OFFLOAD or gone:
            host.append(flight.host_slot)
    device += tiers.free_device_slots
    host += tiers.free_host_slots
    assert sorted(device) == list(range(tiers.num_device_blocks)), "slot lost or owned twice"
    assert sorted(host) == list(range(tiers.num_host_blocks)), "host slot lost or owned twice"


def _check_stored(block: Block, tokens_per_block: int) -> None:
    parent = block.parent
    assert parent is not None
    assert parent.children[block.token_ids] is block
    assert block.slot is not None or block.host_slot is not None, "stored nowhere"
    near = [b for b in block.children.values() if b.slot is not None or b.in_transit]
    assert block.num_device_children == len(near)
    assert block.slot is not None or block.in_transit or not near, "device block below a host block"
    if isinstance(parent, Block):
        assert len(parent.token_ids) == tokens_per_block, "child of a partial block"
        assert parent.ref_count or not block.ref_count, "parent of a used block unused"
