"""The set-ups that are simulated: TokenFlow's Table 1, and smaller ones of other kinds.

Owns which machine meets which work. Table 1 prints, for the RTX 4090 and the H200: (a) a burst of
60 / 400 with short prompts and long answers, (b) a burst of 80 / 200 with long ones of both,
(c) Poisson arrivals at 2 / 5 per second and (d) at 4 / 10, both short prompts and long answers.
Prompts: 512 or 1024 tokens in the mean; answers: 1024 or 2048, doubled on the H200; the H200 runs
with a memory fraction of 0.3.

Not printed, and chosen here: the deviation of the lengths (lengths.Normal); how many requests the
Poisson runs have (300 on the H200, 200 on the 4090, as in scripts of a development tree); the
reading rates (6 and 20 tokens/s, 6 unless asked otherwise); the model of the 4090 (Llama3-8B) and
its memory fraction (0.9, as weights and KV hardly fit otherwise); host memory (128 GB unless asked
otherwise); how fast a burst is sent (a client without pauses: 1 ms from one to the next, in the
mean); batch slots, more than anybody fills, so that KV is what is short; 8,192 tokens a step.

Invariant: the same set-up and seed give the same requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from build_engines.model_shapes import MODELS
from perf.lab.arrivals import Burst, Delayed, Gamma, OnOff, Poisson, Superposition
from perf.lab.gpus import GPUS, Gpu
from perf.lab.lengths import (
    BURSTGPT_ANSWERS,
    BURSTGPT_PROMPTS,
    SHAREGPT_ANSWERS,
    SHAREGPT_PROMPTS,
    Normal,
)
from perf.lab.mixes import PAPER_MIXED_RATES, HumanReaders, Mix, OneRate
from perf.lab.roofline import sim_engine
from perf.lab.workloads import Conversations, Singles, Workload
from perf.virtual.values import SimEngine, SimRequest
from tokenflow.inflight.runner import SequenceChunk

READ_RATES = (6.0, 20.0)
MAX_HOST_GB = 16_000.0
"""10^9 bytes: no machine has more, and the server takes little more."""
_GB = 10**9
_PEOPLE = Mix(readers=HumanReaders())


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A machine and its work.

    gpu, model: names in gpus.GPUS and model_shapes.MODELS; tp: GPUs. memory_fraction: of each
    GPU's memory, for weights and KV. host_bytes: of the host tier; 0: none. gpu_changes: (field of
    gpus.Gpu, value), where the GPU is taken to be another.
    """

    name: str
    gpu: str
    model: str
    workload: Workload
    memory_fraction: float
    max_batch_size: int
    max_num_tokens: int = 8192
    host_bytes: int = 128 * _GB
    tp: int = 1
    gpu_changes: tuple[tuple[str, Any], ...] = ()

    @property
    def hardware(self) -> Gpu:
        """Its GPU, with the changes."""
        return dataclasses.replace(GPUS[self.gpu], **dict(self.gpu_changes))

    @property
    def read_rate(self) -> float | None:
        """Tokens/s if everybody reads at one rate, else None."""
        readers = self.workload.mix.readers
        return readers.rate if isinstance(readers, OneRate) else None


def _on_h200(name: str, workload: Workload) -> Setup:
    return Setup(
        name=name,
        gpu="h200",
        model="llama3-8b",
        workload=workload,
        memory_fraction=0.3,
        max_batch_size=512,
    )


def _on_4090(name: str, workload: Workload) -> Setup:
    return Setup(
        name=name,
        gpu="4090",
        model="llama3-8b",
        workload=workload,
        memory_fraction=0.9,
        max_batch_size=128,
        max_num_tokens=2048,
    )


def _burst(num: int, prompt: int, answer: int) -> Singles:
    return Singles(
        num_requests=num,
        arrivals=Burst(span_s=1e-3 * num),
        prompts=Normal(mean=prompt),
        answers=Normal(mean=answer),
        mix=Mix(readers=OneRate(READ_RATES[0])),
    )


