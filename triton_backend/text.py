"""Text in and out: tokenizer, incremental detokenizer.

Owns the tokenizer of a checkpoint folder and one detokenizer per stream. Invariants: the joined
deltas of a stream equal the decoding of all its tokens at once (special tokens left out), whatever
was pushed together; no delta ends inside a character; a detokenizer lives as long as its stream and
never restarts, also not over a pause. stream=false goes through the same detokenizer, so both modes
give the same text.

Tokens are turned into their bytes and the bytes decoded incrementally as UTF-8. That is exact where
decoding windows of tokens is not: an incomplete character is told from a genuine U+FFFD, and a bad
byte neither blocks nor damages what follows. One replacement character stands for each maximal
invalid part. (The tokenizers library replaces every byte of a run of byte tokens as soon as one of
them is invalid, also those of characters that were complete and long sent; here they stay.)
Tokenizers whose tokens are not bytes fall back on the library's own DecodeStream.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokenflow.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONFIG_FILES = ("generation_config.json", "config.json")
_BEFORE_A_WORD = ("\n", "(", "~")
"""Texts whose tokens stay what they are whatever word follows, in most vocabularies."""
_NUM_BEFORE = 8
"""Tokens that show a decoder that a text has begun, special ones among them."""


class Detokenizer(Protocol):
    """One stream's way from token ids to text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD, as in a full decode."""
        ...


class TextTokenizer:
    """tokenizer.json of a checkpoint, with its end tokens.

    eos_token_ids: ids that end a generation, from generation_config.json, else config.json, else
    the eos_token of tokenizer_config.json; the first is the main one; empty if none is declared.
    max_token_bytes: length of the longest token's text; a prompt of n bytes has at least
    n / max_token_bytes tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.max_token_bytes = max(len(token.encode()) for token in vocab)
        self._token_bytes = make_token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {t.content: id for id, t in added.items() if t.special}
        self._begin_token = _begin_token(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """From a checkpoint folder. Raises ConfigError("tokenizer_dir", ...)."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("tokenizer_dir", f"{file} does not exist")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError("tokenizer_dir", f"{file}: {error}") from error
        # What it was trained with may be in the file, and would cut prompts short or fill them up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, read_eos_token_ids(folder, tokenizer))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt. Special tokens (BOS) are added as the tokenizer declares, unless
        the text starts with the same one already, as the output of a chat template does."""
        has_begun = bool(self._begin_token) and text.startswith(self._begin_token)
        return tuple(self._tokenizer.encode(text, add_special_tokens=not has_begun).ids)

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Token ids of a text by itself, without what the tokenizer adds to a prompt; empty if the
        vocabulary cannot write it. A special token that is named in it stands for its id."""
        return self._if_it_says(word, self._encode_plain(word))

    def encode_word_everywhere(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Every way in which the tokenizer begins a word: at the start of a text, right after
        something else, after a space; without those that end with another one. A word that begins
        with a space already gets no second one. Special tokens have no beginnings: a word that
        names one is as `encode_word` says. Empty if the vocabulary cannot write the word."""
        ways = [self.encode_word(word)]
        if not self._names_special(word):
            ways.append(self._encode_after_other_text(word))
            if not word[0].isspace():
                spaced = self._encode_after_other_text(" " + word)
                ways.append(spaced or self.encode_word(" " + word))
        ways = [way for way in dict.fromkeys(ways) if way]
        return tuple(way for way in ways if not any(way[i:] in ways for i in range(1, len(way))))

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_after_other_text(self, text: str) -> tuple[int, ...]:
        """Its tokens in the middle of a text, where a tokenizer adds no space in front of it as it
        may at the start; empty if it melts with what stands before it."""
        for other in _BEFORE_A_WORD:
            before, both = self._encode_plain(other), self._encode_plain(other + text)
            if both[: len(before)] == before:
                return self._if_it_says(text, both[len(before) :])
        return ()

    def _if_it_says(self, text: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids, if they are that text but for spaces; else some character is not in the
        vocabulary, and what is left of the text is another one."""
        if self._names_special(text):
            return token_ids
        normalizer = self._tokenizer.normalizer
        meant = text if normalizer is None else normalizer.normalize_str(text)
        same = _without_spaces(meant) == _without_spaces(self.decode(token_ids))
        return token_ids if same else ()

    def _names_special(self, text: str) -> bool:
        return any(special in text for special in self._special_ids)

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token that is written so; its text never appears in an output."""
        return self._special_ids.get(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one stream. before: the text's tokens so far, when the stream's
        is shown behind them: then it keeps the space with which it begins."""
        if self._token_bytes is None:
            return WindowDetokenizer(self._tokenizer, before[-_NUM_BEFORE:])
        return ByteDetokenizer(self._token_bytes, at_start=not before)


def _begin_token(tokenizer: Tokenizer) -> str:
    """The first token that the tokenizer puts in front of a prompt (BOS); empty for none."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    if not encoding.special_tokens_mask or not encoding.special_tokens_mask[0]:
        return ""
    token: str = encoding.tokens[0]
    return token


class TokenBytes:
    """Bytes of each token of a byte-level or byte-fallback vocabulary, looked up on first use.

    num_leading_spaces: spaces that the decoder strips at the very start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, replacements: dict[str, str] | None, strip: int):
        self._tokenizer = tokenizer
        self._replacements = replacements
        self._cache: dict[int, bytes] = {
            token_id: b""
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.num_leading_spaces = strip

    def __getitem__(self, token_id: int) -> bytes:
        """Special and unknown ids have no text."""
        value = self._cache.get(token_id)
        if value is None:
            token = self._tokenizer.id_to_token(token_id)
            value = b"" if token is None else self._convert(token)
            self._cache[token_id] = value
        return value

    def _convert(self, token: str) -> bytes:
        if self._replacements is None:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token written as plain text
                return token.encode()
        for pattern, content in self._replacements.items():
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match.group(1), 16)]) if match else token.encode()


