"""Whether two greedy outputs of one request are the same, as far as a GPU can tell.

A resumed request computes its last token in a context kernel and shares its steps with others, so
that logits differ in the last bits from those of an undisturbed run. Where the two best tokens are
nearly as likely, that decides which one comes, and all that follows is another text. So what counts
is how likely each run found its own token:

- drift: the largest difference of log-probs over the tokens that both runs have in common;
- margin: the difference at the first token that differs. Both runs took their best token, so a near
  tie shows in nearly equal log-probs; a wrong KV block does not, it changes them by whole nats.

Both must be within a tolerance (nats), by the number types of the engine: TOLERANCES. These bounds
are ours, chosen well above the noise of such kernels and below what a wrong block does; the report
carries the measured values and those of a control, the same request repeated without any pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCES = {"float32": 0.02, "bfloat16": 0.25, "float16": 0.15, "quantized": 0.5}
"""Nats. quantized: weights or KV in 8 or 4 bits, whatever they are computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of an output with the undisturbed one.

    first_difference: index of the first token that differs (or that only one of them has); None
    when they are equal. drift, margin: see the module; margin is None without a difference, and
    where one of them just ends.
    """

    num_tokens: int
    first_difference: int | None
    drift: float
    margin: float | None

    def faults(self, name: str, tolerance: float) -> list[str]:
        """Why they cannot be the same, in words; [] if they can."""
        faults = []
        if self.drift > tolerance:
            faults.append(
                f"{name}: log-probs of equal tokens differ by {self.drift:.3f} nats, "
                f"more than {tolerance:g}"
            )
        if self.first_difference is not None and self.margin is None:
            faults.append(f"{name}: one of them ends at token {self.first_difference}")
        elif self.margin is not None and self.margin > tolerance:
            faults.append(
                f"{name}: token {self.first_difference} differs, with log-probs "
                f"{self.margin:.3f} nats apart, more than {tolerance:g}: no near tie"
            )
        return faults

    def remark(self, name: str) -> str | None:
        """A word about a difference that may be."""
        if self.first_difference is None or self.margin is None:
            return None
        return (
            f"{name}: parts at token {self.first_difference} of {self.num_tokens}, "
            f"{self.margin:.4f} nats apart"
        )

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def compare(
    reference: tuple[Sequence[int], Sequence[float]], other: tuple[Sequence[int], Sequence[float]]
) -> Comparison:
    """Two outputs, each as token ids and as many log-probs.

    Raises ValueError where ids and log-probs differ in number.
    """
    for ids, log_probs in (reference, other):
        if len(ids) != len(log_probs):
            raise ValueError(f"{len(ids)} tokens with {len(log_probs)} log-probs")
    drift = 0.0
    num_common = min(len(reference[0]), len(other[0]))
    for index in range(num_common):
        apart = abs(reference[1][index] - other[1][index])
        if reference[0][index] != other[0][index]:
            return Comparison(
                num_tokens=len(reference[0]), first_difference=index, drift=drift, margin=apart
            )
        drift = max(drift, apart)
    is_same = len(reference[0]) == len(other[0])
    return Comparison(
        num_tokens=len(reference[0]),
        first_difference=None if is_same else num_common,
        drift=drift,
        margin=None,
    )


def tolerance_of(dtype: str, is_quantized: bool) -> float:
    """The tolerance for an engine's number types."""
    return TOLERANCES["quantized"] if is_quantized else TOLERANCES.get(dtype, 0.25)