def _poisson(rate: float, num: int, prompt: int, answer: int) -> Singles:
    return dataclasses.replace(_burst(num, prompt, answer), arrivals=Poisson(rate))


def _open_ended(num: int, prompt: int, answer: int, *, limit: int) -> Singles:
    answers = Normal(mean=answer, std_share=0.5)
    return dataclasses.replace(_burst(num, prompt, answer), answers=answers, limit_tokens=limit)


_TABLE_1 = (
    _on_h200("h200-a", _burst(400, 512, 4096)),
    _on_h200("h200-b", _burst(200, 1024, 4096)),
    _on_h200("h200-c", _poisson(5.0, 300, 512, 4096)),
    _on_h200("h200-d", _poisson(10.0, 300, 512, 4096)),
    _on_4090("4090-a", _burst(60, 512, 2048)),
    _on_4090("4090-b", _burst(80, 1024, 2048)),
    _on_4090("4090-c", _poisson(2.0, 200, 512, 2048)),
    _on_4090("4090-d", _poisson(4.0, 200, 512, 2048)),
)

_OTHERS = (
    # Limits far above what is answered, as clients name them.
    _on_4090("open-ended", _open_ended(80, 1024, 512, limit=2048)),
    _on_h200("h200-open-ended", _open_ended(400, 512, 1024, limit=4096)),
    # Half the answers of h200-a, as if they were not doubled on this GPU.
    _on_h200("h200-burst-400", _burst(400, 512, 2048)),
    _on_4090(
        "burstgpt",
        Singles(
            num_requests=120,
            arrivals=Gamma(rate=4.0, cv=1.41),
            prompts=BURSTGPT_PROMPTS,
            answers=BURSTGPT_ANSWERS,
            mix=_PEOPLE,
        ),
    ),
    _on_4090(
        "sharegpt",
        Singles(
            num_requests=160,
            arrivals=Poisson(8.0),
            prompts=SHAREGPT_PROMPTS,
            answers=SHAREGPT_ANSWERS,
            mix=_PEOPLE,
        ),
    ),
    _on_4090(
        "on-off",
        Singles(
            num_requests=100,
            arrivals=OnOff(off_rate=0.5, on_rate=20.0, off_s=12.0, on_s=2.0),
            prompts=Normal(mean=512),
            answers=Normal(mean=512),
            mix=_PEOPLE,
        ),
    ),
    _on_4090(
        "conversations",
        Conversations(
            num_conversations=120,
            arrivals=Poisson(6.0),
            first_prompts=Normal(mean=512),
            questions=Normal(mean=64),
            answers=Normal(mean=320),
            mix=_PEOPLE,
            max_turns=5,
        ),
    ),
    _on_4090(
        "mixed-readers",
        dataclasses.replace(_burst(48, 512, 1024), mix=Mix(readers=PAPER_MIXED_RATES)),
    ),
    _on_4090(
        "machines",
        Singles(
            num_requests=80,
            arrivals=Superposition(((Poisson(1.0), 1.0), (Delayed(Burst(1.0), 15.0), 1.0))),
            prompts=Normal(mean=512),
            answers=Normal(mean=640),
            mix=Mix(
                readers=HumanReaders(),
                machine_share=0.3,
                priorities=((0.5, 0.8), (0.9, 0.1), (0.1, 0.1)),
                cancel_share=0.1,
            ),
        ),
    ),
)

TABLE_1: tuple[str, ...] = tuple(setup.name for setup in _TABLE_1)
"""Names of TokenFlow's own set-ups."""

SETUPS: dict[str, Setup] = {setup.name: setup for setup in _TABLE_1 + _OTHERS}
"""All set-ups by name."""


def find(name: str) -> Setup:
    """The set-up of that name. Raises ValueError that lists what there is."""
    if name not in SETUPS:
        raise ValueError(f"no set-up named {name!r}; there are {', '.join(SETUPS)}")
    return SETUPS[name]


