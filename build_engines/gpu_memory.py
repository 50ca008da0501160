"""GPUs as an engine build needs them: memory, and what is compiled for them.

Owns the data-sheet sizes, which the laboratory's cost model takes from here too. Sizes are decimal,
as on the data sheets. What CUDA reports is a few percent more with HBM and a little less with GDDR6
and ECC; `--gpu-memory-gb` takes a measured size instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One kind of GPU.

    memory_bytes: data sheet. name_part: stands in the name that CUDA reports.
    has_fp8: tensor cores take FP8 (compute capability 8.9 and up). max_batch_size, max_num_tokens:
    what an engine for it is built for unless asked otherwise; not more tokens in an iteration than
    it prefills in about a quarter of a second with an 8B model, so that a long prompt does not
    hold up the streams beside it for longer.
    """

    name: str
    memory_bytes: int
    name_part: str
    has_fp8: bool
    max_batch_size: int
    max_num_tokens: int


def _gpu(
    name: str, gigabytes: int, part: str, *, has_fp8: bool, batch: int, num_tokens: int
) -> GpuMemory:
    return GpuMemory(
        name=name,
        memory_bytes=gigabytes * 10**9,
        name_part=part,
        has_fp8=has_fp8,
        max_batch_size=batch,
        max_num_tokens=num_tokens,
    )


GPU_MEMORY: dict[str, GpuMemory] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 141, "H200", has_fp8=True, batch=512, num_tokens=8192),
        _gpu("h100", 80, "H100", has_fp8=True, batch=512, num_tokens=8192),
        _gpu("a100", 80, "A100", has_fp8=False, batch=512, num_tokens=2048),
        _gpu("l40s", 48, "L40S", has_fp8=True, batch=128, num_tokens=2048),
        _gpu("a6000", 48, "RTX A6000", has_fp8=False, batch=128, num_tokens=2048),
        _gpu("4090", 24, "RTX 4090", has_fp8=True, batch=128, num_tokens=2048),
    )
}
"""By name. Sources: the vendor's data sheets; A100 is the 80 GB board."""
