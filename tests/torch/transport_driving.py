"""What the tests of both transports share: pools as bytes, and what a transfer must leave there."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_memory import ByteRows

NUM_DEVICE_BLOCKS = 6
NUM_HOST_BLOCKS = 5
BLOCK_BYTES = 48

Action = tuple[CopyDirection, tuple[TierCopy, ...]]


def new_pools(seed: int = 0) -> tuple[ByteRows, ByteRows]:
    """Device and host pool; every block differs from every other."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(
        256, size=(NUM_DEVICE_BLOCKS + NUM_HOST_BLOCKS, BLOCK_BYTES), dtype=np.uint8
    )
    return rows[:NUM_DEVICE_BLOCKS].copy(), rows[NUM_DEVICE_BLOCKS:].copy()


@st.composite
def actions(draw: st.DrawFn) -> Action:
    """A transfer of some blocks, all different."""
    direction = draw(st.sampled_from(CopyDirection))
    count = draw(st.integers(1, NUM_HOST_BLOCKS))
    device = draw(st.permutations(range(NUM_DEVICE_BLOCKS)))
    host = draw(st.permutations(range(NUM_HOST_BLOCKS)))
    if draw(st.booleans()):  # make runs of several blocks likely
        device, host = sorted(device), sorted(host)
    pairs = zip(device[:count], host[:count], strict=True)
    return direction, tuple(TierCopy(a, b) for a, b in pairs)


def apply(action: Action, device: ByteRows, host: ByteRows) -> None:
    """The reference: one block after the other, at once."""
    direction, copies = action
    for copy in copies:
        if direction is CopyDirection.OFFLOAD:
            host[copy.host_block] = device[copy.device_block]
        else:
            device[copy.device_block] = host[copy.host_block]