def with_rate(setup: Setup, rate: float) -> Setup:
    """`setup` with all its readers at `rate` tokens/s. Raises ValueError as OneRate."""
    mix = dataclasses.replace(setup.workload.mix, readers=OneRate(rate))
    return dataclasses.replace(setup, workload=setup.workload.with_mix(mix))


def with_host(setup: Setup, gigabytes: float) -> Setup:
    """`setup` with a host tier of so many 10^9 bytes. Raises ValueError outside 0..MAX_HOST_GB."""
    if not 0 <= gigabytes <= MAX_HOST_GB:
        raise ValueError(f"host gigabytes must be in [0, {MAX_HOST_GB:g}], got {gigabytes:g}")
    return dataclasses.replace(setup, host_bytes=round(gigabytes * _GB))


def requests(setup: Setup, seed: int) -> list[SimRequest]:
    """Its work, in order of arrival."""
    return setup.workload.requests(seed)


def engine(
    setup: Setup,
    *,
    capacity_policy: str = "guaranteed_no_evict",
    kv_tiering: bool = False,
    enable_chunked_context: bool = True,
    lease_tokens: int = 0,
) -> SimEngine:
    """Its engine, warm, run by so many rules; see roofline.sim_engine and ServingConfig."""
    machine = sim_engine(
        setup.hardware,
        MODELS[setup.model],
        tp=setup.tp,
        memory_fraction=setup.memory_fraction,
        host_bytes=setup.host_bytes,
        kv_tiering=kv_tiering,
        max_batch_size=setup.max_batch_size,
        max_num_tokens=setup.max_num_tokens,
        capacity_policy=capacity_policy,
        enable_chunked_context=enable_chunked_context,
        lease_tokens=lease_tokens,
    )
    return dataclasses.replace(machine, is_warm=True)


class ReadersLoad(NamedTuple):
    """ΣR and Γ, both tokens/s; ΣR <= Γ is schedulable (TokenFlow, section 4.3)."""

    sum_rate: float
    capacity: float


def schedulable(machine: SimEngine, work: Sequence[SimRequest]) -> ReadersLoad:
    """What the readers of `work` read at the worst moment, and what `machine` makes then.

    ΣR: everybody is there from arrival until the whole answer is read at its rate, had it begun at
    once; machines count with the default rate. Γ: decode speed of as many of those as fit in a full
    pool at their mean mid-life context, prompt + half the answer. The time that copies and
    recomputing take is not in it, nor that a crowd which started together ends together, at a
    longer context (`decode_capacity` says what it can do then). Raises ValueError without work.
    """
    if not work:
        raise ValueError("there is no work")
    default_rate = machine.config().default_read_rate
    rate = np.array([r.read_rate or default_rate for r in work])
    start = np.array([r.arrival_time for r in work])
    end = start + np.array([r.max_tokens for r in work]) / rate
    sums = [float(rate[(start <= now) & (now < end)].sum()) for now in start]
    worst = int(np.argmax(sums))
    present = np.flatnonzero((start <= start[worst]) & (start[worst] < end))
    contexts = [work[i].num_prompt_tokens + 0.5 * work[i].max_tokens for i in present]
    capacity = decode_capacity(machine, len(present), float(np.mean(contexts)))
    return ReadersLoad(sums[worst], capacity)


def decode_capacity(machine: SimEngine, num_streams: int, context: float) -> float:
    """Tokens/s that `machine` decodes when of `num_streams`, each with `context` tokens of KV, as
    many run as pool and batch slots take."""
    in_pool = int(machine.num_total_blocks * machine.tokens_per_block / context)
    batch = max(1, min(num_streams, machine.max_batch_size, in_pool))
    chunk = SequenceChunk(
        request_id=0,
        token_ids=(0,),
        start=max(0, round(context) - 1),
        block_ids=(),
        samples=True,
        num_generated=1,
    )
    return batch / machine.step_s([chunk] * batch, 0)
