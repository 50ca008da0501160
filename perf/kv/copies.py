"""What copies between the tiers reach, and what they cost the steps beside them.

Owns two measurements on the runner's own transport, each in turn with what it is put beside:

- bandwidth: blocks at random places of both pools, from the start of a transfer until it was waited
  for, as a step does; beside one plain copy of as many bytes in one piece, by one thread (on a GPU:
  one copy of pinned memory), in the same direction;
- a decode step of a full batch while copies are under way all the time, first to last microsecond;
  beside the same step without. Copies are begun before the step, more than it lasts, and those left
  over are waited for behind it, outside the measured time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from perf.analysis import BenchmarkError
from perf.engine_step import OursStepper
from perf.kv.models import TOKENS_PER_BLOCK, Model
from tokenflow.inflight.runner import CopyDirection, KvTransport, TierCopy, Transfer

_NUM_WARMUP_STEPS = 3
_MIN_BYTES_UNDER_WAY = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyScale:
    """num_blocks: of a transfer; the pools are four times as large. num_repeats: of each copy.

    batch_size, context, num_steps: of the decode steps; num_steps with copies and as many without.
    """

    num_blocks: int = 64
    num_repeats: int = 40
    batch_size: int = 8
    context: int = 400
    num_steps: int = 40


# -- bandwidth ---------------------------------------------------------------------------------


class PlainCopies:
    """As many bytes in one piece, there and back, beside the pools."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._is_cuda = device.startswith("cuda")
        self._num_bytes = num_bytes
        # Four pieces of each, like the pools: no copy finds its bytes in the processor's cache
        # because the one before has just touched them.
        self._host = (
            torch.ones(4 * num_bytes, dtype=torch.uint8, pin_memory=True)
            if self._is_cuda
            # As the host pool: numpy asks for huge pages, torch does not.
            else torch.from_numpy(np.ones(4 * num_bytes, dtype=np.uint8))
        )
        self._device = torch.ones(4 * num_bytes, dtype=torch.uint8, device=device)

    def seconds(self, direction: CopyDirection, piece: int) -> float:
        """Seconds of copying piece 0..3."""
        span = slice(piece * self._num_bytes, (piece + 1) * self._num_bytes)
        source, target = self._device[span], self._host[span]
        if direction is CopyDirection.ONBOARD:
            source, target = target, source
        start = time.perf_counter()
        if self._is_cuda:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            np.copyto(target.numpy(), source.numpy())
        return time.perf_counter() - start


def measure_bandwidth(model: Model, scale: CopyScale) -> list[dict[str, Any]]:
    """One row per direction; see `summarise_bandwidth`."""
    runner = model.runner()
    block_bytes = runner.kv_block_bytes(TOKENS_PER_BLOCK)
    num_bytes, num_pool = scale.num_blocks * block_bytes, 4 * scale.num_blocks
    runner.allocate_kv(num_pool, TOKENS_PER_BLOCK, num_pool)
    transport = runner.transport
    plain = PlainCopies(num_bytes, model.device)
    generator = random.Random(0)
    samples: dict[CopyDirection, list[tuple[float, float]]] = {d: [] for d in CopyDirection}
    try:
        for direction in CopyDirection:  # pages that nobody has touched cost more
            _run(transport, direction, [TierCopy(i, i) for i in range(num_pool)])
        for i in range(scale.num_repeats):
            order = [generator.sample(range(num_pool), num_pool) for _ in range(2)]
            for j, direction in enumerate(CopyDirection):
                piece = (2 * i + j) % 4
                places = slice(piece * scale.num_blocks, (piece + 1) * scale.num_blocks)
                copies = [TierCopy(*pair) for pair in zip(*(o[places] for o in order), strict=True)]
                seconds = _run(transport, direction, copies)
                samples[direction].append((seconds, plain.seconds(direction, piece)))
    finally:
        transport.close()
    return [
        summarise_bandwidth(direction, num_bytes, block_bytes, taken)
        for direction, taken in samples.items()
    ]


def _run(transport: KvTransport, direction: CopyDirection, copies: Sequence[TierCopy]) -> float:
    start = time.perf_counter()
    transfer = transport.start(direction, copies)
    transfer.wait()
    seconds = time.perf_counter() - start
    _check(transfer)
    return seconds


def _check(transfer: Transfer) -> None:
    if transfer.error is not None:
        raise BenchmarkError(f"a copy failed: {transfer.error}")


