"""Token events -> chunks -> tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton.fakes import byte_level_tokenizer, event, sentencepiece_tokenizer
from tokenflow.executor.api import OutputConfig
from tokenflow.types import EndReason, GenerateRequest, TokenEvent
from triton_backend.codec import TextRequest
from triton_backend.responses import OUTPUT_NAMES, encode_chunk, select_outputs
from triton_backend.stream import Chunk, ErrorCode, TextStream

TOKENIZER = byte_level_tokenizer()


def request(
    *,
    streaming: bool = True,
    stops: tuple[str, ...] = (),
    prefix: str = "",
    log_probs: bool = False,
    counts: bool = False,
) -> TextRequest:
    return TextRequest(
        generate=GenerateRequest(
            request_id="r",
            input_token_ids=(1, 2, 3),
            max_tokens=100,
            arrival_time=0.0,
            streaming=streaming,
            has_reader=streaming,
            output_config=OutputConfig(return_log_probs=log_probs),
        ),
        stop_strings=stops,
        prefix=prefix,
        return_num_input_tokens=counts,
        return_num_output_tokens=counts,
    )


def run(stream: TextStream, events: list[TokenEvent], batch: int = 1) -> list[Chunk]:
    chunks = []
    for start in range(0, len(events), batch):
        chunks += stream.push(events[start : start + batch])
        if chunks and chunks[-1].final:
            break
    return chunks


def text_events(text: bytes, end: EndReason = EndReason.LENGTH) -> list[TokenEvent]:
    events = [event(1, [byte], log_probs=[-0.5]) for byte in text]
    last = events[-1]
    events[-1] = event(1, last.token_ids, log_probs=[-0.5], end=end)
    return events


def test_one_chunk_per_event_with_final_on_the_last_token() -> None:
    chunks = run(TextStream(request(), TOKENIZER), text_events(b"abc"))
    assert [chunk.text for chunk in chunks] == ["a", "b", "c"]
    assert [chunk.token_index for chunk in chunks] == [0, 1, 2]
    assert [chunk.num_output_tokens for chunk in chunks] == [1, 1, 1]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert [chunk.finish_reason for chunk in chunks] == ["", "", "length"]


def test_tokens_without_text_are_counted() -> None:
    chunks = run(TextStream(request(), TOKENIZER), text_events("é".encode()))
    assert [(chunk.text, chunk.num_output_tokens) for chunk in chunks] == [("", 1), ("é", 1)]


def test_events_taken_together_make_one_chunk() -> None:
    chunks = run(TextStream(request(), TOKENIZER), text_events(b"abcdefg"), batch=3)
    assert [chunk.text for chunk in chunks] == ["abc", "def", "g"]
    assert [chunk.token_index for chunk in chunks] == [0, 3, 6]


def test_not_streaming_answers_once() -> None:
    stream = TextStream(request(streaming=False, prefix="Q: "), TOKENIZER)
    (chunk,) = run(stream, text_events(b"abc"))
    assert (chunk.text, chunk.num_output_tokens, chunk.final) == ("Q: abc", 3, True)
    assert chunk.log_probs == (-0.5, -0.5, -0.5)
    assert chunk.cum_log_prob == -1.5


def test_a_space_between_prompt_and_answer_is_kept() -> None:
    pieces = ("▁What", "▁is", "▁deep", "▁learning")
    tokenizer = sentencepiece_tokenizer(pieces)
    answer = [event(1, [258]), event(1, [259], end=EndReason.LENGTH)]
    for prefix, text in (("What is", "What is deep learning"), ("", "deep learning")):
        (chunk,) = run(TextStream(request(streaming=False, prefix=prefix), tokenizer), answer)
        assert chunk.text == text


def test_end_without_tokens_is_one_chunk() -> None:
    (chunk,) = run(TextStream(request(), TOKENIZER), [event(1, end=EndReason.STOP)])
    assert (chunk.text, chunk.num_output_tokens, chunk.finish_reason) == ("", 0, "stop")


def test_held_text_is_released_at_every_end() -> None:
    for end in (EndReason.LENGTH, EndReason.STOP, EndReason.CANCELLED):
        chunks = run(TextStream(request(stops=("bX",)), TOKENIZER), text_events(b"ab", end))
        assert "".join(chunk.text for chunk in chunks) == "ab"
        assert chunks[-1].finish_reason == end.value


@pytest.mark.parametrize("batch", [1, 2, 10])
def test_stop_string_ends_the_answer_at_its_token(batch: int) -> None:
    stream = TextStream(request(stops=("cd",), log_probs=True), TOKENIZER)
    chunks = run(stream, text_events(b"abcdefgh"), batch)
    assert stream.needs_finish
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert sum(chunk.num_output_tokens for chunk in chunks) == 4
    assert sum(len(chunk.log_probs) for chunk in chunks) == 4
    assert chunks[-1].cum_log_prob == -2.0
    assert [chunk.final for chunk in chunks].count(True) == 1
    assert chunks[-1].finish_reason == "stop"


def test_tokens_after_the_stop_in_the_same_event_are_not_counted() -> None:
    stream = TextStream(request(stops=("cd",), log_probs=True), TOKENIZER)
    (chunk,) = run(stream, [event(1, b"abcdefgh", log_probs=[-0.5] * 8)])
    assert (chunk.text, chunk.num_output_tokens, len(chunk.log_probs)) == ("ab", 4, 4)


def test_stop_string_on_the_last_allowed_token_is_a_stop() -> None:
    stream = TextStream(request(stops=("cd", "bcd")), TOKENIZER)
    events = [event(1, [ord("a")]), event(1, [ord("b")]), event(1, b"cd", end=EndReason.LENGTH)]
    chunks = run(stream, events)
    assert "".join(chunk.text for chunk in chunks) == "a"
    assert chunks[-1].finish_reason == "stop"


def test_stop_string_that_the_end_completes_is_a_stop() -> None:
    """The rest of a character becomes U+FFFD at the end, and that may be what was looked for."""
    chunks = run(TextStream(request(stops=("\ufffd",)), TOKENIZER), text_events(b"a\xe4"))
    assert "".join(chunk.text for chunk in chunks) == "a"
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("retryable", "code"), [(True, ErrorCode.UNAVAILABLE), (False, ErrorCode.INTERNAL)]
)
def test_errors(retryable: bool, code: ErrorCode) -> None:
    events = [event(1, b"a"), event(1, end=EndReason.ERROR, error="boom", retryable=retryable)]
    chunks = run(TextStream(request(), TOKENIZER), events)
    assert (chunks[-1].error, chunks[-1].error_code, chunks[-1].final) == ("boom", code, True)


@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_tokens_before_an_error_reach_a_stream_however_they_gathered(batch: int) -> None:
    events = [event(1, [byte]) for byte in b"abc"]
    events.append(event(1, end=EndReason.ERROR, error="boom"))
    *data, last = run(TextStream(request(), TOKENIZER), events, batch)
    assert "".join(chunk.text for chunk in data) == "abc"
    assert sum(chunk.num_output_tokens for chunk in data) == 3
    assert (last.error, last.final, last.text) == ("boom", True, "")
    assert not any(chunk.final for chunk in data)


def test_an_answer_in_one_piece_that_fails_is_an_error_only() -> None:
    events = [event(1, b"abc"), event(1, end=EndReason.ERROR, error="boom")]
    (chunk,) = run(TextStream(request(streaming=False), TOKENIZER), events, batch=2)
    assert chunk.error == "boom"


@given(
    st.lists(st.binary(max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=2),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_answer_does_not_depend_on_batching(
    parts: list[bytes], stops: list[str], batch: int, streaming: bool
) -> None:
    events = [event(1, part, log_probs=[-1.0] * len(part)) for part in parts]
    events.append(event(1, end=EndReason.LENGTH))
    reference = run(TextStream(request(stops=tuple(stops)), TOKENIZER), events)
    chunks = run(
        TextStream(request(stops=tuple(stops), streaming=streaming), TOKENIZER), events, batch
    )
    for value in ("text", "log_probs"):
        joined = [item for chunk in chunks for item in getattr(chunk, value)]
        assert joined == [item for chunk in reference for item in getattr(chunk, value)]
    index = 0
    for chunk in chunks:
        assert chunk.token_index == index
        index += chunk.num_output_tokens
    assert index == sum(chunk.num_output_tokens for chunk in reference)
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason == reference[-1].finish_reason


def names_and_values(chunk: Chunk, req: TextRequest, requested: tuple[str, ...]) -> dict:
    tensors = encode_chunk(chunk, req, select_outputs(requested, req))
    return {name: array.reshape(-1).tolist() for name, array in tensors}


def test_outputs_that_nobody_named() -> None:
    chunk = Chunk(text="é", num_output_tokens=2, token_index=4, final=True, finish_reason="stop")
    assert names_and_values(chunk, request(), OUTPUT_NAMES) == {
        "text_output": ["é".encode()],
        "batch_index": [0],
        "sequence_index": [0],
        "finish_reason": [b"stop"],
        "token_index": [4],
    }


def test_outputs_by_flag_and_by_name() -> None:
    chunk = Chunk(text="x", num_output_tokens=2, log_probs=(-1.0, -2.0), cum_log_prob=-5.0)
    req = request(log_probs=True, counts=True)
    values = names_and_values(chunk, req, OUTPUT_NAMES)
    assert values["num_input_tokens"] == [3]
    assert values["num_output_tokens"] == [2]
    assert values["output_log_probs"] == [-1.0, -2.0]
    assert values["cum_log_probs"] == [-5.0]
    assert "finish_reason" not in values
    assert names_and_values(chunk, request(), ("num_output_tokens", "output_log_probs")) == {
        "num_output_tokens": [2]
    }
    assert names_and_values(chunk, request(), ("context_logits",)) == {}


def test_shapes_have_a_batch_dimension() -> None:
    chunk = Chunk(text="x", num_output_tokens=2, log_probs=(-1.0, -2.0))
    req = request(log_probs=True, counts=True)
    for name, array in encode_chunk(chunk, req, select_outputs(OUTPUT_NAMES, req)):
        assert array.shape == ((1, 1, 2) if name == "output_log_probs" else (1, 1)), name
        assert array.dtype in (np.object_, np.int32, np.float32)
