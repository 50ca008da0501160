"""Messages between the proxy of an engine and the engine's process, and their way over a socket.

Owns the wire: a stream socket carries frames, a frame is a 4-byte little-endian length and a
msgpack message, a message is one of the structs below. One message holds everything of one
iteration, so the cost per token is a fraction of a system call.

Invariants: frames keep their order; both ends refuse a frame larger than MAX_MESSAGE_BYTES. What
bounds the number of messages is in `backpressure`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError
from tokenflow.executor.api import IterationStats, Request, Response
from tokenflow.executor.kv_api import KVCacheEvent, KvLocation

MAX_MESSAGE_BYTES = 64 << 20

_HEADER_BYTES = 4


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the running engine is. vocab_size, block_bytes: 0 where the engine does not say.

    num_host_blocks: size of the host tier. block_bytes: KV of one block of all layers.
    has_kv_events, has_kv_tiering: what the executor's two getters give.
    """

    vocab_size: int
    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_seq_len: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    has_kv_events: bool = False
    has_kv_tiering: bool = False

    @classmethod
    def from_config(cls, config: ServingConfig, *, vocab_size: int) -> EngineInfo:
        """An engine with the limits of `config`."""
        return cls(
            vocab_size=vocab_size,
            num_blocks=config.max_tokens_in_paged_kv_cache // config.tokens_per_block,
            tokens_per_block=config.tokens_per_block,
            max_batch_size=config.max_batch_size,
            max_seq_len=config.max_seq_len,
        )


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First message to the host. factory: `module:function` that makes the executor."""

    parameters: dict[str, str]
    factory: str
    window: int


class Enqueue(msgspec.Struct, frozen=True, tag="enqueue"):
    """Requests under the ids that the proxy chose, in order."""

    request_ids: list[int]
    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request at the next iteration boundary."""

    request_id: int


class Offload(msgspec.Struct, frozen=True, tag="offload"):
    """See `KvTiering.offload`."""

    token_ids: list[int]
    max_blocks: int
    cache_salt_id: int | None


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """See `KvTiering.prefetch`."""

    token_ids: list[int]
    cache_salt_id: int | None


class DropHost(msgspec.Struct, frozen=True, tag="drop_host"):
    """See `KvTiering.drop_host`."""

    token_ids: list[int]
    cache_salt_id: int | None


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """See `KvTiering.locate`; `question` comes back in the answer."""

    question: int
    token_ids: list[int]
    cache_salt_id: int | None


class RequestSnapshot(msgspec.Struct, frozen=True, tag="request_snapshot"):
    """KV events were lost on the way: see `KVCacheSnapshots`."""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Every iteration message up to `seq` was taken by the proxy's caller."""

    seq: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop the engine and end the process."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading goes on: `fraction` in [0, 1] of what `text` names."""

    fraction: float
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be started."""

    message: str


class Iteration(msgspec.Struct, frozen=True, tag="iteration"):
    """What became ready together, and the statistics and KV events drained at the same time."""

    seq: int
    responses: list[Response]
    stats: list[IterationStats]
    events: list[KVCacheEvent] = []


class Located(msgspec.Struct, frozen=True, tag="located"):
    """The answer to a Locate. error: why there is none."""

    question: int
    location: KvLocation | None
    error: str = ""


TieringHint = Offload | Prefetch | DropHost
ToHost = Setup | Enqueue | Cancel | TieringHint | Locate | RequestSnapshot | Ack | Shutdown
FromHost = Progress | Ready | Failed | Iteration | Located

_to_host_decoder = msgspec.msgpack.Decoder(ToHost)
_from_host_decoder: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


def encode(message: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """One frame, header included. Raises EngineError when the message cannot be sent: too large,
    or with a number that the wire does not hold."""
    try:
        payload = msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"cannot be sent to the engine's process: {error}") from None
    if len(payload) > max_bytes:
        raise EngineError(
            f"a message of {len(payload)} bytes is over the channel's limit of {max_bytes}"
        )
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload


def decode_to_host(payload: bytes) -> ToHost:
    """A proxy's message. Raises EngineError for anything else."""
    try:
        return _to_host_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"malformed message on the engine's channel: {error}") from None


def decode_from_host(payload: bytes) -> FromHost:
    """A host's message. Raises EngineError for anything else."""
    try:
        return _from_host_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"malformed message on the engine's channel: {error}") from None


class FrameBuffer:
    """Cuts a byte stream into frames. Holds at most one incomplete frame plus what one `feed`
    brought."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by `data`, in order. Raises EngineError for a frame over the limit."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + _HEADER_BYTES], "little")
            if size > MAX_MESSAGE_BYTES:
                raise EngineError(
                    f"malformed message on the engine's channel: {size} bytes announced, "
                    f"the limit is {MAX_MESSAGE_BYTES}"
                )
            end = start + _HEADER_BYTES + size
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + _HEADER_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads
