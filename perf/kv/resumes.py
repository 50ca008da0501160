"""What a resume costs: KV on the device, on the host, brought back ahead of need, or computed.

Owns the four ways and how a stream gets there through the engine's own paths:

- device: the stream is cancelled and enqueued again;
- host: in between, other requests want its blocks, so that the engine copies them to the host (its
  rules without KvTiering: the step waits for its copies); the resume brings them back;
- host, tiers full: the same where no block of either tier is empty, as it is after a while of
  serving: each block that comes back needs the room of one that goes to the host first, and that
  one the room of an older one there;
- prefetched: with KvTiering its blocks are copied while others run, given away, and brought back
  before it is enqueued;
- recompute: there is no host tier, and its blocks are gone.

All in turn, in one run, beside the same crowd. KV that is only brought back, or given away, is not
computed before (filling.py): its bytes are as long as any. Seconds are those from the first
boundary after the enqueue to the end of the step with the token. The decode step beside which they
are put is the one of the same batch, measured right after each resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from perf.analysis import BenchmarkError
from perf.kv.models import TOKENS_PER_BLOCK, Model
from perf.kv.stepping import EngineSize, SteppedEngine, Stream

DEVICE, HOST, HOST_FULL = "device", "host", "host_full"
PREFETCHED, RECOMPUTE = "prefetched", "recompute"
WAYS = (DEVICE, HOST, HOST_FULL, PREFETCHED, RECOMPUTE)

_NUM_DECODE_STEPS = 3
_CROWD_CONTEXT = 200
_MAX_NUM_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeScale:
    """contexts: tokens of the stream. num_others: streams of the crowd.

    num_repeats: of each way, after one that does not count; num_recomputes: of the last way, which
    takes so long that a first time does not show.
    """

    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    num_others: int = 3
    num_repeats: int = 4
    num_recomputes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One resume. seconds: to its token. copy_s: what its copies took. num_blocks: brought back in
    that time; num_victims: others that went to the host. num_tokens: computed. decode_s: the decode
    steps right after it."""

    seconds: float
    copy_s: float
    num_blocks: int
    num_victims: int
    num_tokens: int
    decode_s: tuple[float, ...]


@dataclass(slots=True)
class _Bed:
    """An engine with its crowd and the stream that is resumed in it."""

    engine: SteppedEngine
    stream: Stream
    samples: list[Sample] = field(default_factory=list)


def measure(model: Model, scale: ResumeScale, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per context; see `summarise`."""
    rows = []
    for context in scale.contexts:
        say(f"resumes at {context} tokens")
        rows.append(summarise(context, scale, measure_context(model, scale, context)))
    return rows


def measure_context(model: Model, scale: ResumeScale, context: int) -> dict[str, list[Sample]]:
    """The samples of each way."""
    engines: list[SteppedEngine] = []
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    try:
        for num_hosted, kv_tiering in ((1, False), (2, False), (1, True), (0, False)):
            size = _size(scale, context, num_hosted=num_hosted, kv_tiering=kv_tiering)
            engines.append(SteppedEngine(model, size))
        lazy, full, tiered, bare = (
            _bed(engine, scale, context, is_full=i == 1) for i, engine in enumerate(engines)
        )
        beds = {DEVICE: lazy, HOST: lazy, HOST_FULL: full, PREFETCHED: tiered, RECOMPUTE: bare}
        for i in range(1 + scale.num_repeats):
            for way, bed in beds.items():
                if way == RECOMPUTE and not 1 <= i <= scale.num_recomputes:
                    continue
                sample = _resume(bed, way)
                if i:
                    samples[way].append(sample)
    finally:
        for engine in engines:
            engine.close()
    return samples


def _size(scale: ResumeScale, context: int, *, num_hosted: int, kv_tiering: bool) -> EngineSize:
    """Pools that never are what is short: nobody is paused by the engine itself, and beside the
    chunk that `take_all_blocks` leaves behind there is room to bring the stream back.
    num_hosted: streams of this context that the host has room for. Where it is more than this one,
    whoever fills the rest does so in one step."""
    num_steps = (1 + scale.num_repeats) * 40 + context // 200
    num_blocks = -(-(context + num_steps) // TOKENS_PER_BLOCK)
    num_crowd_blocks = scale.num_others * (-(-(_CROWD_CONTEXT + num_steps) // TOKENS_PER_BLOCK))
    num_device_blocks = num_blocks + num_crowd_blocks + _MAX_NUM_TOKENS // TOKENS_PER_BLOCK
    whole = num_device_blocks * TOKENS_PER_BLOCK
    return EngineSize(
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_hosted * (num_blocks + 2),
        kv_tiering=kv_tiering,
        max_batch_size=scale.num_others + 2,
        max_num_tokens=whole if num_hosted > 1 else _MAX_NUM_TOKENS,
    )


def _bed(engine: SteppedEngine, scale: ResumeScale, context: int, *, is_full: bool) -> _Bed:
    engine.start_crowd(scale.num_others, _CROWD_CONTEXT)
    if is_full:
        while engine.num_empty_blocks()[1]:
            engine.fill(_most_to_fill(engine))
    stream = Stream(engine.new_prompt(context - 1))
    engine.plant(stream)
    return _Bed(engine, stream)


def _resume(bed: _Bed, way: str) -> Sample:
    """Bring the stream into the state that `way` begins with, resume it, and cancel it again."""
    engine, stream = bed.engine, bed.stream
    _prepare(engine, stream, way)
    num_tokens, before = engine.num_computed_context_tokens, engine.stats
    engine.start(stream)
    seconds = engine.until_token(stream)
    num_tokens = engine.num_computed_context_tokens - num_tokens
    after = engine.stats
    decode_s = tuple(engine.step() for _ in range(_NUM_DECODE_STEPS))
    engine.cancel(stream)
    sample = Sample(
        seconds=seconds,
        copy_s=after.onboard_s - before.onboard_s + after.offload_s - before.offload_s,
        num_blocks=after.num_onboards_completed - before.num_onboards_completed,
        num_victims=after.num_offloads_completed - before.num_offloads_completed,
        num_tokens=num_tokens,
        decode_s=decode_s,
    )
    if way != RECOMPUTE and sample.num_tokens != 1:
        raise BenchmarkError(f"a resume ({way}) computed {sample.num_tokens} tokens, not 1")
    if way == HOST_FULL and sample.num_victims < sample.num_blocks:
        raise BenchmarkError(f"{sample.num_blocks} blocks came back, {sample.num_victims} went")
    return sample


def _prepare(engine: SteppedEngine, stream: Stream, way: str) -> None:
    if way == PREFETCHED:
        engine.offload_all(stream)
    if way == HOST_FULL:
        _fill_both(engine, stream)
    elif way != DEVICE:
        engine.take_all_blocks()
    found = engine.locate(stream)
    num_host = stream.num_blocks if way in (HOST, HOST_FULL, PREFETCHED) else 0
    num_device = stream.num_blocks if way == DEVICE else 0
    if (found.num_device_blocks, found.num_host_blocks) != (num_device, num_host):
        raise BenchmarkError(f"blocks of a stream of {stream.num_blocks} before {way}: {found}")
    if way == PREFETCHED:
        engine.prefetch_all(stream)


def _fill_both(engine: SteppedEngine, stream: Stream) -> None:
    """Other requests come and go until the stream's blocks are on the host and nothing is empty."""
    engine.fill(_most_to_fill(engine))
    while any(engine.num_empty_blocks()) or engine.locate(stream).num_device_blocks:
        engine.fill(engine.crowd_size + 1)


def _most_to_fill(engine: SteppedEngine) -> int:
    """Blocks: the crowd needs one each at most meanwhile, and whoever fills the rest one more."""
    return engine.num_obtainable_blocks - engine.crowd_size - 1


def summarise(context: int, scale: ResumeScale, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """A row: per way, medians of the seconds, the copies' seconds, blocks and tokens.

    decode_s: median step of the full batch. steps of a way: median of the whole resume in decode
    steps of its own moment, so that a busy minute slows both; extra_steps: the same without the
    seconds of copies, i.e. what it costs beyond them.
    """
    row: dict[str, Any] = {
        "context": context,
        "batch": scale.num_others + 1,
        "decode_s": median(s for taken in samples.values() for x in taken for s in x.decode_s),
    }
    for way, taken in samples.items():
        row[way] = {
            "num_samples": len(taken),
            "seconds": median(x.seconds for x in taken),
            "copy_s": median(x.copy_s for x in taken),
            "num_blocks": round(median(x.num_blocks for x in taken)),
            "num_victims": round(median(x.num_victims for x in taken)),
            "num_tokens": round(median(x.num_tokens for x in taken)),
            "steps": median(x.seconds / median(x.decode_s) for x in taken),
            "extra_steps": median((x.seconds - x.copy_s) / median(x.decode_s) for x in taken),
        }
    return row
