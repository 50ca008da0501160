"""How many tokens prompts and answers have.

Owns the distributions and their published parameters; each is a value that turns a random stream
into lengths. Invariants: `draw` returns exactly as many as asked for, all >= 1; the same value,
stream and number give the same lengths.

ShareGPT and BurstGPT are given by what Llumnix (OSDI'24, Table 1; arXiv 2406.03243) prints of
ShareGPT (GPT4) and BurstGPT (GPT4-Conversation), tokens:

| | mean | P50 | P80 | P95 | P99 |
|---|---|---|---|---|---|
| ShareGPT prompts | 306 | 74 | 348 | 1484 | 3388 |
| ShareGPT answers | 500 | 487 | 781 | 988 | 1234 |
| BurstGPT prompts | 830 | 582 | 1427 | 2345 | 3549 |
| BurstGPT answers | 271 | 243 | 434 | 669 | 964 |

A log-normal through mean and median misses ShareGPT's P80 of answers by a quarter, so the printed
percentiles themselves are the distribution, with straight lines in the logarithm between them. What
is not printed is chosen: the ends, and the P10, so that the mean comes out as printed (within 3 %).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenflow.types import FloatArray, IntArray


class Lengths(Protocol):
    """A distribution of lengths."""

    def draw(self, rng: np.random.Generator, num: int) -> IntArray:
        """Lengths in tokens, all >= 1 [num]."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Everybody the same. Raises ValueError for num_tokens < 1."""

    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be >= 1, got {self.num_tokens}")

    def draw(self, rng: np.random.Generator, num: int) -> IntArray:
        """See Lengths."""
        return np.full(num, self.num_tokens, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal, cut off below.

    mean: tokens. std_share: standard deviation as a share of the mean; TokenFlow's set-ups are
    "normal distributions" whose deviation is not printed, and 1/4 is our choice: 95 % lie within
    half to one and a half times the mean. minimum: what is shorter counts so much.
    Raises ValueError for a mean or minimum < 1, or a negative deviation.
    """

    mean: float
    std_share: float = 0.25
    minimum: int = 16

    def __post_init__(self) -> None:
        if self.mean < 1 or self.minimum < 1 or self.std_share < 0:
            raise ValueError(f"mean and minimum must be >= 1, std_share >= 0, got {self}")

    def draw(self, rng: np.random.Generator, num: int) -> IntArray:
        """See Lengths."""
        drawn = rng.normal(self.mean, self.std_share * self.mean, num)
        lengths: IntArray = np.rint(np.maximum(self.minimum, drawn)).astype(np.int64)
        return lengths


@dataclass(frozen=True)
class Percentiles:
    """Straight lines, in the logarithm of the length, between points (share below it, tokens).

    Raises ValueError unless shares go from 0 to 1, and shares and tokens (>= 1) both rise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        tokens = [num for _, num in self.points]
        rising = all(a < b for values in (shares, tokens) for a, b in itertools.pairwise(values))
        if not rising or shares[:1] != [0.0] or shares[-1:] != [1.0] or tokens[0] < 1:
            raise ValueError(f"points must rise from share 0 to 1 and from >= 1 token: {self}")

    def draw(self, rng: np.random.Generator, num: int) -> IntArray:
        """See Lengths."""
        return np.rint(self.quantiles(rng.random(num))).astype(np.int64)

    def quantiles(self, shares: FloatArray) -> FloatArray:
        """Tokens below which each of `shares` (0..1) of the lengths lie."""
        xs, tokens = zip(*self.points, strict=True)
        return np.asarray(np.exp(np.interp(shares, xs, np.log(tokens))))

    @property
    def mean(self) -> float:
        """Mean tokens, before rounding."""
        total = 0.0
        for (low, few), (high, many) in itertools.pairwise(self.points):
            total += (high - low) * (many - few) / math.log(many / few)
        return total


SHAREGPT_PROMPTS = Percentiles(
    ((0.0, 1), (0.1, 10), (0.5, 74), (0.8, 348), (0.95, 1484), (0.99, 3388), (1.0, 4096))
)
SHAREGPT_ANSWERS = Percentiles(
    ((0.0, 4), (0.1, 158), (0.5, 487), (0.8, 781), (0.95, 988), (0.99, 1234), (1.0, 2048))
)
BURSTGPT_PROMPTS = Percentiles(
    ((0.0, 4), (0.1, 90), (0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549), (1.0, 6144))
)
BURSTGPT_ANSWERS = Percentiles(
    ((0.0, 4), (0.1, 35), (0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964), (1.0, 2048))
)
