"""Published figures beside what the cost model says of them.

Owns the figures, their sources and the assumptions under which the model is asked. Sources: [P]
TokenFlow (EuroSys'26, arXiv 2510.02758); [F] a public development tree of SGLang that looks like
its authors' (figures notebook, scheduler). Nothing is fitted to any of them: where something that
the model needs was not recorded, it is asked under an assumption that is named, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from build_engines.model_shapes import LLAMA3_8B
from perf.lab.first_come import BurstFigures, Length, play_burst
from perf.lab.gpus import H200, RTX_4090, RTX_A6000
from perf.lab.roofline import (
    RooflineCosts,
    StepTotals,
    decode_totals,
    kv_pool_tokens,
    num_causal_pairs,
)

NOT_RECORDED = (
    "The bursts: neither the pool (the paper's set-ups start with 0.3 of the memory, the tree's "
    "server script says 0.5, its engine's default was 0.88), nor the distribution of lengths (the "
    "generator may draw below what it was asked for), nor the batch limit, nor the rule of "
    "admission (“conservative”) was recorded. So the model is asked under six assumptions; the "
    "truth may be none of them, and times to first token follow the pool, not the costs.",
    "100 prompts of 512 tokens within 0.75 s would be 97 % of the dense bf16 peak of an H200, more "
    "than engines reach: those prompts were shorter, and then perhaps the answers too.",
    "ShareGPT's lengths after the tree's filter were not recorded: the model is not asked.",
    "The fitted costs name neither GPU nor model nor batch: they are set beside three GPUs with "
    "Llama3-8B. 8 µs of prefill a token would be 1.7e15 FLOP/s for that model, above the dense "
    "bf16 peak of each: another model, another precision, or prompts partly cached.",
    "The load from the host went through staging buffers of the prototype, not by pinned copies of "
    "whole blocks.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. model: None where the model cannot be asked. assumption: under which it was."""

    what: str
    source: str
    unit: str
    published: float
    model: float | None
    assumption: str

    @property
    def ratio(self) -> float | None:
        """model / published: under 1 the model is faster (for rates: slower)."""
        return None if self.model is None else self.model / self.published


# tokens in, tokens out -> burst size -> ms: mean TTFT, P99 TTFT, mean TPOT [F]
_BURSTS: dict[tuple[int, int], dict[int, tuple[float, float, float]]] = {
    (512, 4096): {
        100: (516, 748, 13.1),
        200: (5134, 46_695, 18.8),
        300: (23_012, 74_302, 21.5),
        400: (46_467, 131_375, 23.1),
        500: (67_662, 163_927, 23.9),
        600: (92_432, 228_868, 24.6),
        700: (112_367, 254_594, 25.3),
    },
    (1024, 4096): {
        300: (2177, 4979, 33.0),
        400: (4037, 13_621, 39.5),
        500: (21_863, 119_246, 40.6),
        600: (41_990, 148_152, 42.3),
        700: (60_400, 170_170, 43.6),
    },
}
_SHAREGPT: dict[int, tuple[float, float, float]] = {
    100: (772, 1300, 18.0),
    400: (1995, 6056, 20.6),
    500: (3508, 11_434, 22.0),
    600: (5281, 17_098, 25.3),
    700: (6223, 19_976, 29.0),
    800: (9943, 28_178, 32.5),
}
_NAMES = ("mean TTFT", "P99 TTFT", "mean TPOT")
_MEMORY_FRACTIONS = (0.3, 0.5, 0.88)
_RESERVED = "h200, Llama3-8B, first come first served, prompt and output reserved"
_UNASKED = "not asked: lengths not recorded"

_DECODE_S, _DECODE_TOKENS = 0.0325370, 20_551
_PREFILL_S, _PREFILL_TOKENS = 0.123759, 15_388
_ANDES_BASE_S, _ANDES_SEQUENCE_S = 8.17e-3, 0.153e-3
_LOADED_TOKENS_PER_S = 50e3


def rows() -> list[Row]:
    """The whole table."""
    return [*_burst_rows(), *_sharegpt_rows(), *_fitted_rows(), *_copy_rows()]


def _burst_rows() -> list[Row]:
    return [
        row
        for (num_in, num_out), bursts in _BURSTS.items()
        for size, figures in bursts.items()
        for words, model in _played(num_in, num_out, size)
        for row in _rows_of(f"burst of {size}, {num_in} in, {num_out} out", figures, words, model)
    ]


