"""Embedding bias and penalties on the logits of a batch.

Owns their meaning (order and source: `torch_sampler`). The occurrences of a token are counted anew
from the histories at every step: in a row of zeros, which costs less than keeping them right while
requests come and go. Only tokens of the sequence are penalised, so the arithmetic is done on those
alone, in float64, which cannot overflow.

With a temperature T the penalties belong to logits / T. Here they act on the logits that are
divided later: a factor keeps its value, since T > 0 keeps the sign, and what is subtracted is
multiplied by T. An unset T and T = 0 (greedy) leave it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenflow.executor.api import Request, SamplingConfig
from tokenflow.inflight.history import BatchHistory, IntArray

_MAX_LOGIT = torch.finfo(torch.float32).max


def has_penalties(config: SamplingConfig) -> bool:
    """True if a penalty is set to more than its neutral value."""
    return (
        config.repetition_penalty not in (None, 1.0)
        or config.presence_penalty not in (None, 0.0)
        or config.frequency_penalty not in (None, 0.0)
    )


class SparseBias:
    """The bias of one request, [num_biased] each."""

    __slots__ = ("token_ids", "values")

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self.token_ids: IntArray = np.array([token_id for token_id, _ in bias], dtype=np.int64)
        self.values = np.array([value for _, value in bias], dtype=np.float32)


class EmbeddingBias:
    """Biases of one batch composition. biases: per row, None for one that has none."""

    def __init__(self, biases: Sequence[SparseBias | None], device: torch.device) -> None:
        set_ones = [(row, bias) for row, bias in enumerate(biases) if bias is not None]
        self.is_set = bool(set_ones)
        if not self.is_set:
            return
        rows = np.concatenate([np.full(len(bias.token_ids), row) for row, bias in set_ones])
        token_ids = np.concatenate([bias.token_ids for _, bias in set_ones])
        values = np.concatenate([bias.values for _, bias in set_ones])
        self._rows = torch.from_numpy(rows).to(device)
        self._token_ids = torch.from_numpy(token_ids).to(device)
        self._values = torch.from_numpy(values).to(device)

    def add_to(self, logits: torch.Tensor) -> None:
        """Add the biases to logits [num_rows, vocab_size] in place."""
        logits[self._rows, self._token_ids] += self._values


class Penalties:
    """Penalties of one batch composition: the rows that have any, and theirs as columns [n, 1]."""

    def __init__(
        self, requests: Sequence[Request], history: BatchHistory, device: torch.device
    ) -> None:
        configs = [request.sampling_config for request in requests]
        rows = [i for i, config in enumerate(configs) if has_penalties(config)]
        self.is_set = bool(rows)
        self._device = device
        self._index = history.index[np.array(rows, dtype=np.int64)]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        drawn_from = [configs[i] for i in rows]
        scale = [config.temperature or 1.0 for config in drawn_from]
        self._repetition = column([c.repetition_penalty or 1.0 for c in drawn_from])
        self._presence = column(
            [(c.presence_penalty or 0.0) * s for c, s in zip(drawn_from, scale, strict=True)]
        )
        self._frequency = column(
            [(c.frequency_penalty or 0.0) * s for c, s in zip(drawn_from, scale, strict=True)]
        )
        ignored = np.array([c.prompt_ignore_length or 0 for c in drawn_from], dtype=np.int64)
        self._num_ignored = np.minimum(ignored, history.num_prompt_tokens[self._index])

    def apply_to(self, logits: torch.Tensor, history: BatchHistory) -> None:
        """Penalise logits [num_rows, vocab_size] float32 in place, by the histories so far."""
        used = history.used(self._index)
        places = np.arange(used.shape[1])
        counted = (places >= self._num_ignored[:, None]) & (
            places < history.lengths[self._index][:, None]
        )
        token_ids = torch.from_numpy(used).to(self._device)
        counts = torch.zeros((len(used), logits.shape[1]), dtype=torch.float32, device=self._device)
        counts.scatter_add_(1, token_ids, torch.from_numpy(counted).to(self._device).float())
        num_times = counts.gather(1, token_ids).double()
        values = logits[self._rows[:, None], token_ids].double()
        values = torch.where(values < 0, values * self._repetition, values / self._repetition)
        values -= torch.where(num_times > 0, self._presence, 0.0)
        values -= num_times * self._frequency
        # A token that occurs several times is written several times, each time with one value.
        logits[self._rows[:, None], token_ids] = values.clamp(-_MAX_LOGIT, _MAX_LOGIT).float()
