"""Bad words and biased words as token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.triton.fakes import EOS, byte_level_tokenizer
from tests.triton.parsing import parse, tensor
from tests.triton.vocabularies import byte_level_bpe, legacy_metaspace_bpe, metaspace_bpe
from tokenflow.errors import InvalidRequestError
from triton_backend.text import TextTokenizer

BYTE_LEVEL, METASPACE, LEGACY = byte_level_bpe(), metaspace_bpe(), legacy_metaspace_bpe()
VOCABULARIES = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, METASPACE, LEGACY], ids=["byte-level", "metaspace", "legacy"]
)


def is_banned(sequences: tuple[tuple[int, ...], ...], output: list[int]) -> bool:
    """Whether an engine that keeps `sequences` out could have said `output`."""
    return any(
        output[end - len(sequence) : end] == list(sequence)
        for sequence in sequences
        for end in range(len(sequence), len(output) + 1)
    )


@VOCABULARIES
@pytest.mark.parametrize("word", ["London", "New York"])
@pytest.mark.parametrize(
    "text", ["{}", "I like {}", "I like {}.", "\n{}", "({})", "x{}", "the end\n{} and"]
)
def test_a_bad_word_is_banned_however_it_begins(
    tokenizer: TextTokenizer, word: str, text: str
) -> None:
    sequences = parse(tokenizer=tokenizer, bad_words=word).generate.bad_words
    output = list(tokenizer._tokenizer.encode(text.format(word), add_special_tokens=False).ids)
    assert is_banned(sequences, output)


@VOCABULARIES
def test_a_phrase_bans_its_last_word_after_the_others_only(tokenizer: TextTokenizer) -> None:
    sequences = parse(tokenizer=tokenizer, bad_words=["New York"]).generate.bad_words
    assert all(len(sequence) > 1 for sequence in sequences)
    for text in ("York", "and York", "New London", "York New"):
        output = list(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)
        assert not is_banned(sequences, output), text


def test_a_leading_space_that_is_asked_for_is_the_only_beginning() -> None:
    (sequence,) = parse(tokenizer=BYTE_LEVEL, bad_words=" London").generate.bad_words
    assert [BYTE_LEVEL._tokenizer.id_to_token(token_id) for token_id in sequence] == ["ĠLondon"]


def test_bos_is_no_part_of_a_word() -> None:
    tokenizer = byte_level_bpe()
    bos = tokenizer.special_token_id("<bos>")
    assert bos is not None
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    request = parse(
        tokenizer=tokenizer, bad_words="London", embedding_bias_words="York",
        embedding_bias_weights=1.0,
    ).generate  # fmt: skip
    assert request.input_token_ids[0] == bos
    assert request.bad_words == parse(tokenizer=BYTE_LEVEL, bad_words="London").generate.bad_words
    assert bos not in {token_id for token_id, _ in request.embedding_bias}


def test_special_tokens_are_banned_by_their_id() -> None:
    tokenizer = byte_level_tokenizer(special=["[END]"])
    request = parse(tokenizer=tokenizer, bad_words=["[END]", "a<eos>"]).generate
    assert request.bad_words == ((EOS + 1,), (ord("a"), EOS))


def test_words_and_ways_come_once_and_empty_ones_mean_none() -> None:
    request = parse(bad_words=["ab", "", "ab", "b"]).generate
    assert request.bad_words == (tuple(b"ab"), tuple(b"b"))
    for none in ("", [], ["", ""]):
        assert parse(bad_words=none).generate.bad_words == ()
    assert parse().generate.bad_words == ()


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_too_many_words_are_refused_unread(name: str) -> None:
    """Empty ones count, and none of them is looked at."""
    parse(**{name: [""] * 64})
    unreadable = np.full((1, 65), object(), dtype=np.object_)
    for words in ([""] * 65, unreadable):
        with pytest.raises(InvalidRequestError, match=f"^{name}: at most 64, got 65"):
            parse(**{name: words})


@pytest.mark.parametrize("name", ["bad_words", "embedding_bias_words"])
def test_a_word_that_the_model_cannot_write_is_named(name: str) -> None:
    """Without its `é` it would be another word: an `a`, or no more than a space."""
    weight = {"embedding_bias_weights": 1.0} if name == "embedding_bias_words" else {}
    for word in ("é", "aé"):
        with pytest.raises(
            InvalidRequestError, match=f"^{name}: the model has no tokens for '{word}'"
        ):
            parse(tokenizer=METASPACE, **{name: word}, **weight)


def test_biases_by_token_add_up() -> None:
    words, weights = ["ab", "", "bb"], [1.5, 7.0, -0.25]
    request = parse(embedding_bias_words=words, embedding_bias_weights=weights).generate
    assert request.embedding_bias == ((ord("a"), 1.5), (ord("b"), 1.0))
    request = parse(embedding_bias_words=["a", "a"], embedding_bias_weights=[1.0, -1.0]).generate
    assert request.embedding_bias == ()


@pytest.mark.parametrize(
    ("words", "weights", "field"),
    [
        (["a", "b"], [1.0], "embedding_bias_weights: 1 weights for 2 embedding_bias_words"),
        (["a"], [1.0, 2.0], "embedding_bias_weights: 2 weights for 1 embedding_bias_words"),
        (["a"], None, "embedding_bias_words: needs embedding_bias_weights"),
        (None, [1.0], "embedding_bias_weights: needs embedding_bias_words"),
        (["a"], [float("nan")], "embedding_bias_weights: must hold finite numbers"),
        (["a"], [-2e6], "embedding_bias_weights: must be in"),
        (["a"] * 65, [1.0] * 65, "embedding_bias_words: at most 64"),
        ([""] * 65, None, "embedding_bias_words: at most 64"),
        (["a"], [1.0] * 65, "embedding_bias_weights: at most 64"),
        (["a" * 1025], [1.0], "embedding_bias_words: at most 1024 characters"),
    ],
)
def test_words_and_weights_go_together(words: Any, weights: Any, field: str) -> None:
    inputs = {"embedding_bias_words": words, "embedding_bias_weights": weights}
    given_inputs = {name: tensor(value) for name, value in inputs.items() if value is not None}
    with pytest.raises(InvalidRequestError) as caught:
        parse(**given_inputs)
    assert str(caught.value).startswith(field)


_PARTS = st.sampled_from(["London", "New", "York", "x", ".", "and", " ", "\n", "(", "Lon", "don"])


@given(st.lists(_PARTS, max_size=8))
@settings(max_examples=150, deadline=None)
def test_texts_without_the_word_are_not_banned(parts: list[str]) -> None:
    text = "".join(parts)
    for tokenizer in (BYTE_LEVEL, METASPACE, LEGACY):
        for word in ("London", "New York"):
            sequences = parse(tokenizer=tokenizer, bad_words=word).generate.bad_words
            output = list(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)
            assert word in text or not is_banned(sequences, output)