class ByteDetokenizer:
    """Detokenizer over `TokenBytes`: exact, with at most three bytes held back."""

    def __init__(self, token_bytes: TokenBytes, *, at_start: bool = True) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_to_strip = token_bytes.num_leading_spaces if at_start else 0

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join([self._token_bytes[token_id] for token_id in token_ids])
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


class WindowDetokenizer:
    """Detokenizer over the library's DecodeStream, for vocabularies whose tokens are not bytes."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []
        self.push(before)
        self._pending.clear()

    def push(self, token_ids: Iterable[int]) -> str:
        parts = []
        for token_id in token_ids:
            self._pending.append(token_id)
            part = self._step(token_id)
            if part is not None:
                parts.append(part)
                self._pending.clear()
        return "".join(parts)

    def _step(self, token_id: int) -> str | None:
        """The library raises a bare Exception when a bad byte spoils the characters before it in a
        run of byte tokens. They are sent already, so the rest is decoded by itself."""
        try:
            part: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=True)
            parts = [self._stream.step(self._tokenizer, pending) for pending in self._pending]
            part = "".join(filter(None, parts))
        return part

    def flush(self) -> str:
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        return text


def make_token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The byte table for the tokenizer's decoder, or None where tokens do not map to bytes."""
    steps = _decoder_steps(json.loads(tokenizer.to_str()).get("decoder"))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(tokenizer, None, 0)
    if "ByteFallback" not in kinds:
        return None
    replacements: dict[str, str] = {}
    strip = 0
    for index, step in enumerate(steps):
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            replacements[step["pattern"]["String"]] = step["content"]
        elif kind == "Strip" and _strips_text_start(step) and "Fuse" in kinds[:index]:
            strip = int(step["start"])
        elif kind not in ("ByteFallback", "Fuse"):
            return None
    return TokenBytes(tokenizer, replacements, strip)


def read_eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a generation. Raises ConfigError for a malformed file."""
    for name in _CONFIG_FILES:
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    token_id = tokenizer.token_to_id(content) if content else None
    return () if token_id is None else (token_id,)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _decoder_steps(step)]
    return [decoder]


def _strips_text_start(step: dict[str, Any]) -> bool:
    return step["content"] == " " and int(step.get("stop", 0)) == 0


def _without_spaces(text: str) -> str:
    """Spaces are what tokenizers add and take away; some write them as ▁."""
    return "".join(text.replace("▁", " ").split())


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("tokenizer_dir", f"{file}: {error}") from error
    return value if isinstance(value, dict) else {}


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level vocabularies write a printable Latin-1 byte as itself and the n-th other byte as
    the character 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _bytes_of_characters()
