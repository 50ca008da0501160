"""Which tokens must not come next, for one sequence: what bad words, n-grams and min_tokens mean.

Owns the definition. The scripted runner asks it directly; the sampler does the same for a whole
batch at once (`batched_bans`). Pure; a result depends on the request, its whole sequence (prompt
included, so it does not change when the output so far becomes part of a prompt) and num_generated,
which only min_tokens looks at.

- bad_words: the last token of a word is banned while the tokens before it are the end of the
  sequence; a word of one token is banned always. As in TensorRT-LLM, except that its kernel skips
  words that end with token 0.
- no_repeat_ngram_size n, as in TensorRT-LLM: a token is banned if, with the n - 1 tokens before it,
  it would make an n-gram that the sequence holds already; n = 1 bans every token of the sequence.
- min_tokens: the end token is banned while fewer tokens than that were generated.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from tokenflow.executor.api import Request


def has_bans(request: Request) -> bool:
    """False if no token of the request can ever be banned."""
    sampling = request.sampling_config
    return bool(request.bad_words or sampling.no_repeat_ngram_size or sampling.min_tokens)


def banned_token_ids(request: Request, token_ids: Sequence[int], num_generated: int) -> set[int]:
    """Tokens that must not follow `token_ids`, the whole sequence of at least one token.

    num_generated: tokens generated since the enqueue.
    """
    sampling = request.sampling_config
    sequence = tuple(token_ids)
    banned = {word[-1] for word in request.bad_words if _ends_with(sequence, word[:-1])}
    size = sampling.no_repeat_ngram_size or 0
    if size:
        start = sequence[len(sequence) - size + 1 :]
        for i in range(len(sequence) - size + 1):
            if sequence[i : i + size - 1] == start:
                banned.add(sequence[i + size - 1])
    if request.end_id is not None and num_generated < (sampling.min_tokens or 0):
        banned.add(request.end_id)
    return banned


def next_allowed(token_id: int, banned: Container[int], vocab_size: int) -> int:
    """The first of token_id, token_id + 1, … (modulo the vocabulary) that is not banned; token_id
    itself if all are."""
    candidates = ((token_id + i) % vocab_size for i in range(vocab_size))
    return next((token for token in candidates if token not in banned), token_id)


def _ends_with(sequence: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return not end or sequence[-len(end) :] == end