def _played(num_in: int, num_out: int, size: int) -> list[tuple[str, BurstFigures]]:
    """The model's figures under each assumption."""
    costs = RooflineCosts(H200, LLAMA3_8B)
    written = [Length(num_in, num_out)] * size
    rng = random.Random(size)
    drawn = [Length(rng.randint(1, num_in), rng.randint(1, num_out)) for _ in range(size)]
    result = []
    for words, lengths in (("as written", written), ("uniform from 1 to that", drawn)):
        for fraction in _MEMORY_FRACTIONS:
            pool_tokens = kv_pool_tokens(H200, LLAMA3_8B, 1, fraction)
            text = f"{_RESERVED}, lengths {words}, weights and pool in {fraction} of the memory"
            result.append((text, play_burst(costs, lengths, pool_tokens=pool_tokens)))
    return result


def _rows_of(
    what: str, figures: Sequence[float], assumption: str, model: BurstFigures | None
) -> list[Row]:
    values = (None, None, None) if model is None else tuple(1e3 * value for value in model)
    return [
        Row(
            what=f"{what}: {name}",
            source="[F] notebook, Fig. 2 [P]",
            unit="ms",
            published=published,
            model=value,
            assumption=assumption,
        )
        for name, published, value in zip(_NAMES, figures, values, strict=True)
    ]


def _sharegpt_rows() -> list[Row]:
    return [
        row
        for size, figures in _SHAREGPT.items()
        for row in _rows_of(f"burst of {size}, ShareGPT", figures, _UNASKED, None)
    ]


def _fitted_rows() -> list[Row]:
    result = []
    for gpu in (H200, RTX_4090, RTX_A6000):
        costs, text = RooflineCosts(gpu, LLAMA3_8B), f"{gpu.name}, Llama3-8B"
        decode_s = costs.step_s(decode_totals(20, _DECODE_TOKENS))
        result += [
            Row(
                what=f"decode step, {_DECODE_TOKENS:,} tokens of context",
                source="[F] scheduler, fitted",
                unit="ms",
                published=1e3 * _DECODE_S,
                model=1e3 * decode_s,
                assumption=f"{text}, 20 sequences",
            ),
            Row(
                what=f"prefill of {_PREFILL_TOKENS:,} tokens",
                source="[F] scheduler, fitted",
                unit="ms",
                published=1e3 * _PREFILL_S,
                model=1e3 * costs.step_s(_prompts(_PREFILL_TOKENS, 512)),
                assumption=f"{text}, prompts of 512",
            ),
        ]
    return [*result, *_andes_rows()]


def _andes_rows() -> list[Row]:
    """The linear decode step of the tree's Andes, in the middle of answers of 4,096 tokens."""
    costs, context = RooflineCosts(H200, LLAMA3_8B), 512 + 4096 // 2
    one_s, two_s = (costs.step_s(decode_totals(n, n * context)) for n in (100, 101))
    text = f"h200, Llama3-8B, {context:,} tokens of context each"
    shared = {"source": "[F] Andes, fitted", "unit": "ms", "assumption": text}
    return [
        Row(
            what="decode step, fixed part",
            published=1e3 * _ANDES_BASE_S,
            model=1e3 * (one_s - 100 * (two_s - one_s)),
            **shared,
        ),
        Row(
            what="decode step, each sequence",
            published=1e3 * _ANDES_SEQUENCE_S,
            model=1e3 * (two_s - one_s),
            **shared,
        ),
    ]


def _copy_rows() -> list[Row]:
    return [
        Row(
            what="KV loaded from the host",
            source="[F] log",
            unit="tokens/s",
            published=_LOADED_TOKENS_PER_S,
            model=gpu.pcie_bytes_per_s / LLAMA3_8B.kv_bytes_per_token,
            assumption=f"{gpu.name}, Llama3-8B, pinned copies at the link's speed",
        )
        for gpu in (H200, RTX_4090)
    ]


def _prompts(num_tokens: int, length: int) -> StepTotals:
    """One step with prompts of `length` that come to `num_tokens`."""
    num, rest = divmod(num_tokens, length)
    pairs = num * num_causal_pairs(0, length) + num_causal_pairs(0, rest)
    return StepTotals(0, num_tokens, num_tokens, pairs, num + (rest > 0))
