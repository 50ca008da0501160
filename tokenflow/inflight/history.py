"""The sequences that sampling looks back on, as one matrix per batch.

Owns the token history of every live request whose sampling depends on it: the prompt and the tokens
that the sampler chose. It is all the state such a request has. Whatever else sampling needs
(occurrences, n-grams, how often top_p decayed) follows from it at every step, so a request that
starts again with its output in its prompt is in the same state as one that ran on.

Invariants: a history belongs to a request, not to a place in the batch; columns of a row behind its
length repeat its first token, so that every column holds a token of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenflow.errors import InternalError

IntArray = npt.NDArray[np.int64]

_SPARE_COLUMNS = 128


class TokenHistory:
    """The tokens of one request between two batches. token_ids: room, of which num_tokens are
    used. num_prompt_tokens: how many of them are the prompt."""

    __slots__ = ("num_prompt_tokens", "num_tokens", "token_ids")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids: IntArray = np.array(prompt, dtype=np.int64)
        self.num_tokens = self.num_prompt_tokens = len(prompt)


class BatchHistory:
    """The histories of a batch, as long as its composition lasts; then `save` them.

    rows: [num_histories] the row of the batch that each belongs to, ascending.
    index: [num_rows] the place in `rows` of each row of the batch, -1 for one without a history.
    token_ids: [num_histories, width]; lengths, num_prompt_tokens: [num_histories].
    """

    def __init__(self, histories: Sequence[TokenHistory | None]) -> None:
        self._histories = [history for history in histories if history is not None]
        self.rows = np.array([i for i, h in enumerate(histories) if h is not None], dtype=np.int64)
        self.index = np.full(len(histories), -1, dtype=np.int64)
        self.index[self.rows] = np.arange(len(self.rows))
        self.lengths = np.array([h.num_tokens for h in self._histories], dtype=np.int64)
        self.num_prompt_tokens = np.array(
            [h.num_prompt_tokens for h in self._histories], dtype=np.int64
        )
        width = max((h.num_tokens for h in self._histories), default=0) + _SPARE_COLUMNS
        self.token_ids: IntArray = np.empty((len(self.rows), width), dtype=np.int64)
        for row, history in zip(self.token_ids, self._histories, strict=True):
            row[:] = history.token_ids[0]
            row[: history.num_tokens] = history.token_ids[: history.num_tokens]

    def check(self, num_generated: IntArray) -> None:
        """Raises InternalError unless the histories are those of requests that have generated
        `num_generated` [num_rows] tokens."""
        if (self.lengths - self.num_prompt_tokens != num_generated[self.rows]).any():
            raise InternalError("a request generated tokens that its sampler does not know")

    def append(self, token_ids: IntArray) -> None:
        """Take the next token of every row of the batch, [num_rows]."""
        if not len(self.rows):
            return
        if self.lengths.max() == self.token_ids.shape[1]:
            spare = np.repeat(self.token_ids[:, :1], self.token_ids.shape[1], axis=1)
            self.token_ids = np.concatenate([self.token_ids, spare], axis=1)
        self.token_ids[np.arange(len(self.rows)), self.lengths] = token_ids[self.rows]
        self.lengths += 1

    def used(self, index: IntArray) -> IntArray:
        """Tokens of the histories at `index`, as wide as the longest of them (a copy)."""
        return self.token_ids[index, : self.lengths[index].max()]

    def save(self) -> None:
        """Hand the histories back to their requests."""
        for history, row, length in zip(
            self._histories, self.token_ids, self.lengths.tolist(), strict=True
        ):
            history.token_ids, history.num_tokens = row, length
