"""Answers that are known before they are asked for, so that a client can check every token.

The scripted engine counts: the token after id n is n + 1. With a tokenizer whose token n is the
number n, the right answer to "… 41" reads " 42 43 44 …", and a token lost, doubled, swapped or
taken from another stream shows in the text itself.
"""

from __future__ import annotations

from pathlib import Path

NUM_NUMBERS = 4096
"""Numbers of the vocabulary; counting goes on with 0 after the last."""

_PROMPT_STRIDE = 64


def write_number_tokenizer(folder: Path) -> Path:
    """A tokenizer.json in which token n is the number n, and nothing is special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {str(number): number for number in range(NUM_NUMBERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def counting_prompt(last: int, num_tokens: int) -> str:
    """A prompt of `num_tokens` numbers that ends with `last`. Prompts with another end share no
    prefix with it."""
    numbers = [(last + 1 + index * _PROMPT_STRIDE) % NUM_NUMBERS for index in range(num_tokens - 1)]
    return " ".join(map(str, [*numbers, last]))


def counting_text(last: int, num_tokens: int) -> str:
    """The right answer to a prompt that ends with `last`, after `num_tokens` tokens."""
    return " ".join(str(token_id) for token_id in counting_ids(last, num_tokens))


def counting_ids(last: int, num_tokens: int) -> list[int]:
    """The token ids of `counting_text`."""
    return [(last + 1 + index) % NUM_NUMBERS for index in range(num_tokens)]


def counting_log_probs(last: int, num_tokens: int) -> list[float]:
    """The log-probabilities that the scripted engine gives those tokens."""
    return [-(token_id % 64 + 1) / 32 for token_id in counting_ids(last, num_tokens)]
