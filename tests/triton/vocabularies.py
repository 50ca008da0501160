"""Small vocabularies that were really learned, one of each way to write a leading space."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from triton_backend.text import TextTokenizer

_NUM_TIMES = 8
_CORPUS = ["London and New York and York and London in New London"] * _NUM_TIMES
_IN_OTHER_WORDS = [f"{letter}London {letter}New {letter}York" for letter in "bcdefghi"]
"""Makes tokens without a leading space, and none of the whole."""


def byte_level_bpe() -> TextTokenizer:
    """As of GPT-2: `London` and `ĠLondon`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _learned(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def metaspace_bpe() -> TextTokenizer:
    """As of SentencePiece: `▁London`, also at the start of a text; `London` within a word only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = _sentencepiece_decoder()
    return _learned(tokenizer, ["\n", "(", ")", ".", "x", "k"])


def legacy_metaspace_bpe() -> TextTokenizer:
    """As of older SentencePiece conversions: a normalizer writes the ▁."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = _sentencepiece_decoder()
    return _learned(tokenizer, ["\n", "(", ")", ".", "x", "k"])


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )


def _learned(tokenizer: Tokenizer, alphabet: list[str]) -> TextTokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=_NUM_TIMES,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_CORPUS, *_IN_OTHER_WORDS], trainer)
    return TextTokenizer(tokenizer)
