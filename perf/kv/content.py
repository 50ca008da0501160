"""Whether copies between the tiers put every byte where it belongs.

Owns a check on the runner's own pools and transport, before anything is timed: random transfers in
both directions that share blocks at random, while steps write others, beside the same copies made
one by one in numpy. Contents differ in every byte from the 255 written before them.
Invariant: what the check says is about bytes alone, whatever the device's arithmetic does.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perf.analysis import BenchmarkError
from perf.kv.models import TOKENS_PER_BLOCK, Model
from tokenflow.inflight.runner import CopyDirection, KvTransport, TierCopy, Transfer

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 24, 32

_MAX_BLOCKS_OF_TRANSFER = 12
_NUM_WRITES = 3
_SHARE_AWAITED = 0.2
_MATRIX_SIZE = {"cpu": 128, "cuda": 4096}
_NUM_PRODUCTS = 4

_Bytes = NDArray[np.uint8]


class Mirror:
    """What the pools must hold: [num_blocks, block_bytes] each."""

    def __init__(self, num_bytes: int) -> None:
        self.device: _Bytes = np.zeros((NUM_DEVICE_BLOCKS, num_bytes), np.uint8)
        self.host: _Bytes = np.zeros((NUM_HOST_BLOCKS, num_bytes), np.uint8)

    def apply(self, direction: CopyDirection, copies: Sequence[TierCopy]) -> None:
        """One block after the other, at once."""
        for copy in copies:
            if direction is CopyDirection.OFFLOAD:
                self.host[copy.host_block] = self.device[copy.device_block]
            else:
                self.device[copy.device_block] = self.host[copy.host_block]


class Steps:
    """What steps do to the pool: they are behind with computing, and write when they come to it.

    pool: [num_blocks, block_bytes] on the device.
    """

    def __init__(self, pool: torch.Tensor, mirror: Mirror) -> None:
        self._pool, self._mirror = pool, mirror
        size = _MATRIX_SIZE[pool.device.type]
        self._matrix = torch.ones((size, size), device=pool.device)
        # No shift of it is it again. On the device ahead of time: to bring it there would wait.
        self._base: _Bytes = np.random.default_rng(0).integers(
            256, size=pool.shape[1], dtype=np.uint8
        )
        self._device_base = torch.from_numpy(self._base).to(pool.device)
        self._num_written = 0

    def compute(self) -> None:
        """Keep the device busy for a while."""
        for _ in range(_NUM_PRODUCTS):
            self._matrix = (self._matrix @ self._matrix).clamp_(-1, 1)

    def write(self, blocks: Iterable[int]) -> None:
        """Fill them; one of 256 contents after the other."""
        for block in blocks:
            self._num_written += 1
            number = self._num_written % 256
            self._mirror.device[block] = self._base + np.uint8(number)
            self._pool[block] = self._device_base + number


def measure(model: Model, num_transfers: int) -> dict[str, Any]:
    """Figures of the check. Raises BenchmarkError when a byte is not where it belongs."""
    runner = model.runner()
    runner.allocate_kv(NUM_DEVICE_BLOCKS, TOKENS_PER_BLOCK, NUM_HOST_BLOCKS)
    try:
        with torch.inference_mode():
            return check(runner.kv_bytes(), runner.transport, num_transfers)
    finally:
        runner.transport.close()


def check(pool: torch.Tensor, transport: KvTransport, num_transfers: int) -> dict[str, Any]:
    """See `measure`; pool: of NUM_DEVICE_BLOCKS, zeroed; `transport` has NUM_HOST_BLOCKS."""
    mirror, generator = Mirror(pool.shape[1]), random.Random(0)
    steps = Steps(pool, mirror)
    for copies in _over_all_host_blocks():  # then all of the host holds something known
        steps.write(copy.device_block for copy in copies)
        _finish(transport.start(CopyDirection.OFFLOAD, copies))
        mirror.apply(CopyDirection.OFFLOAD, copies)
    started: list[tuple[Transfer, Sequence[TierCopy]]] = []
    for _ in range(num_transfers):
        steps.compute()
        busy = {c.device_block for t, copies in started if not t.is_done() for c in copies}
        steps.write(set(generator.sample(range(NUM_DEVICE_BLOCKS), _NUM_WRITES)) - busy)
        direction, copies = _random_transfer(generator)
        started.append((transport.start(direction, copies), copies))
        mirror.apply(direction, copies)
        if generator.random() < _SHARE_AWAITED:
            started[-1][0].wait()
    for transfer, _ in started:
        _finish(transfer)
    _compare("device", pool, mirror.device)
    for copies in _over_all_host_blocks():
        _finish(transport.start(CopyDirection.ONBOARD, copies))
        _compare("host", pool[: len(copies)], mirror.host[[copy.host_block for copy in copies]])
    num_blocks = sum(len(copies) for _, copies in started)
    return {
        "num_transfers": num_transfers,
        "num_blocks": num_blocks,
        "num_bytes": num_blocks * pool.shape[1],
    }


def _over_all_host_blocks() -> list[list[TierCopy]]:
    """Transfers that take every host block once, from or to the first blocks of the device."""
    return [
        [
            TierCopy(i, host)
            for i, host in enumerate(range(NUM_HOST_BLOCKS)[first : first + NUM_DEVICE_BLOCKS])
        ]
        for first in range(0, NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS)
    ]


def _random_transfer(generator: random.Random) -> tuple[CopyDirection, list[TierCopy]]:
    count = generator.randint(1, _MAX_BLOCKS_OF_TRANSFER)
    device = generator.sample(range(NUM_DEVICE_BLOCKS), count)
    host = generator.sample(range(NUM_HOST_BLOCKS), count)
    direction = generator.choice(list(CopyDirection))
    return direction, [TierCopy(a, b) for a, b in zip(device, host, strict=True)]


def _finish(transfer: Transfer) -> None:
    transfer.wait()
    if transfer.error is not None:
        raise BenchmarkError(f"a copy failed: {transfer.error}")


def _compare(name: str, pool: torch.Tensor, want: _Bytes) -> None:
    got = pool.cpu().numpy()
    wrong = [i for i, (one, two) in enumerate(zip(got, want, strict=True)) if (one != two).any()]
    if wrong:
        raise BenchmarkError(f"copies of the {name} pool's blocks left wrong bytes: {wrong}")
