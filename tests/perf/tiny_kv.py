"""What the benchmark of the KV tiers runs on in tests: a tiny model, and a scale for it."""

from __future__ import annotations

from perf.kv.bursts import Burst
from perf.kv.copies import CopyScale
from perf.kv.models import Model, open_model
from perf.kv.resumes import ResumeScale
from perf.kv.scales import Scale

TINY = Scale(
    resumes=ResumeScale(contexts=(40, 70), num_others=1, num_repeats=1, num_recomputes=1),
    copies=CopyScale(num_blocks=4, num_repeats=3, batch_size=2, context=40, num_steps=3),
    burst=Burst(
        num_streams=4,
        num_prompt_tokens=(60, 70),
        num_output_tokens=(12, 16),
        read_rate=40.0,
        spread_s=0.05,
        num_device_blocks=8,
        num_host_blocks=24,
        slack_margin_s=0.02,
        min_quantum_s=0.02,
    ),
    num_runs=1,
    num_checked_transfers=20,
)


def tiny_model() -> Model:
    return open_model("tiny-random", "cpu", "float32", num_threads=1)
