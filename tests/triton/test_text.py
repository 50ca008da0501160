"""Incremental detokenizing, stop strings, tokenizer loading."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.triton.fakes import EOS, byte_level_tokenizer, sentencepiece_tokenizer
from tests.triton.vocabularies import byte_level_bpe, legacy_metaspace_bpe, metaspace_bpe
from tokenflow.errors import ConfigError
from triton_backend.stop_strings import StopStrings
from triton_backend.text import TextTokenizer, WindowDetokenizer

BYTE_LEVEL = byte_level_tokenizer(["Hi ", " the", " end", "�", "😀", "第"])
PIECES = ("▁What", "▁is", "▁deep", "▁learning", "ing", "▁", "é")
LLAMA = sentencepiece_tokenizer(PIECES)


def deltas(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def byte_tokens(*parts: bytes | str) -> list[list[int]]:
    """One token per part of more than one byte where the vocabulary has it, else its bytes."""
    result = []
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        result.append(list(data))
    return result


def push_parts(tokenizer: TextTokenizer, parts: list[list[int]]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"Hi ", b"\xf0\x9f", b"\x98\x80", b"!"], ["Hi ", "", "😀", "!", ""]),
        ([b"\xe7\xac", b"\xac", b"\xe4\xba\x94"], ["", "第", "五", ""]),
        ([b"a", b"\xef\xbf\xbd", b"b"], ["a", "\ufffd", "b", ""]),
        ([b"\xff", b" the", b" end"], ["\ufffd", " the", " end", ""]),
        ([b" Hello", b"!", b" "], [" Hello", "!", " ", ""]),
        ([b"a", b"\xe4\xba"], ["a", "", "\ufffd"]),
    ],
)
def test_characters_are_never_cut(parts: list[bytes], expected: list[str]) -> None:
    assert push_parts(BYTE_LEVEL, byte_tokens(*parts)) == expected


def test_ascii_is_released_with_its_own_token() -> None:
    token_ids = list(b"antidisestablishment")
    assert all(deltas(BYTE_LEVEL, token_ids)[:-1])


def test_sentencepiece_keeps_spaces_but_the_first() -> None:
    token_ids = [256 + PIECES.index(p) for p in ("▁What", "▁is", "▁deep", "▁learning")]
    assert "".join(deltas(LLAMA, token_ids)) == "What is deep learning"


def test_invalid_byte_token_does_not_damage_complete_characters() -> None:
    assert "".join(deltas(LLAMA, [*"第".encode(), 0xFF, 256])) == "第\ufffd What"


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40))
@settings(max_examples=300, deadline=None)
def test_joined_deltas_equal_the_librarys_full_decode(token_ids: list[int]) -> None:
    reference = BYTE_LEVEL._tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = deltas(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == reference
    assert BYTE_LEVEL.decode(token_ids) == reference


@given(st.text(max_size=30), st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=200, deadline=None)
def test_text_survives_any_cutting_into_tokens(text: str, cuts: list[int]) -> None:
    data = text.encode()
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [list(data[a:b]) for a, b in itertools.pairwise(borders)]
    for tokenizer in (BYTE_LEVEL, LLAMA):
        pieces = push_parts(tokenizer, parts)
        expected = text[1:] if tokenizer is LLAMA and text.startswith(" ") else text
        assert "".join(pieces) == expected
        assert "".join(pieces).count("\ufffd") == expected.count("\ufffd")


@given(st.lists(st.integers(256, 256 + len(PIECES) - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_deltas_equal_the_full_decode(token_ids: list[int]) -> None:
    reference = LLAMA._tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(deltas(LLAMA, token_ids)) == reference


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert deltas(BYTE_LEVEL, [ord("a"), EOS, 10**6, ord("b")]) == ["a", "", "", "b", ""]


def test_a_bad_byte_does_no_harm_where_the_library_decodes() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = TextTokenizer(inner)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    token_ids = [*"😀".encode(), 0xFF, 256, *"é".encode(), 256]
    assert "".join(deltas(tokenizer, token_ids)) == "😀\ufffd theé the"
    assert tokenizer.detokenizer([*"😀".encode(), 0xFF, 256]).push([256]) == " the"


def test_vocabulary_without_bytes_uses_the_librarys_stream() -> None:
    inner = Tokenizer(models.WordPiece(vocab={"hel": 0, "##lo": 1, "you": 2}, unk_token="hel"))
    inner.decoder = decoders.WordPiece()
    tokenizer = TextTokenizer(inner)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert "".join(deltas(tokenizer, [0, 1, 2])) == "hello you"


def wordpiece() -> TextTokenizer:
    vocab = {"hel": 0, "##lo": 1, "you": 2, "me": 3, "[UNK]": 4}
    inner = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    return TextTokenizer(inner)


@pytest.mark.parametrize(
    ("tokenizer", "before", "whole"),
    [
        (metaspace_bpe(), "New London", "New London and York"),
        (legacy_metaspace_bpe(), "New London", "New London and York"),
        (byte_level_bpe(), "New London", "New London and York"),
        (wordpiece(), "you", "you hello me"),
        (wordpiece(), "you hel", "you hello me"),
    ],
)
def test_a_text_behind_another_keeps_its_leading_space(
    tokenizer: TextTokenizer, before: str, whole: str
) -> None:
    given, token_ids = tokenizer.encode(before), tokenizer.encode(whole)
    assert token_ids[: len(given)] == given
    detokenizer = tokenizer.detokenizer(given)
    assert before + detokenizer.push(token_ids[len(given) :]) + detokenizer.flush() == whole


def test_a_prompt_that_starts_with_its_bos_gets_no_second_one() -> None:
    """But one that starts with another special token, as a turn of a chat does, gets its first."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    inner = byte_level_tokenizer()._tokenizer
    inner.add_special_tokens([AddedToken("<turn>", special=True)])
    turn = inner.token_to_id("<turn>")
    assert TextTokenizer(inner).encode("<turn>hi") == (turn, *b"hi")
    inner.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer = TextTokenizer(inner)
    assert tokenizer.encode("hi") == tokenizer.encode("<eos>hi") == (EOS, *b"hi")
    assert tokenizer.encode("<turn>hi") == (EOS, turn, *b"hi")
    assert tokenizer.encode("") == (EOS,)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [256, 7]}}, (256, 7)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 256}}, (256,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}}, (256,)),
        ({"tokenizer_config.json": {"eos_token": "<nope>"}}, ()),
        ({}, ()),
    ],
)
def test_eos_ids_come_from_the_checkpoint(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    BYTE_LEVEL._tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert TextTokenizer.load(tmp_path).eos_token_ids == expected


def test_lengths_that_the_file_of_a_tokenizer_sets_are_not_those_of_prompts(tmp_path: Path) -> None:
    inner = byte_level_tokenizer()._tokenizer
    inner.enable_truncation(4)
    inner.enable_padding(length=6, pad_id=EOS)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.load(tmp_path)
    for text in ("hi", "a longer prompt"):
        assert tokenizer.encode(text) == tokenizer.encode_word(text) == tuple(text.encode())


def test_loading_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_dir: .*tokenizer\.json does not exist"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer_dir"):
        TextTokenizer.load(tmp_path)


