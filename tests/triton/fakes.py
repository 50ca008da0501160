"""Fakes at the seams of the Triton part, and small tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenflow.holds import HoldRefusal, HoldReply
from tokenflow.types import EndReason, GenerateRequest, TokenEvent, Usage
from triton_backend.responses import Array
from triton_backend.stream import ErrorCode
from triton_backend.text import TextTokenizer

EOS = 256


def byte_level_tokenizer(
    extra: Sequence[str] = (), *, special: Sequence[str] = (), num_eos: int = 1
) -> TextTokenizer:
    """Ids 0..255 are the bytes of that value; then `<eos>` (special), then `extra` texts, then
    `special` ones. num_eos: how many special tokens end a generation by themselves."""
    alphabet = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    vocab["<eos>"] = EOS
    for index, text in enumerate(extra):
        vocab["".join(alphabet[byte] for byte in text.encode())] = EOS + 1 + index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *special])
    eos_token_ids = tuple(tokenizer.token_to_id(text) for text in ("<eos>", *special)[:num_eos])
    return TextTokenizer(tokenizer, eos_token_ids)


def sentencepiece_tokenizer(pieces: Sequence[str]) -> TextTokenizer:
    """Llama-like: ids 0..255 are byte tokens, then `pieces` (▁ for a leading space)."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({piece: 256 + index for index, piece in enumerate(pieces)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return TextTokenizer(tokenizer)


def _byte_characters() -> list[str]:
    """The library's character for each byte: itself, or for the n-th unprintable one 256 + n."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(character for character in alphabet if ord(character) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


def event(
    handle: int,
    token_ids: Sequence[int] = (),
    *,
    end: EndReason | None = None,
    error: str | None = None,
    retryable: bool = False,
    log_probs: Sequence[float] = (),
) -> TokenEvent:
    usage = Usage(num_input_tokens=1, num_output_tokens=0) if end else None
    return TokenEvent(
        handle=handle,
        request_id="",
        token_ids=tuple(token_ids),
        log_probs=tuple(log_probs),
        end=end,
        error=error,
        retryable=retryable,
        usage=usage,
    )


@dataclass(eq=False)
class FakeChannel:
    """Records what the client would get; `fail_sends` makes every send raise."""

    sent: list[dict[str, object]] = field(default_factory=list)
    errors: list[tuple[str, ErrorCode]] = field(default_factory=list)
    num_finals: int = 0
    cancelled: bool = False
    fail_sends: bool = False
    num_polls: int = 0

    def send(self, outputs: Sequence[tuple[str, Array]], *, final: bool) -> None:
        self._use(final)
        self.sent.append({name: _plain(array) for name, array in outputs})

    def fail(self, message: str, code: ErrorCode) -> None:
        self._use(True)
        self.errors.append((message, code))

    def close(self) -> None:
        self.num_finals += 1

    def is_cancelled(self) -> bool:
        self.num_polls += 1
        return self.cancelled

    @property
    def text(self) -> str:
        return "".join(str(response.get("text_output", "")) for response in self.sent)

    def _use(self, final: bool) -> None:
        if self.fail_sends:
            raise RuntimeError("broken pipe")
        assert self.num_finals == 0, "used after FINAL"
        self.num_finals += final


def _plain(array: Array) -> object:
    assert array.shape[:2] == (1, 1)
    if array.ndim == 3:
        return array.reshape(-1).tolist()
    value = array[0, 0]
    return value.decode() if isinstance(value, bytes) else np.asarray(value).item()


@dataclass
class FakeRuntime:
    """Records what is asked of it; `error` makes submit raise, a request with `unpausable`
    max_tokens can never be paused, and a pause is refused with `refusal`, or waits in `undecided`
    where `decides` is False."""

    submitted: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    num_invalid: int = 0
    refusal: HoldRefusal | None = None
    decides: bool = True
    undecided: list[HoldReply] = field(default_factory=list)
    error: Exception | None = None
    unpausable: int | None = None

    def start(self) -> None:
        pass

    def submit(self, request: GenerateRequest) -> int:
        if self.error is not None:
            raise self.error
        self.submitted.append(request)
        return len(self.submitted)

    def count_invalid(self) -> None:
        self.num_invalid += 1

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)

    def finish(self, handle: int) -> None:
        self.finished.append(handle)

    def acknowledge(self, handle: int, num_consumed: int) -> None:
        self.acknowledged.append((handle, num_consumed))

    def pause_all(self, handles: Sequence[int], reply: HoldReply) -> None:
        if not self.decides:
            self.undecided.append(reply)
            return
        if self.refusal is None:
            self.paused.extend(handles)
        reply(self.refusal)

    def resume(self, handle: int) -> None:
        self.resumed.append(handle)

    def unpausable_reason(self, request: GenerateRequest) -> str | None:
        return "a kind" if request.max_tokens == self.unpausable else None

    def shutdown(self, timeout_s: float) -> None:
        pass
