"""The text service in front of the sender, without Triton."""

from __future__ import annotations

import numpy as np
import pytest

from tests.triton.bench import TOKENIZER, Bench
from tests.triton.fakes import FakeChannel, event
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, InternalError
from tokenflow.types import EndReason
from triton_backend.responses import OUTPUT_NAMES
from triton_backend.service import TextService
from triton_backend.stream import ErrorCode


def make_service() -> tuple[TextService, Bench]:
    bench = Bench()
    config = ServingConfig(max_seq_len=64)
    seeds = iter(range(10, 100))
    service = TextService(
        config, TOKENIZER, bench.runtime, bench.sender, bench.clock, lambda: next(seeds)
    )
    return service, bench


TENSORS = {
    "text_input": np.array([[b"hi"]], dtype=np.object_),
    "max_tokens": np.array([[3]], dtype=np.int32),
}


def test_service_submits_and_answers() -> None:
    service, bench = make_service()
    channel = FakeChannel()
    service.accept("q", TENSORS, {}, OUTPUT_NAMES, channel)
    service.accept("q", TENSORS, {}, OUTPUT_NAMES, FakeChannel())
    first, second = bench.runtime.submitted
    assert (first.request_id, first.arrival_time) == ("q", 100.0)
    assert first.sampling_config.seed != second.sampling_config.seed
    bench.sender.post(event(1, b"ok", end=EndReason.STOP))
    bench.turn()
    assert (channel.text, channel.num_finals) == ("ok", 1)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineError("gone"), ErrorCode.UNAVAILABLE, "unavailable: gone"),
        (InternalError("a bug"), ErrorCode.INTERNAL, "internal error"),
        (ValueError("secret path"), ErrorCode.INTERNAL, "internal error"),
    ],
)
def test_service_turns_errors_into_answers(error: Exception, code: ErrorCode, message: str) -> None:
    service, bench = make_service()
    bench.runtime.error = error
    channel = FakeChannel()
    service.accept("q", TENSORS, {}, OUTPUT_NAMES, channel)
    bench.turn()
    assert channel.errors == [(message, code)]
    assert channel.num_finals == 1


def test_a_request_that_cannot_be_taken_apart_is_answered_and_counted() -> None:
    service, bench = make_service()
    unread, broken = FakeChannel(), FakeChannel()
    service.refuse(unread, "parameters: cannot be read")
    service.accept("q", {"text_input": None}, {}, OUTPUT_NAMES, broken)  # type: ignore[dict-item]
    bench.turn()
    assert unread.errors == [("parameters: cannot be read", ErrorCode.INVALID_ARG)]
    assert broken.errors == [("internal error", ErrorCode.INTERNAL)]
    assert unread.num_finals == broken.num_finals == 1
    assert bench.runtime.num_invalid == 2


def test_a_long_id_is_refused() -> None:
    """Triton repeats it in every response."""
    service, bench = make_service()
    fits, long = FakeChannel(), FakeChannel()
    service.accept("x" * 4096, TENSORS, {}, OUTPUT_NAMES, fits)
    service.accept("x" * 4097, TENSORS, {}, OUTPUT_NAMES, long)
    bench.turn()
    assert (len(bench.runtime.submitted), bench.runtime.num_invalid) == (1, 1)
    assert long.errors == [("id: at most 4096 characters, got 4097", ErrorCode.INVALID_ARG)]


def test_service_refuses_bad_input_and_answers_control() -> None:
    service, bench = make_service()
    bad, stop = FakeChannel(), FakeChannel()
    service.accept("q", {}, {}, OUTPUT_NAMES, bad)
    service.accept("q", {"stop": np.array([[True]])}, {}, OUTPUT_NAMES, stop)
    bench.turn()
    bench.turn()
    assert bad.errors == [("text_input: is required", ErrorCode.INVALID_ARG)]
    assert (stop.sent, stop.num_finals) == ([{}], 1)
    assert not bench.runtime.submitted
    assert bench.runtime.num_invalid == 1
