"""How much is asked of a built engine: lengths, pools, prompts.

Everything follows from what the engine was built for, so that the same sections run on a model of
billions of parameters and on a small one. Pure but for the tokenizer's file.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.trtllm_suite.values import Settings, SuiteError
from tokenflow.executor.trtllm_engine import BuiltEngine

_PERIOD = 23  # a prime: no block repeats another
_MIN_BLOCKS = 6
_MAX_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths in tokens, of the sections that share an engine.

    seq_len: of the longest request, prompt and output. prompt_lens: less than a block, whole
    blocks, and more than one chunk of context. output_len: of each.
    num_pool_tokens: device pool, of a few sequences. num_host_bytes: twice that on the host.
    """

    tokens_per_block: int
    seq_len: int
    prompt_lens: tuple[int, int, int]
    output_len: int
    num_pool_tokens: int
    num_host_bytes: int
    max_batch_size: int
    max_num_tokens: int

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the device pool."""
        return self.num_pool_tokens // self.tokens_per_block

    def parameters(self) -> dict[str, str]:
        """Of the server's, for the engine that the sections share."""
        return {
            "max_batch_size": str(self.max_batch_size),
            "max_num_tokens": str(self.max_num_tokens),
            "max_tokens_in_paged_kv_cache": str(self.num_pool_tokens),
            "kv_cache_host_memory_bytes": str(self.num_host_bytes),
        }


def fit_shape(built: BuiltEngine, settings: Settings) -> Shape:
    """What fits the engine. Raises SuiteError for one that is too short."""
    size = built.tokens_per_block
    num_blocks = min(8 if settings.is_short else 16, built.max_seq_len // size)
    if num_blocks < _MIN_BLOCKS:
        raise SuiteError(
            f"the engine's max_seq_len is {built.max_seq_len}; the sections need "
            f"{_MIN_BLOCKS} blocks of {size} tokens"
        )
    output_len = num_blocks // 2 * size - 1
    num_pool_blocks = _MAX_SEQUENCES * num_blocks
    return Shape(
        tokens_per_block=size,
        seq_len=num_blocks * size,
        prompt_lens=(size // 2 + 1, 2 * size, (num_blocks - num_blocks // 2) * size),
        output_len=output_len,
        num_pool_tokens=num_pool_blocks * size,
        num_host_bytes=2 * num_pool_blocks * built.block_bytes,
        max_batch_size=min(8, built.max_batch_size),
        # Prompts of more than two blocks are computed in several chunks.
        max_num_tokens=min(max(16, 2 * size), built.max_num_tokens),
    )


class Prompts:
    """Prompts of given lengths, each another one. english: token ids of text to cut from; without
    it, a prompt repeats a few random tokens, which most models go on with confidently.

    vocab_size: of the engine; the first ids are left out, special tokens often lie there.
    """

    def __init__(self, vocab_size: int, english: Sequence[int] = (), seed: int = 7) -> None:
        self._low = min(300, vocab_size // 4)
        self._high = max(self._low + 1, vocab_size * 3 // 4)
        self._english = tuple(english)
        self._rng = random.Random(seed)

    @property
    def are_english(self) -> bool:
        """Text or tokens without meaning."""
        return bool(self._english)

    def make(self, num_tokens: int) -> tuple[int, ...]:
        """A prompt of that length that begins like no other one."""
        if self._english:
            start = self._rng.randrange(len(self._english))
            text = (self._english * (2 + num_tokens // len(self._english)))[start:]
            return text[:num_tokens]
        pattern = [self._rng.randrange(self._low, self._high) for _ in range(_PERIOD)]
        return tuple(pattern[i % _PERIOD] for i in range(num_tokens))


def make_prompts(built: BuiltEngine, tokenizer: Path | None) -> Prompts:
    """Prompts for the engine, of the tokenizer's tokens where there is one. Raises SuiteError for a
    tokenizer that cannot be read, or is another model's."""
    if tokenizer is None:
        return Prompts(built.vocab_size)
    ids = _english_ids(tokenizer)
    if max(ids) >= built.vocab_size:
        raise SuiteError(f"{tokenizer} makes token {max(ids)}, the engine has {built.vocab_size}")
    return Prompts(built.vocab_size, ids)


def _english_ids(folder: Path) -> list[int]:
    from perf.prompts import QUESTIONS, READER_OPENINGS

    try:
        from tokenizers import Tokenizer

        made: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise SuiteError(f"no tokenizer in {folder}: {error}") from error
    return list(made.encode(" ".join((*READER_OPENINGS, *QUESTIONS)), add_special_tokens=False).ids)
