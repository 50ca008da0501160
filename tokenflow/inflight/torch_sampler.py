"""Choice of the next token for a whole batch at once.

Owns the sampling parameters of live requests and the meaning of each (see `SamplingConfig`):
greedy when top_k (None or 0) and top_p (None) are both unset, when top_k is 1 or temperature is 0;
otherwise temperature, then the top_k best, then the smallest set of them whose share is at least
top_p, then one draw. While num_generated < min_tokens the end token is never chosen. The ranges are
checked in one place, `admission`, before a request comes here.

Invariants: a choice depends on the row of logits, the request's parameters and num_generated only,
never on the slot or on the other rows; tokens of equal probability are taken by ascending id; the
log-probability reported is the one under the raw logits, greedy or sampled alike.

Randomness is a counter: the uniform number of draw i of a request is a hash of (seed, i), so the
stream restarts at every enqueue, as TensorRT-LLM's does, and nothing has to be kept between draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenflow.executor.api import Request, SamplingConfig

_NUM_CANDIDATES = (256, 4096)
"""Most likely tokens looked at, in turn; all are sorted only where these do not settle the cut."""


class Sampler:
    """Sampling state of the live requests and the batched draw."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._requests: dict[int, Request] = {}
        self._batch: _BatchParameters | None = None

    def add(self, request_id: int, request: Request) -> None:
        """Remember a request; its parameters are in range."""
        self._requests[request_id] = request
        self._batch = None

    def remove(self, request_id: int) -> None:
        """Forget a request. Raises KeyError for one that is not known."""
        del self._requests[request_id]
        self._batch = None

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[int], num_generated: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row.

        logits: [num_rows, vocab_size] float32, left unchanged. request_ids, num_generated: per
        row, see SequenceChunk. Returns token ids [num_rows] int64 and their natural
        log-probabilities [num_rows] float32.
        """
        batch = self._parameters(tuple(request_ids))
        counts = np.asarray(num_generated, dtype=np.int64)
        allowed = logits
        too_short = (counts < batch.min_tokens).nonzero()[0]
        if len(too_short):
            allowed = logits.clone()
            rows, columns = torch.from_numpy(too_short), torch.from_numpy(batch.end_ids[too_short])
            allowed[rows.to(self._device), columns.to(self._device)] = -math.inf
        token_ids = allowed.argmax(dim=-1)
        if len(batch.drawn):
            uniform = uniforms(batch.seeds[batch.drawn], counts[batch.drawn])
            rows = torch.from_numpy(batch.drawn).to(self._device)
            token_ids[rows] = draw(
                allowed[rows],
                batch.temperature,
                batch.top_k,
                batch.top_p,
                torch.from_numpy(uniform).to(self._device),
            )
        chosen = logits.gather(1, token_ids[:, None]).squeeze(1)
        return token_ids, chosen - logits.logsumexp(dim=-1)

    def _parameters(self, request_ids: tuple[int, ...]) -> _BatchParameters:
        if self._batch is None or self._batch.request_ids != request_ids:
            requests = [self._requests[request_id] for request_id in request_ids]
            self._batch = _BatchParameters(request_ids, requests, self._vocab_size, self._device)
        return self._batch


class _BatchParameters:
    """Parameters of one batch composition as columns, kept for as long as it lasts.

    min_tokens, end_ids, seeds: [num_rows]; min_tokens is 0 for a request without an end token.
    drawn: indices of the rows that are sampled; temperature, top_k, top_p: [len(drawn)].
    """

    def __init__(
        self,
        request_ids: tuple[int, ...],
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        configs = [request.sampling_config for request in requests]
        end_ids = [-1 if request.end_id is None else request.end_id for request in requests]
        self.request_ids = request_ids
        self.end_ids = np.array(end_ids, dtype=np.int64)
        min_tokens = np.array([config.min_tokens or 0 for config in configs], dtype=np.int64)
        self.min_tokens = np.where(self.end_ids >= 0, min_tokens, 0)
        self.seeds = np.array([config.seed or 0 for config in configs], dtype=np.uint64)
        self.drawn = np.array(
            [i for i, config in enumerate(configs) if not is_greedy(config)], dtype=np.int64
        )
        drawn = [configs[i] for i in self.drawn]
        temperature = [1.0 if c.temperature is None else c.temperature for c in drawn]
        top_k = [min(c.top_k, vocab_size) if c.top_k else vocab_size for c in drawn]
        self.temperature = torch.tensor(temperature, dtype=torch.float32, device=device)
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device)
        top_p = [1.0 if c.top_p is None else c.top_p for c in drawn]
        self.top_p = torch.tensor(top_p, dtype=torch.float64, device=device)


def is_greedy(config: SamplingConfig) -> bool:
    """True if the most likely token is taken, without a draw."""
    unset = not config.top_k and config.top_p is None
    return unset or config.top_k == 1 or config.temperature == 0


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
) -> torch.Tensor:
    """Sample by the inverse of the cumulative distribution over ascending token ids.

    logits [n, vocab] float32; temperature [n] > 0; top_k [n] in [1, vocab]; top_p [n] in (0, 1];
    uniform [n] float64 in [0, 1). Returns token ids [n].
    """
    # The maximum is taken out before the division, so that a tiny temperature cannot overflow.
    peaks = logits.amax(dim=-1, keepdim=True)
    probs = torch.softmax((logits - peaks) / temperature[:, None], dim=-1)
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
