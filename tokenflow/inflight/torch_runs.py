"""What a transfer between device KV and host KV copies, as few plain memory copies.

Owns the plan of a transfer. Both pools are block-major, so that a block is one run of bytes in
either, and blocks that follow each other in both are one run as well. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow.inflight.runner import TierCopy


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Blocks that follow each other in both pools: one plain copy."""

    device_block: int
    host_block: int
    num_blocks: int


def plan_runs(
    copies: Sequence[TierCopy], num_device_blocks: int, num_host_blocks: int
) -> list[CopyRun]:
    """The fewest runs that make all copies, by ascending host block.

    The blocks of one transfer are all different, so the order of its copies is free. Raises
    ValueError for a block that its pool does not have or that is named twice.
    """
    _check_blocks("device", [copy.device_block for copy in copies], num_device_blocks)
    _check_blocks("host", [copy.host_block for copy in copies], num_host_blocks)
    ordered = sorted(copies, key=lambda copy: copy.host_block)
    runs = []
    # Along a run both block ids grow like the position, so their distances to it stay the same.
    for _, members in itertools.groupby(
        enumerate(ordered),
        lambda item: (item[1].host_block - item[0], item[1].device_block - item[0]),
    ):
        run = [copy for _, copy in members]
        runs.append(CopyRun(run[0].device_block, run[0].host_block, len(run)))
    return runs


def split_runs(runs: Sequence[CopyRun], max_blocks: int) -> list[CopyRun]:
    """The same copies in runs of at most `max_blocks`."""
    return [
        CopyRun(
            run.device_block + first,
            run.host_block + first,
            min(max_blocks, run.num_blocks - first),
        )
        for run in runs
        for first in range(0, run.num_blocks, max_blocks)
    ]


def _check_blocks(pool: str, block_ids: list[int], num_blocks: int) -> None:
    if not block_ids:
        return
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        wrong = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise ValueError(f"{pool} block {wrong} is not in [0, {num_blocks})")
    if len(set(block_ids)) < len(block_ids):
        raise ValueError(f"a {pool} block is named twice in one transfer")
