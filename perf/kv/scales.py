"""How much is measured, for each model: at full length and in a quick look.

Owns the sizes. Those of a GPU are chosen so that everything ends within eight minutes there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from perf.kv.bursts import Burst
from perf.kv.copies import CopyScale
from perf.kv.resumes import ResumeScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Of every section. num_runs: of the burst, of each variant; until: by when (monotonic) they
    are to end, else there are fewer. num_checked_transfers: before anything is timed."""

    resumes: ResumeScale = field(default_factory=ResumeScale)
    copies: CopyScale = field(default_factory=CopyScale)
    burst: Burst = field(default_factory=Burst)
    num_runs: int = 5
    num_checked_transfers: int = 60
    until: float = math.inf


_QUICK_RESUMES = ResumeScale(contexts=(128, 1024), num_repeats=2, num_recomputes=1)
_QUICK_COPIES = CopyScale(num_blocks=32, num_repeats=10, num_steps=10)

_SMOLLM = Scale()
_SMOLLM_QUICK = Scale(resumes=_QUICK_RESUMES, copies=_QUICK_COPIES, num_runs=1)

_TINY_BURST = Burst(
    num_streams=10,
    num_prompt_tokens=(160, 224),
    num_output_tokens=(40, 60),
    read_rate=20.0,
    spread_s=0.2,
    num_device_blocks=40,
    num_host_blocks=96,
    slack_margin_s=0.05,
    min_quantum_s=0.1,
)
_TINY = Scale(burst=_TINY_BURST)
_TINY_QUICK = Scale(resumes=_QUICK_RESUMES, copies=_QUICK_COPIES, burst=_TINY_BURST, num_runs=1)

_LLAMA_BURST = Burst(
    num_streams=16,
    num_prompt_tokens=(512, 768),
    num_output_tokens=(48, 72),
    read_rate=8.0,
    spread_s=0.5,
    num_device_blocks=192,
    num_host_blocks=400,
    max_batch_size=32,
    max_num_tokens=2048,
)
_LLAMA = Scale(
    resumes=ResumeScale(num_others=15, num_repeats=7),
    copies=CopyScale(num_blocks=128, batch_size=16, context=1024),
    burst=_LLAMA_BURST,
)
_LLAMA_QUICK = Scale(resumes=_QUICK_RESUMES, copies=_QUICK_COPIES, burst=_LLAMA_BURST, num_runs=1)

SCALES: Mapping[str, Mapping[bool, Scale]] = {
    "smollm2": {False: _SMOLLM, True: _SMOLLM_QUICK},
    "tiny-random": {False: _TINY, True: _TINY_QUICK},
    "llama-3-8b-random": {False: _LLAMA, True: _LLAMA_QUICK},
}
"""Model -> quick -> sizes."""