def summarise_bandwidth(
    direction: CopyDirection,
    num_bytes: int,
    block_bytes: int,
    samples: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """samples: (seconds of the transfer, seconds of the plain copy right after it).

    ratio: of the bandwidths, transfer / plain, by pairs: median and quartiles.
    """
    ratios = [plain / transfer for transfer, plain in samples]
    return {
        "direction": direction.name.lower(),
        "num_bytes": num_bytes,
        "block_bytes": block_bytes,
        "num_samples": len(samples),
        "bytes_per_s": num_bytes / median(transfer for transfer, _ in samples),
        "plain_bytes_per_s": num_bytes / median(plain for _, plain in samples),
        "ratio": median(ratios),
        "ratio_quartiles": [float(q) for q in np.percentile(ratios, (25, 75))],
    }


# -- beside decode steps -----------------------------------------------------------------------


class CopyLoad:
    """Keeps copies of both directions under way. blocks: ids that both pools have to spare."""

    def __init__(self, transport: KvTransport, blocks: range, block_bytes: int) -> None:
        self._transport = transport
        half = len(blocks) // 2
        self._copies = {
            direction: [TierCopy(block, block) for block in part]
            for direction, part in zip(CopyDirection, (blocks[:half], blocks[half:]), strict=True)
        }
        self._pair_bytes = 2 * half * block_bytes
        self._num_pairs = max(1, _MIN_BYTES_UNDER_WAY // self._pair_bytes)
        self._transfers: list[Transfer] = []

    def begin(self) -> None:
        """Start as many as outlasted the last step."""
        self._transfers = [
            self._transport.start(direction, copies)
            for _ in range(self._num_pairs)
            for direction, copies in self._copies.items()
        ]

    def end(self) -> tuple[float, bool]:
        """(bytes copied since `begin`, whether both directions were still under way); waits for the
        rest. What falls short is doubled for the next time."""
        done = [transfer.is_done() for transfer in self._transfers]
        was_busy = not any(done[-2:])  # the last of each direction
        for transfer in self._transfers:
            transfer.wait()
            _check(transfer)
        if not was_busy:
            self._num_pairs *= 2
        return sum(done) * self._pair_bytes / 2, was_busy


def measure_steps(model: Model, scale: CopyScale) -> dict[str, Any]:
    """Decode steps with and without copies, in turn; see `summarise_steps`."""
    runner = model.runner()
    block_bytes = runner.kv_block_bytes(TOKENS_PER_BLOCK)
    num_tries = 3 * scale.num_steps + _NUM_WARMUP_STEPS
    per_sequence = -(-(scale.context + 2 * num_tries) // TOKENS_PER_BLOCK)
    num_batch_blocks = scale.batch_size * per_sequence
    spare = range(num_batch_blocks, num_batch_blocks + 2 * _num_load_blocks(block_bytes))
    runner.allocate_kv(spare.stop, TOKENS_PER_BLOCK, spare.stop)
    load = CopyLoad(runner.transport, spare, block_bytes)
    samples: list[tuple[float, float, float]] = []
    try:
        stepper = OursStepper(runner, scale.batch_size, scale.context, 2 * num_tries)
        for i in range(num_tries):
            without_s = _timed(stepper.step)
            load.begin()
            with_s = _timed(stepper.step)
            num_bytes, was_busy = load.end()
            if was_busy and i >= _NUM_WARMUP_STEPS:
                samples.append((with_s, without_s, num_bytes))
            if len(samples) == scale.num_steps:
                break
        stepper.close()
    finally:
        runner.transport.close()
    if not samples:
        raise BenchmarkError("no copies outlast a step")
    return summarise_steps(scale, samples)


def _num_load_blocks(block_bytes: int) -> int:
    """Blocks of one transfer of the load: small enough to see how many end within a step."""
    return max(1, min(64, (16 << 20) // block_bytes))


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def summarise_steps(
    scale: CopyScale, samples: Sequence[tuple[float, float, float]]
) -> dict[str, Any]:
    """samples: (seconds of a step with copies, of the one without before it, bytes copied in the
    first, by transfers that ended in it). ratio: of the medians; ratio_quartiles: by pairs."""
    with_s = median(sample[0] for sample in samples)
    without_s = median(sample[1] for sample in samples)
    pairs = [sample[0] / sample[1] for sample in samples]
    return {
        "batch": scale.batch_size,
        "context": scale.context,
        "num_samples": len(samples),
        "with_copies_s": with_s,
        "without_s": without_s,
        "ratio": with_s / without_s,
        "ratio_quartiles": [float(q) for q in np.percentile(pairs, (25, 75))],
        "copied_bytes_per_s": sum(s[2] for s in samples) / sum(s[0] for s in samples),
    }
