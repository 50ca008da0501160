"""The one error tree of the library.

    TokenFlowError
    ├── InvalidRequestError      a client's field is missing, malformed or out of range
    ├── ConfigError              a configuration key is unknown or its value is refused
    ├── EngineError              the engine reported a failure for this request, or died
    │   └── EngineLostError      the engine's process is gone; nothing more will come from it
    ├── CapacityError            asked for more blocks, slots or tokens than can ever exist
    └── InternalError            a bug: an illegal state transition, a broken invariant

Every error names the field or the limit that was hit, in one sentence a client can act on.
"""

from __future__ import annotations

LAST_OUTPUT = "; its last output: "
"""Stands in the message of a lost engine before what it wrote last, which is for its operator."""


def for_clients(message: str) -> str:
    """`message` without what the engine wrote last."""
    return message.split(LAST_OUTPUT, 1)[0]


class TokenFlowError(Exception):
    """Base of every error this library raises on purpose."""


_MAX_QUOTED_CHARACTERS = 200


def shortened(text: str) -> str:
    """What a client wrote, to be quoted in a message: over gRPC a message of more than 16 kB does
    not arrive, and says nothing of what is wrong."""
    if len(text) <= _MAX_QUOTED_CHARACTERS:
        return text
    return f"{text[:_MAX_QUOTED_CHARACTERS]}… ({len(text):,} characters)"


class InvalidRequestError(TokenFlowError):
    """A request field is missing, has the wrong type or is out of range.

    `field` is the name the client used, so that the message can be acted on.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{shortened(field)}: {message}")
        self.field = field


class ConfigError(TokenFlowError):
    """A configuration key is unknown, or its value is refused."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class EngineError(TokenFlowError):
    """The engine reported a failure."""


class EngineLostError(EngineError):
    """The engine's process ended; its requests will get no further responses."""


class CapacityError(TokenFlowError):
    """More blocks, slots or tokens were asked for than the engine can ever give."""


class InternalError(TokenFlowError):
    """A bug of ours: an illegal state transition or a broken invariant."""
