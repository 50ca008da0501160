"""The burst for which the KV pool is too small: its requests, its engine, and what is left out.

Owns the workload and the variants. Invariant: same burst, same requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from perf.kv.models import TOKENS_PER_BLOCK
from tokenflow.config import ServingConfig

TIMEOUT_S = 300.0
"""A run must have ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is left of the tiers. paper_s: completion in Table 2 of the paper, where it has one.

    host: there is a host tier. kv_tiering: it is driven from above, else by TensorRT-LLM's rules.
    """

    name: str
    host: bool = True
    kv_tiering: bool = True
    write_through: bool = True
    overlap: bool = True
    moving_average: bool = True
    paper_s: float | None = None


FULL = Variant(name="full", paper_s=66.0)
VARIANTS = (
    FULL,
    Variant(name="no offload", host=False, kv_tiering=False, paper_s=127.3),
    Variant(name="no write-through", write_through=False, paper_s=82.8),
    Variant(name="no overlap", overlap=False, paper_s=74.4),
    Variant(name="no moving average", moving_average=False),
    Variant(name="TensorRT-LLM's rules", kv_tiering=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """The workload and the engine it meets. Lengths are ranges of tokens; spread_s: all arrive
    within it. The margins are short, so that a burst of seconds holds many turns."""

    num_streams: int = 8
    num_prompt_tokens: tuple[int, int] = (160, 208)
    num_output_tokens: tuple[int, int] = (28, 36)
    read_rate: float = 4.0
    spread_s: float = 0.5
    num_device_blocks: int = 29
    num_host_blocks: int = 80
    max_batch_size: int = 16
    max_num_tokens: int = 512
    slack_margin_s: float = 0.25
    min_quantum_s: float = 0.5
    seed: int = 20260

    def config(self, variant: Variant, block_bytes: int) -> ServingConfig:
        """The product's configuration; host memory in bytes."""
        return ServingConfig(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_tokens_in_paged_kv_cache=self.num_device_blocks * TOKENS_PER_BLOCK,
            max_seq_len=self.num_prompt_tokens[1] + self.num_output_tokens[1] + 1,
            kv_cache_host_memory_bytes=self.num_host_blocks * block_bytes if variant.host else 0,
            kv_tiering=variant.kv_tiering,
            anticipate_arrivals=variant.moving_average,
            slack_margin_s=self.slack_margin_s,
            min_quantum_s=self.min_quantum_s,
            max_queue_delay_s=TIMEOUT_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRequest:
    """One request; its tokens are random. send_offset_s: after the start of the burst."""

    input_token_ids: tuple[int, ...]
    max_tokens: int
    send_offset_s: float


def burst_requests(burst: Burst, vocab_size: int) -> list[BurstRequest]:
    """Same burst, same requests; in the order of sending."""
    generator = random.Random(burst.seed)
    offsets = sorted(generator.uniform(0, burst.spread_s) for _ in range(burst.num_streams))
    return [
        BurstRequest(
            input_token_ids=random_tokens(
                generator, generator.randint(*burst.num_prompt_tokens), vocab_size
            ),
            max_tokens=generator.randint(*burst.num_output_tokens),
            send_offset_s=offset,
        )
        for offset in offsets
    ]


def random_tokens(generator: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt that means nothing."""
    return tuple(generator.randrange(3, vocab_size) for _ in range(num_tokens))
