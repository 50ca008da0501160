"""The fixed workload, with a tokenizer simple enough to count by hand."""

from __future__ import annotations

import re

import pytest

from perf import workloads
from perf.workloads import DEMO_ENGINE, NEWCOMER, READER, cut, demo_workload


class WordTokenizer:
    """A token per word with its leading space, or per other character."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in re.findall(r" ?\w+|.", text, re.DOTALL):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)


class MergingTokenizer(WordTokenizer):
    """One that needs more tokens for a text that ends inside a word of its own."""

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return [*ids, ids[-1]] if text.endswith("two") else ids


@pytest.fixture(scope="module")
def requests() -> list[workloads.ClientRequest]:
    return demo_workload(WordTokenizer())


def test_the_same_seed_gives_the_same_workload(requests) -> None:
    assert demo_workload(WordTokenizer()) == requests
    assert demo_workload(WordTokenizer(), seed=1) != requests


def test_readers_and_newcomers_are_as_documented(requests) -> None:
    readers = [r for r in requests if r.kind == READER]
    newcomers = [r for r in requests if r.kind == NEWCOMER]
    assert (len(readers), len(newcomers)) == (8, 16)
    assert [r.send_offset_s for r in readers] == pytest.approx([0.3 * i for i in range(8)])
    assert all(60 <= r.num_prompt_tokens <= 140 for r in readers)
    assert all(320 <= r.max_tokens <= 400 for r in readers)
    assert all(30 <= r.num_prompt_tokens <= 60 for r in newcomers)
    assert all(40 <= r.max_tokens <= 60 for r in newcomers)
    assert all(10 <= r.send_offset_s <= 11 for r in newcomers)
    assert all(r.read_rate == 4 for r in requests)
    assert [r.send_offset_s for r in requests] == sorted(r.send_offset_s for r in requests)
    assert len({r.request_id for r in requests}) == len({r.prompt for r in requests}) == 24
    assert workloads.total_read_rate(requests) == 96


def test_it_is_the_slots_that_are_short(requests) -> None:
    tokens_per_block = int(DEMO_ENGINE["tokens_per_block"])
    pool = int(DEMO_ENGINE["max_tokens_in_paged_kv_cache"]) // tokens_per_block
    readers = [r for r in requests if r.kind == READER]
    assert len(readers) == int(DEMO_ENGINE["max_batch_size"])
    assert pool == 128
    assert sum(r.num_blocks(tokens_per_block) for r in readers) <= pool


def test_cut_keeps_to_the_length_after_tokenizing_again() -> None:
    assert cut(WordTokenizer(), "one two three four", 3) == "one two three"
    assert cut(WordTokenizer(), "one two", 9) == "one two"
    assert cut(MergingTokenizer(), "one two three four", 2) == "one"
    with pytest.raises(ValueError, match="num_tokens"):
        cut(WordTokenizer(), "one", 0)


@pytest.mark.parametrize(("load", "word"), [(0.5, ""), (0.85, "high"), (1.2, "must wait")])
def test_a_high_load_is_said(load: float, word: str) -> None:
    text = workloads.describe_load(load)
    assert text.startswith(f"{load:.2f}")
    assert word in text
    assert (len(text) > 4) == bool(word)
