"""Words that a client names: stop words, bad words, biased words.

Owns their limits and the token ids of bad and biased words. Pure. Stop words stay text
(stop_strings.py). An empty word means "none", as clients send it; it counts for the limit.

A bad word is kept out as token sequences, in every way the tokenizer begins it (text.py). It is the
last token of a sequence that is kept from coming, so `New York` bans `York` after `New` only. The
same letters cut into tokens in another way than the tokenizer would are not seen.

A biased word adds its weight to the logit of each of its tokens; weights of the same token add up,
also within one word (tensorrtllm_backend's preprocessing does the same, but also tokenizes what its
tokenizer adds in front of a prompt; here that gets no weight).
"""

from __future__ import annotations

from tokenflow.errors import InvalidRequestError, shortened
from triton_backend.fields import Fields, check_number
from triton_backend.text import TextTokenizer

MAX_WORDS = 64
MAX_WORD_CHARACTERS = 1024
MAX_BAD_WORD_TOKENS = 16_384
"""In all ways of all words; the engine looks at them for each token."""
MAX_BIAS = 1e6
"""Largest weight of a biased word, either way; more than any logit."""


def read_words(fields: Fields, name: str) -> tuple[str, ...]:
    """The words of an input, each once. Raises InvalidRequestError for too many or too long."""
    return tuple(dict.fromkeys(word for word in _texts(fields, name) if word))


def read_bad_words(fields: Fields, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences that must not come, each once. Raises InvalidRequestError."""
    sequences: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for word in read_words(fields, "bad_words"):
        ways = tokenizer.encode_word_everywhere(word)
        if not ways:
            raise InvalidRequestError(
                "bad_words", f"the model has no tokens for {shortened(word)!r}"
            )
        num_tokens += sum(len(way) for way in ways if way not in sequences)
        # Refused at once: the tokens of many long words take seconds in which nobody is let in.
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                "bad_words", f"at most {MAX_BAD_WORD_TOKENS} tokens together, got more"
            )
        sequences.update(dict.fromkeys(ways))
    return tuple(sequences)


def read_embedding_bias(fields: Fields, tokenizer: TextTokenizer) -> tuple[tuple[int, float], ...]:
    """(token id, value added to its logit), each id once, in order of ids. The n-th weight belongs
    to the n-th word. Raises InvalidRequestError."""
    words = _texts(fields, "embedding_bias_words")
    _check_count(fields, "embedding_bias_weights")
    weights = fields.numbers("embedding_bias_weights")
    if not any(words):
        if any(weights):
            raise InvalidRequestError("embedding_bias_weights", "needs embedding_bias_words")
        return ()
    if not weights:
        raise InvalidRequestError("embedding_bias_words", "needs embedding_bias_weights")
    if len(words) != len(weights):
        raise InvalidRequestError(
            "embedding_bias_weights",
            f"{len(weights)} weights for {len(words)} embedding_bias_words",
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        check_number("embedding_bias_weights", weight, -MAX_BIAS, MAX_BIAS)
        token_ids = tokenizer.encode_word(word)
        if word and not token_ids:
            message = f"the model has no tokens for {shortened(word)!r}"
            raise InvalidRequestError("embedding_bias_words", message)
        for token_id in token_ids:
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return tuple(sorted((token_id, value) for token_id, value in bias.items() if value))


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    """The words as they were sent, empty ones too. Raises InvalidRequestError."""
    _check_count(fields, name)
    words = fields.texts(name)
    for word in words:
        if len(word) > MAX_WORD_CHARACTERS:
            raise InvalidRequestError(
                name, f"at most {MAX_WORD_CHARACTERS} characters each, got {len(word)}"
            )
    return words


def _check_count(fields: Fields, name: str) -> None:
    """Before the elements are read: of a list of millions, that takes seconds."""
    if fields.size(name) > MAX_WORDS:
        raise InvalidRequestError(name, f"at most {MAX_WORDS}, got {fields.size(name)}")
