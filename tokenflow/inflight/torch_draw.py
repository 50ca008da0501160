"""Drawing a token from logits: temperature, min_p, top_k, top_p, and the random numbers.

Owns the cut and the draw of a batch of rows. Invariants: a row's result depends on that row alone;
tokens of equal probability are taken by ascending id.

Randomness is a counter: the uniform number of draw i of a request is a hash of (seed, i), so the
stream restarts at every enqueue, as TensorRT-LLM's does, and nothing has to be kept between draws.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

_NUM_CANDIDATES = (256, 4096)
"""Most likely tokens looked at, in turn; all are sorted only where these do not settle the cut."""


def uniforms(
    seeds: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, count): 53 bits of SplitMix64 (Steele et al., OOPSLA 2014).

    The seed is mixed before it starts the sequence, so that close seeds give unrelated streams.
    """
    weyl = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds + weyl) + (counts.astype(np.uint64) + np.uint64(1)) * weyl
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample by the inverse of the cumulative distribution over ascending token ids.

    logits [n, vocab] float32, not all -inf in a row; temperature [n] > 0; top_k [n] in [1, vocab];
    top_p [n] in (0, 1]; uniform [n] float64 in [0, 1); min_p [n] float32 in [0, 1], None = 0 for
    all: what is less likely than that share of the most likely token goes first, and the rest is
    the distribution that top_k and top_p cut. Returns token ids [n].
    """
    # The maximum is taken out before the division, so that a tiny temperature cannot overflow.
    peaks = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - peaks) / temperature[:, None]
    if min_p is not None:
        scaled = scaled.masked_fill(scaled.exp() < min_p[:, None], -math.inf)
    probs = torch.softmax(scaled, dim=-1)
    weights = torch.where(_kept(probs, top_k, top_p), probs, 0.0).double()
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounding up to the total itself would point behind the last token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


def _kept(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask [n, vocab] of the tokens that top_k and top_p leave, equal ones by ascending id."""
    vocab_size = probs.shape[1]
    num_kept = torch.full_like(top_k, vocab_size)
    threshold = torch.zeros_like(probs[:, 0])
    open_rows = ((top_k < vocab_size) | (top_p < 1)).nonzero().squeeze(1)
    for num_candidates in (*(n for n in _NUM_CANDIDATES if n < vocab_size), vocab_size):
        if not len(open_rows):
            break
        best = probs[open_rows].topk(num_candidates, dim=-1).values
        settled, count = _cut(best, top_k[open_rows], top_p[open_rows], vocab_size)
        rows = open_rows[settled]
        num_kept[rows] = count[settled]
        threshold[rows] = best[settled].gather(1, count[settled][:, None] - 1).squeeze(1)
        open_rows = open_rows[~settled]
    kept = probs >= threshold[:, None]
    surplus = kept.sum(dim=-1) - num_kept
    if bool((surplus > 0).any()):
        ties = probs == threshold[:, None]
        num_ties = ties.sum(dim=-1) - surplus.clamp(min=0)
        kept &= ~ties | (ties.cumsum(dim=-1) <= num_ties[:, None])
    return kept


def _cut(
    best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the descending probabilities `best` [n, candidates] remain.

    Returns (settled, count), both [n]: count is valid where settled, i.e. where the candidates
    reach far enough down to decide.
    """
    num_candidates = best.shape[1]
    cumulative = best.double().cumsum(dim=-1)
    limited = top_k < vocab_size
    last = top_k.clamp(max=num_candidates) - 1
    share = torch.where(limited, cumulative.gather(1, last[:, None]).squeeze(1), 1.0)
    wanted = top_p * share
    nucleus = (cumulative < wanted[:, None]).sum(dim=-1) + 1
    nucleus = torch.where(top_p < 1, nucleus, vocab_size)
    count = torch.minimum(nucleus, top_k)
    reaches = (top_k <= num_candidates) | (~limited & (nucleus <= num_candidates))
    settled = reaches | torch.full_like(reaches, num_candidates == vocab_size)
    return settled, count.clamp(max=num_candidates)
