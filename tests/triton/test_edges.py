"""Values at the very edge of what is allowed, and refusals that must not take long."""

from __future__ import annotations

import numpy as np
import pytest

from tests.triton.fakes import byte_level_tokenizer
from tests.triton.parsing import parse
from tokenflow.errors import InvalidRequestError
from triton_backend.codec import READ_RATE_BOUNDS
from triton_backend.text import TextTokenizer
from triton_backend.words import MAX_BAD_WORD_TOKENS, MAX_WORD_CHARACTERS, MAX_WORDS


@pytest.mark.parametrize("bound", READ_RATE_BOUNDS)
def test_a_bound_may_be_sent_as_the_float32_that_is_nearest_to_it(bound: float) -> None:
    nearest = np.float32(bound)
    for stream in (True, False):
        assert parse(read_rate=np.array([[nearest]]), stream=stream).generate is not None
    way = -np.inf if bound < 1 else np.inf
    beyond = np.nextafter(nearest, np.float32(way))
    with pytest.raises(InvalidRequestError, match="read_rate"):
        parse(read_rate=np.array([[beyond]]), stream=True)


class CountingTokenizer(TextTokenizer):
    """num_words: bad words that were tokenized."""

    def __init__(self) -> None:
        other = byte_level_tokenizer()
        super().__init__(other._tokenizer, other.eos_token_ids)
        self.num_words = 0

    def encode_word_everywhere(self, word: str) -> tuple[tuple[int, ...], ...]:
        self.num_words += 1
        return super().encode_word_everywhere(word)


def test_too_many_tokens_of_bad_words_are_refused_without_looking_at_the_rest() -> None:
    """Whoever tokenizes lets nobody else in meanwhile."""
    tokenizer = CountingTokenizer()
    words = [chr(ord("0") + number) * MAX_WORD_CHARACTERS for number in range(MAX_WORDS)]
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_BAD_WORD_TOKENS} tokens"):
        parse(tokenizer=tokenizer, bad_words=words)
    assert tokenizer.num_words <= 1 + MAX_BAD_WORD_TOKENS // MAX_WORD_CHARACTERS
