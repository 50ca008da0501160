"""The top_p of a step where it decays: top_p_decay, top_p_min, top_p_reset_ids.

Owns the recurrence, in closed form over the history: top_p itself for the first token and for the
one after each token with the reset id, otherwise max(top_p * decay^k, top_p_min) for the k-th token
since then. Generated tokens only: it starts anew at every enqueue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenflow.executor.api import SamplingConfig
from tokenflow.inflight.history import BatchHistory, IntArray

_DEFAULT_TOP_P_MIN = 1e-6
"""TensorRT-LLM's; keeps top_p above 0."""


def has_top_p_decay(config: SamplingConfig) -> bool:
    """True if top_p changes from token to token."""
    decays = config.top_p_decay not in (None, 1.0)
    return config.top_p is not None and (decays or config.top_p_min is not None)


class TopPDecay:
    """Decays of one batch composition. configs, rows: of the rows that are drawn, and their place
    in the batch."""

    def __init__(
        self, configs: Sequence[SamplingConfig], rows: IntArray, history: BatchHistory
    ) -> None:
        decaying = [i for i, config in enumerate(configs) if has_top_p_decay(config)]
        self.is_set = bool(decaying)
        self._places = np.array(decaying, dtype=np.int64)
        self._index = history.index[rows[self._places]]
        chosen = [configs[i] for i in decaying]

        def column(values: list[float]) -> npt.NDArray[np.float64]:
            return np.array(values, dtype=np.float64)

        self._top_p = column([1.0 if c.top_p is None else c.top_p for c in chosen])
        self._decay = column([1.0 if c.top_p_decay is None else c.top_p_decay for c in chosen])
        self._min = column(
            [_DEFAULT_TOP_P_MIN if c.top_p_min is None else c.top_p_min for c in chosen]
        )
        reset_ids = [-1 if c.top_p_reset_ids is None else c.top_p_reset_ids for c in chosen]
        self._reset_ids = np.array(reset_ids, dtype=np.int64)

    def now(self, top_p: npt.NDArray[np.float64], history: BatchHistory) -> npt.NDArray[np.float64]:
        """top_p [num_drawn] of the next token, given the one that the requests ask for."""
        token_ids, lengths = history.used(self._index), history.lengths[self._index]
        prompts = history.num_prompt_tokens[self._index]
        places = np.arange(token_ids.shape[1])
        resets = (token_ids == self._reset_ids[:, None]) & (places < lengths[:, None])
        # A reset id in the prompt puts the start no later than the end of the prompt.
        starts = np.where(resets, places + 1, prompts[:, None]).max(axis=1)
        num_since = lengths - starts
        decayed = np.maximum(self._top_p * self._decay**num_since, self._min)
        result = top_p.copy()
        result[self._places] = np.where(num_since == 0, self._top_p, decayed)
        return result