def run_stops(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = []
    for part in parts:
        shown.append(watcher.push(part))
        if watcher.matched:
            return shown, watcher.matched
    shown.append(watcher.flush())
    return shown, None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "matched"),
    [
        (["UVWXYZ"], ["T", "UV", "W", "XY", "Z"], ["T", "", "", "", ""], "UVWXYZ"),
        ([";"], ["for i", "j;"], ["for i", "j"], ";"),
        (
            ["\nObservation:"],
            ["Action", "\n", "Obs", "ervation", ":"],
            ["Action", "", "", "", ""],
            "\nObservation:",
        ),
        (
            ["XXXXXXXXXX"],
            ["<think>", "a", "</think>", "b"],
            ["<think>", "a", "</think>", "b", ""],
            None,
        ),
        (["cd", "bcd"], ["a", "b", "cd"], ["a", "", ""], "bcd"),
        (["###END"], ["a", "##", "b", "c"], ["a", "", "##b", "c", ""], None),
        (["ab"], ["a"], ["", "a"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        ([], ["x", ""], ["x", "", ""], None),
    ],
)
def test_stop_strings(
    stops: list[str], parts: list[str], shown: list[str], matched: str | None
) -> None:
    assert run_stops(stops, parts) == (shown, matched)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_character_by_character(stops: list[str], parts: list[str]) -> None:
    text = "".join(parts)
    expected, match = text, None
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            match = max(hits, key=len)
            expected = text[: end - len(match)]
            break
    shown, matched = run_stops(stops, parts)
    assert ("".join(shown), matched) == (expected, match)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=10),
)
def test_only_a_live_prefix_is_held(stops: list[str], parts: list[str]) -> None:
    watcher = StopStrings(stops)
    text = shown = ""
    for part in parts:
        text += part
        shown += watcher.push(part)
        if watcher.matched:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
