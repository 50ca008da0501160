"""Recognition and validation of control requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.triton.parsing import tensor
from tokenflow.errors import InvalidRequestError
from triton_backend.control import (
    Acknowledgement,
    PauseRequest,
    ResumeRequest,
    StopRequest,
    parse_control,
)


def test_control_requests() -> None:
    stop = {"stop": tensor(True)}
    assert parse_control("a", stop) == StopRequest("a")
    assert parse_control("a", {**stop, "text_input": tensor("x")}) == StopRequest("a")
    assert parse_control("a", {"ack_tokens": tensor(7)}) == Acknowledgement("a", 7)
    assert parse_control("a", {"pause": tensor(True)}) == PauseRequest("a")
    assert parse_control("a", {"resume": tensor(True)}) == ResumeRequest("a")
    assert parse_control("a", {"pause": tensor(False), "ack_tokens": tensor(0)}) == (
        Acknowledgement("a", 0)
    )
    for name in ("stop", "pause", "resume"):
        assert parse_control("a", {name: tensor(False), "text_input": tensor("x")}) is None
    assert parse_control("a", {"text_input": tensor("x")}) is None


@pytest.mark.parametrize(
    ("request_id", "tensors", "message"),
    [
        ("", {"stop": True}, "id: a request id must be provided for request cancellation"),
        ("", {"ack_tokens": 3}, "id: a request id must be provided for an acknowledgement"),
        ("x" * 4097, {"stop": True}, "id: at most 4096 characters, got 4097"),
        ("x" * 4097, {"pause": True}, "id: at most 4096 characters, got 4097"),
        ("x" * 4097, {"ack_tokens": 3}, "id: at most 4096 characters, got 4097"),
        ("a", {"ack_tokens": -1}, "ack_tokens: "),
        ("a", {"ack_tokens": 1.0}, "ack_tokens: "),
        ("a", {"stop": 1}, "stop: "),
        ("", {"pause": True}, "id: a request id must be provided for a pause"),
        ("", {"resume": True}, "id: a request id must be provided for a resume"),
        ("a", {"pause": 1}, "pause: "),
        ("a", {"resume": "true"}, "resume: "),
        ("a", {"stop": True, "ack_tokens": 1}, "ack_tokens: cannot go with stop"),
        ("a", {"stop": True, "pause": True}, "pause: cannot go with stop"),
        ("a", {"pause": True, "resume": True}, "resume: cannot go with pause"),
        ("a", {"resume": True, "ack_tokens": 1}, "ack_tokens: cannot go with resume"),
    ],
)
def test_bad_control_requests(request_id: str, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        parse_control(request_id, {name: tensor(value) for name, value in tensors.items()})
