"""Which tokens must not come next, for a whole batch: `bans` in arrays.

Owns the search for bad words and n-grams over all rows at once, on the host, where the histories
are. It goes backwards from the end of the sequences and drops what does not match, so that long
words and n-grams cost little more than short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tokenflow.executor.api import Request
from tokenflow.inflight.history import BatchHistory, IntArray


class BatchedBans:
    """Bans of one batch composition. A word counts once per row that has it.

    _short_*: min_tokens, 0 without an end token, and end tokens, [num_rows].
    _single_*: rows and tokens of one-token words. _word_*: row, history, number of tokens and place
    of the last token in `_flat` of the longer words. _ngram_*: row, history and n of rows with an
    n-gram size.
    """

    def __init__(self, requests: Sequence[Request], history: BatchHistory) -> None:
        end_ids = [-1 if request.end_id is None else request.end_id for request in requests]
        self._end_ids = np.array(end_ids, dtype=np.int64)
        min_tokens = [request.sampling_config.min_tokens or 0 for request in requests]
        self._min_tokens = np.where(self._end_ids >= 0, np.array(min_tokens, dtype=np.int64), 0)
        words = [(row, word) for row, request in enumerate(requests) for word in request.bad_words]
        singles = [(row, word[0]) for row, word in words if len(word) == 1]
        self._single_rows, self._single_ids = _columns(singles)
        longer = [(row, len(word)) for row, word in words if len(word) > 1]
        self._word_rows, self._word_sizes = _columns(longer)
        self._word_index = history.index[self._word_rows]
        self._flat = np.array(
            [token for _, word in words if len(word) > 1 for token in word], dtype=np.int64
        )
        self._word_ends = self._word_sizes.cumsum() - 1
        sizes = [
            (row, size)
            for row, request in enumerate(requests)
            if (size := request.sampling_config.no_repeat_ngram_size)
        ]
        self._ngram_rows, self._ngram_sizes = _columns(sizes)
        self._ngram_index = history.index[self._ngram_rows]

    def find(self, num_generated: IntArray, history: BatchHistory) -> tuple[IntArray, IntArray]:
        """(rows, token ids) of what is banned now; a pair may come more than once.

        num_generated: [num_rows]; history: as given to the constructor, with what came since.
        """
        short = (num_generated < self._min_tokens).nonzero()[0]
        rows, token_ids = [short, self._single_rows], [self._end_ids[short], self._single_ids]
        if len(self._word_rows):
            words = self._words_at_the_end(history)
            rows.append(self._word_rows[words])
            token_ids.append(self._flat[self._word_ends[words]])
        if len(self._ngram_rows):
            ngrams, banned = self._repeated(history)
            rows.append(self._ngram_rows[ngrams])
            token_ids.append(banned)
        return np.concatenate(rows), np.concatenate(token_ids)

    def _words_at_the_end(self, history: BatchHistory) -> IntArray:
        """The longer words of which only the last token is missing."""
        lengths = history.lengths[self._word_index]

        def equal(words: IntArray, back: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
            at = lengths[words] - back
            token_ids = history.token_ids[self._word_index[words], np.maximum(at, 0)]
            same: np.ndarray[tuple[int], np.dtype[np.bool_]] = (at >= 0) & (
                token_ids == self._flat[self._word_ends[words] - back]
            )
            return same

        return _matching(self._word_sizes, equal)

    def _repeated(self, history: BatchHistory) -> tuple[IntArray, IntArray]:
        """Places in `_ngram_rows`, and the tokens that would make an n-gram of the past again."""
        token_ids = history.used(self._ngram_index)
        lengths = history.lengths[self._ngram_index]
        places = np.arange(token_ids.shape[1])
        last = token_ids[np.arange(len(lengths)), lengths - 1]
        starts = np.zeros(token_ids.shape, dtype=np.bool_)
        starts[:, 1:] = token_ids[:, :-1] == last[:, None]
        starts |= self._ngram_sizes[:, None] == 1
        starts &= (places >= self._ngram_sizes[:, None] - 1) & (places < lengths[:, None])
        rows, at = starts.nonzero()

        def equal(found: IntArray, back: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
            row = rows[found]
            same: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
                token_ids[row, at[found] - back] == token_ids[row, lengths[row] - back]
            )
            return same

        found = _matching(self._ngram_sizes[rows], equal)
        return rows[found], token_ids[rows[found], at[found]]


def _matching(
    sizes: IntArray,
    equal: Callable[[IntArray, int], np.ndarray[tuple[int], np.dtype[np.bool_]]],
) -> IntArray:
    """Which candidates match in all their sizes - 1 tokens before the last one.

    equal(candidates, back): whether the token `back` places before the last one matches.
    """
    candidates = np.arange(len(sizes))
    back = 1
    while (longer := sizes[candidates] > back).any():
        keep = ~longer
        keep[longer] = equal(candidates[longer], back)
        candidates = candidates[keep]
        back += 1
    return candidates


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    columns = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
    return columns[:, 0], columns[:, 1]
