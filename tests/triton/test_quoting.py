"""Long texts of clients in errors."""

from __future__ import annotations

import pytest

from tests.triton.bench import Bench
from tests.triton.fakes import FakeChannel
from tests.triton.parsing import parse
from tests.triton.vocabularies import metaspace_bpe
from tokenflow.errors import InvalidRequestError
from triton_backend.control import PauseRequest, ResumeRequest
from triton_backend.work import Controlled

MAX_CHARACTERS = 400
"""Of an error, with 200 of a client's."""
LONG = "long " * 200
UNWRITABLE = "é" * 1000


@pytest.mark.parametrize(
    ("parameters", "inputs", "field"),
    [
        ({LONG: 1}, {}, LONG[:200]),
        ({}, {LONG: 1}, LONG[:200]),
        ({"read_rate": LONG}, {}, "read_rate"),
        ({"priority": LONG}, {}, "priority"),
        ({"timeout": LONG}, {}, "timeout"),
        ({"timeout": [LONG]}, {}, "timeout"),
        ({}, {"bad_words": UNWRITABLE}, "bad_words"),
        ({}, {"embedding_bias_words": UNWRITABLE, "embedding_bias_weights": 1.0}, "embedding_bias"),
    ],
)
def test_no_error_repeats_a_long_input(
    parameters: dict[str, object], inputs: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(parameters, tokenizer=metaspace_bpe(), **inputs)
    message = str(caught.value)
    assert message.startswith(field)
    assert message.count("characters)") == 1
    assert len(message) < MAX_CHARACTERS


def test_no_answer_to_a_control_request_repeats_a_long_id() -> None:
    bench = Bench()
    bench.runtime.unpausable = 7
    bench.open(1, LONG, max_tokens=7)
    answers = [FakeChannel() for _ in range(3)]
    controls = (PauseRequest(LONG), PauseRequest(LONG + "x"), ResumeRequest(LONG + "x"))
    for answer, control in zip(answers, controls, strict=True):
        bench.sender.post(Controlled(answer, control))
    bench.turn()
    bench.turn()
    for answer in answers:
        ((message, _),) = answer.errors
        assert "characters)" in message
        assert len(message) < MAX_CHARACTERS
