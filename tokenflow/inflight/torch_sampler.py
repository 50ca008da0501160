"""Choice of the next token for a whole batch at once.

Owns the order in which the fields of `SamplingConfig` act, and the sampling state of live requests.
The ranges are checked in one place, `admission`, before a request comes here. A row of raw logits l
goes through, in this order:

1. embedding_bias: l + bias.
2. temperature T: l / T. (The division comes later, in the draw; the penalties count as if it came
   here. Unset and 0 are 1 here.)
3. repetition_penalty r, on every token that the sequence holds, prompt included: l / r if l >= 0,
   else l * r.
4. presence_penalty p and frequency_penalty f: l - p - f * n, for a token that the sequence holds n
   times beyond the first prompt_ignore_length tokens of the prompt.
5. min_tokens, no_repeat_ngram_size, bad_words: -inf (`bans`).
6. Greedy: the most likely token. A request is greedy when top_k (None or 0) and top_p (None) are
   both unset, when top_k is 1 or temperature is 0. Everything above applies all the same; min_p
   changes nothing then, and alone it does not make a request draw.
7. Drawn: softmax; min_p, tokens less likely than that share of the most likely one go; the top_k
   best; the smallest set of them whose share is at least top_p, which decays (`top_p_decay`); one
   draw.

If every token of a row is banned, the bans cannot be kept: the token with the highest raw logit is
taken, greedy or drawn alike.

This is what TensorRT-LLM's decoder does, as far as its public sources (0.8 to 1.2) show: penalties
with bias and temperature in one kernel, then n-grams, then bad words, then softmax with min_p, then
top_k or top_p. Known differences: its T is T + 1e-6, also for T = 0, where presence and frequency
then weigh nothing; its top_p does not decay beside a top_k; its bad words cannot end with token 0.
Not verified: whether its reset of a decayed top_p looks at the token just sampled, as its text
says, and the kernels of the very release 1.2.1; nothing was run.

Invariants: a choice depends on the row of logits, the request with its own tokens, and
num_generated only, never on the slot or on the other rows; tokens of equal probability are taken by
ascending id; the log-probability reported is the one under the raw logits, greedy or drawn alike. A
batch in which nobody uses a feature does not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.bans import has_bans
from tokenflow.inflight.batched_bans import BatchedBans
from tokenflow.inflight.history import BatchHistory, IntArray, TokenHistory
from tokenflow.inflight.top_p_decay import TopPDecay, has_top_p_decay
from tokenflow.inflight.torch_draw import draw, uniforms
from tokenflow.inflight.torch_penalties import (
    EmbeddingBias,
    Penalties,
    SparseBias,
    has_penalties,
)

_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny


class Sampler:
    """Sampling state of the live requests and the batched choice. A request must be in no batch
    twice, and every token chosen for it becomes part of its sequence or ends it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._live: dict[int, _LiveRequest] = {}
        self._batch: _Batch | None = None

    def add(self, request_id: int, request: Request) -> None:
        """Remember a request; its parameters are in range."""
        self._drop_batch()
        self._live[request_id] = _LiveRequest(
            request,
            TokenHistory(request.input_token_ids) if looks_back(request) else None,
            SparseBias(request.embedding_bias) if request.embedding_bias else None,
        )

    def remove(self, request_id: int) -> None:
        """Forget a request. Raises KeyError for one that is not known."""
        self._drop_batch()
        del self._live[request_id]

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[int], num_generated: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row.

        logits: [num_rows, vocab_size] float32, finite, left unchanged. request_ids, num_generated:
        per row, see SequenceChunk. Returns token ids [num_rows] int64 and their natural
        log-probabilities [num_rows] float32. Raises InternalError if num_generated is not the
        number of tokens chosen so far, for a request that looks back on them.
        """
        batch = self._batch_of(tuple(request_ids))
        counts = np.asarray(num_generated, dtype=np.int64)
        batch.history.check(counts)
        token_ids = batch.choose(logits, counts)
        if len(batch.history.rows):
            batch.history.append(token_ids.cpu().numpy())
        chosen = logits.gather(1, token_ids[:, None]).squeeze(1)
        return token_ids, chosen - logits.logsumexp(dim=-1)

    def _batch_of(self, request_ids: tuple[int, ...]) -> _Batch:
        if self._batch is None or self._batch.request_ids != request_ids:
            self._drop_batch()
            live = [self._live[request_id] for request_id in request_ids]
            self._batch = _Batch(request_ids, live, self._vocab_size, self._device)
        return self._batch

    def _drop_batch(self) -> None:
        if self._batch is not None:
            self._batch.history.save()
            self._batch = None


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    """history: None for a request that does not look back; bias: None if there is none."""

    request: Request
    history: TokenHistory | None
    bias: SparseBias | None


class _Batch:
    """Parameters of one batch composition as columns, kept for as long as it lasts.

    drawn: indices of the rows that are drawn; seeds, temperature, top_k, top_p: [len(drawn)].
    min_p: the same, or None where nobody uses it.
    """

    def __init__(
        self,
        request_ids: tuple[int, ...],
        live: Sequence[_LiveRequest],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        requests = [one.request for one in live]
        configs = [request.sampling_config for request in requests]
        history = BatchHistory([one.history for one in live])
        self.request_ids = request_ids
        self.history = history
        self._device = device
        self._bias = EmbeddingBias([one.bias for one in live], device)
        self._penalties = Penalties(requests, history, device)
        self._bans = BatchedBans(requests, history) if any(map(has_bans, requests)) else None
        self._drawn = np.array(
            [i for i, config in enumerate(configs) if not is_greedy(config)], dtype=np.int64
        )
        drawn = [configs[i] for i in self._drawn]
        self._seeds = np.array([c.seed or 0 for c in drawn], dtype=np.uint64)
        temperature = [
            1.0 if c.temperature is None else max(c.temperature, _MIN_TEMPERATURE) for c in drawn
        ]
        top_k = [min(c.top_k, vocab_size) if c.top_k else vocab_size for c in drawn]
        min_p = [c.min_p or 0.0 for c in drawn]
        self._temperature = torch.tensor(temperature, dtype=torch.float32, device=device)
        self._top_k = torch.tensor(top_k, dtype=torch.int64, device=device)
        self._top_p = np.array([1.0 if c.top_p is None else c.top_p for c in drawn])
        self._top_p_tensor = torch.from_numpy(self._top_p).to(device)
        self._min_p = (
            torch.tensor(min_p, dtype=torch.float32, device=device) if any(min_p) else None
        )
        self._decay = TopPDecay(drawn, self._drawn, history)

    def choose(self, logits: torch.Tensor, num_generated: IntArray) -> torch.Tensor:
        """The next tokens, [num_rows]. num_generated: [num_rows]."""
        allowed = self._weighed(logits)
        if self._bans is not None:
            allowed = self._without_banned(allowed, logits, self._bans, num_generated)
        token_ids = allowed.argmax(dim=-1)
        if len(self._drawn):
            rows = torch.from_numpy(self._drawn).to(self._device)
            uniform = uniforms(self._seeds, num_generated[self._drawn])
            top_p = self._top_p_tensor
            if self._decay.is_set:
                now = self._decay.now(self._top_p, self.history)
                top_p = torch.from_numpy(now).to(self._device)
            token_ids[rows] = draw(
                allowed[rows],
                self._temperature,
                self._top_k,
                top_p,
                torch.from_numpy(uniform).to(self._device),
                self._min_p,
            )
        return token_ids

    def _weighed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with bias and penalties: the same tensor if there are none, else a copy."""
        if not (self._bias.is_set or self._penalties.is_set):
            return logits
        weighed = logits.clone()
        if self._bias.is_set:
            self._bias.add_to(weighed)
        if self._penalties.is_set:
            self._penalties.apply_to(weighed, self.history)
        return weighed

    def _without_banned(
        self,
        weighed: torch.Tensor,
        logits: torch.Tensor,
        bans: BatchedBans,
        num_generated: IntArray,
    ) -> torch.Tensor:
        """`weighed` with -inf for what is banned; `logits` are the raw ones, left unchanged."""
        banned_rows, banned_ids = bans.find(num_generated, self.history)
        if not len(banned_rows):
            return weighed
        allowed = weighed.clone() if weighed is logits else weighed
        rows = torch.from_numpy(banned_rows).to(self._device)
        allowed[rows, torch.from_numpy(banned_ids).to(self._device)] = -math.inf
        lost = (allowed.amax(dim=-1) == -math.inf).nonzero().squeeze(1)
        allowed[lost, logits[lost].argmax(dim=-1)] = 0.0
        return allowed


def is_greedy(config: SamplingConfig) -> bool:
    """True if the most likely token is taken, without a draw."""
    unset = not config.top_k and config.top_p is None
    return unset or config.top_k == 1 or config.temperature == 0


def looks_back(request: Request) -> bool:
    """True if what comes next depends on the tokens before it in other ways than through the
    logits."""
    config = request.sampling_config
    return bool(
        has_penalties(config)
        or config.no_repeat_ngram_size
        or any(len(word) > 1 for word in request.bad_words)
        or has_top_p_decay(config)
    )
