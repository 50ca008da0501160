"""The laboratory's machines for tests at scale: Llama3-8B on an H200 and on a 4090."""

from __future__ import annotations

from typing import Any

from build_engines.model_shapes import MODELS
from perf.lab.bounds import prefill_bound_s
from perf.lab.gpus import GPUS
from perf.lab.roofline import sim_engine
from perf.virtual.values import SimEngine, SimRequest

_MODEL = MODELS["llama3-8b"]


def h200(**fields: Any) -> SimEngine:
    """200,000 tokens of KV, 256 slots; `fields` as for roofline.sim_engine."""
    given = {"memory_fraction": 0.3, "max_batch_size": 256, **fields}
    return sim_engine(GPUS["h200"], _MODEL, **given)


def rtx_4090(**fields: Any) -> SimEngine:
    """42,000 tokens of KV, 128 slots; `fields` as for roofline.sim_engine."""
    given = {"max_num_tokens": 2048, "max_batch_size": 128, **fields}
    return sim_engine(GPUS["4090"], _MODEL, **given)


def prefill_s(engine: SimEngine, *prompts: int) -> float:
    """Seconds until the last of these prompts is computed, if nothing else is done."""
    instants = [0.0] * len(prompts)
    return prefill_bound_s(engine.step_cost, prompts, instants, engine.max_num_tokens).p99_s  # type: ignore[arg-type]


def request(arrival_time: float = 0.0, prompt: int = 128, max_tokens: int = 200, **fields: Any):
    """A reader of 6 tokens/s, unless `fields` say otherwise."""
    given = {"read_rate": 6.0, **fields}
    return SimRequest(
        arrival_time=arrival_time, num_prompt_tokens=prompt, max_tokens=max_tokens, **given
    )
