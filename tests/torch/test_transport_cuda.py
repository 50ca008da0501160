"""Copies on real CUDA streams; skipped without a GPU (`test_transport_streams` has the order)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.torch.transport_driving import Action, apply
from tokenflow.inflight.runner import CopyDirection, TierCopy
from tokenflow.inflight.torch_cuda import open_cuda_transport
from tokenflow.inflight.torch_memory import allocate_rows

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 24, 32
BLOCK_BYTES = 4 << 20


def _transfer(generator: random.Random) -> Action:
    count = generator.randint(1, 12)
    device = generator.sample(range(NUM_DEVICE_BLOCKS), count)
    host = generator.sample(range(NUM_HOST_BLOCKS), count)
    direction = generator.choice(list(CopyDirection))
    return direction, tuple(TierCopy(a, b) for a, b in zip(device, host, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_content_is_that_of_copies_in_order_beside_kernels(seed: int) -> None:
    generator = random.Random(seed)
    want_host = np.full((NUM_HOST_BLOCKS, BLOCK_BYTES), 7, np.uint8)
    host = allocate_rows(NUM_HOST_BLOCKS, BLOCK_BYTES)
    host[:] = want_host
    want_device = np.zeros((NUM_DEVICE_BLOCKS, BLOCK_BYTES), np.uint8)
    device = torch.zeros((NUM_DEVICE_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    transport = open_cuda_transport(device, host)
    assert torch.from_numpy(host).is_pinned()
    matrix = torch.randn(4096, 4096, device="cuda")
    started = []
    for number in range(1, 60):
        busy = {c.device_block for t, copies in started if not t.is_done() for c in copies}
        for _ in range(4):
            matrix = (matrix @ matrix).clamp_(-1, 1)  # keeps the compute stream behind
        for block in set(generator.sample(range(NUM_DEVICE_BLOCKS), 3)) - busy:
            device[block] = number
            want_device[block] = number
        action = _transfer(generator)
        transfer = transport.start(*action)
        started.append((transfer, action[1]))
        apply(action, want_device, want_host)
        if generator.random() < 0.2:
            transfer.wait()
    transport.close()
    assert all(t.is_done() and t.error is None and t.seconds > 0 for t, _ in started)
    np.testing.assert_array_equal(device.cpu().numpy(), want_device)
    np.testing.assert_array_equal(host, want_host)
    assert not torch.from_numpy(host).is_pinned()


def test_start_does_not_wait_for_the_device() -> None:
    device = torch.zeros((NUM_DEVICE_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    transport = open_cuda_transport(device, allocate_rows(NUM_HOST_BLOCKS, BLOCK_BYTES))
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    transfer = transport.start(CopyDirection.OFFLOAD, [TierCopy(0, 0)])
    assert not transfer.is_done()
    transfer.wait()
    assert transfer.is_done()
    assert 0 < transfer.seconds < 0.05
    assert transfer.waited_s > 0.01
    transport.close()
