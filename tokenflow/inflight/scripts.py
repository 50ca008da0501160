"""Scripts for the scripted runner: what comes after a history.

A script is a pure function `script(history) -> (token_id, log_prob)` of all tokens so far, prompt
included. It cannot tell a resumed request from one that ran through, which makes it the oracle of
pause and resume: `expected` says what any engine on that script must produce. Log-probs are exact
binary fractions, so sums are exact in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from tokenflow.errors import ConfigError

Script = Callable[[tuple[int, ...]], tuple[int, float]]


def counting(vocab_size: int) -> Script:
    """The last token plus one (modulo the vocabulary): a prompt that ends with 0 gives 1 2 3 …"""

    def script(history: tuple[int, ...]) -> tuple[int, float]:
        token_id = (history[-1] + 1) % vocab_size
        return token_id, _log_prob(token_id)

    return script


def pseudo_random(vocab_size: int, seed: int = 0) -> Script:
    """A hash of the whole history: any wrong, missing or swapped token changes all that follow."""

    def script(history: tuple[int, ...]) -> tuple[int, float]:
        digest = hashlib.blake2b(repr((seed, history)).encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        return value % vocab_size, _log_prob(value >> 32)

    return script


def echo(num_tokens: int) -> Script:
    """Repeats its last `num_tokens` tokens again and again; with a prompt of that length the output
    is the prompt. A shorter history repeats as a whole."""

    def script(history: tuple[int, ...]) -> tuple[int, float]:
        token_id = history[-num_tokens] if len(history) >= num_tokens else history[0]
        return token_id, _log_prob(token_id)

    return script


def fixed(token_ids: Sequence[int], num_prompt_tokens: int, then: int) -> Script:
    """`token_ids` after a prompt of `num_prompt_tokens` tokens, and `then` for ever after."""
    tokens = tuple(token_ids)

    def script(history: tuple[int, ...]) -> tuple[int, float]:
        index = len(history) - num_prompt_tokens
        token_id = tokens[index] if 0 <= index < len(tokens) else then
        return token_id, _log_prob(token_id)

    return script


_BY_NAME: dict[str, Callable[[int], Script]] = {
    "counting": counting,
    "pseudo_random": pseudo_random,
    "echo": lambda vocab_size: echo(8),
}


def script_by_name(name: str, vocab_size: int) -> Script:
    """`counting`, `pseudo_random` or `echo` (of the last 8 tokens). Raises ConfigError."""
    if name not in _BY_NAME:
        raise ConfigError("script", f"must be one of {tuple(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name](vocab_size)


def expected(
    script: Script, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The first `num_tokens` tokens after `prompt` and their log-probs."""
    history = tuple(prompt)
    log_probs: list[float] = []
    for _ in range(num_tokens):
        token_id, log_prob = script(history)
        history += (token_id,)
        log_probs.append(log_prob)
    return list(history[len(prompt) :]), log_probs


def _log_prob(value: int) -> float:
    return -(value % 64 + 1) / 32
