"""The text service: tokenizer, runtime and sender put together, without Triton.

Owns the way of a request from its tensors into the runtime. `accept` runs in the caller's thread
(Triton's execute): it validates, tokenizes and posts, and never sends, waits or raises. Everything
that goes back to a client goes through the sender thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tokenflow.clock import Clock
from tokenflow.config import ServingConfig
from tokenflow.errors import EngineError, InvalidRequestError
from tokenflow.types import GenerateRequest
from triton_backend.codec import parse_request
from triton_backend.control import parse_control
from triton_backend.fields import Tensor
from triton_backend.responses import select_outputs
from triton_backend.senders import Sender
from triton_backend.stream import ErrorCode, TextStream
from triton_backend.text import TextTokenizer
from triton_backend.work import Channel, Controlled, Opened, Refused, RuntimeControl

logger = logging.getLogger("tokenflow")


class ServingRuntime(RuntimeControl, Protocol):
    """The part of tokenflow.runtime.Runtime that serving needs."""

    def start(self) -> None: ...

    def submit(self, request: GenerateRequest) -> int: ...

    def count_invalid(self) -> None: ...

    def shutdown(self, timeout_s: float) -> None: ...


class TextService:
    """Serves text requests on a runtime.

    sender: its `post` must be the runtime's `emit`.
    random_seed: uint64 for requests without a seed, a new one at each call.
    """

    def __init__(
        self,
        config: ServingConfig,
        tokenizer: TextTokenizer,
        runtime: ServingRuntime,
        sender: Sender,
        clock: Clock,
        random_seed: Callable[[], int],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._runtime = runtime
        self._sender = sender
        self._clock = clock
        self._random_seed = random_seed

    def start(self, on_tick: Callable[[], None] | None = None) -> None:
        """Start the threads; once. on_tick: called regularly in the sender thread."""
        self._sender.start(self._runtime, on_tick)
        self._runtime.start()

    def accept(
        self,
        request_id: str,
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, object],
        requested_outputs: Iterable[str],
        channel: Channel,
    ) -> None:
        """Take one request. The channel gets exactly one FINAL, whatever happens. Calls must come
        from one thread at a time: streams are opened in the order of their handles."""
        try:
            self._accept(request_id, tensors, parameters, requested_outputs, channel)
        except InvalidRequestError as error:
            self._sender.post(Refused(channel, str(error), ErrorCode.INVALID_ARG))
        except EngineError as error:
            # The server shuts down; another try may meet another one. (That too many wait, or that
            # the engine is lost, comes as an event.)
            self._sender.post(Refused(channel, f"unavailable: {error}", ErrorCode.UNAVAILABLE))
        except Exception:
            logger.exception("request %r could not be read", request_id)
            self._sender.post(Refused(channel, "internal error", ErrorCode.INTERNAL))

    def refuse(self, channel: Channel, message: str) -> None:
        """Answer a request that could not be taken apart; it counts like any that is invalid."""
        self._runtime.count_invalid()
        self._sender.post(Refused(channel, message, ErrorCode.INVALID_ARG))

    def shutdown(self, timeout_s: float) -> None:
        """End every request with an error and FINAL, then the threads, within about timeout_s."""
        self._runtime.shutdown(timeout_s / 2)
        if not self._sender.stop(timeout_s / 2):
            logger.error("the sender did not stop in time")

    def _accept(
        self,
        request_id: str,
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, object],
        requested_outputs: Iterable[str],
        channel: Channel,
    ) -> None:
        control = parse_control(request_id, tensors)
        if control is not None:
            self._sender.post(Controlled(channel, control))
            return
        try:
            request = parse_request(
                request_id,
                tensors,
                parameters,
                tokenizer=self._tokenizer,
                config=self._config,
                arrival_time=self._clock.now(),
                unset_seed=self._random_seed(),
            )
            stream = TextStream(request, self._tokenizer)
            outputs = select_outputs(requested_outputs, request)
        except Exception:
            self._runtime.count_invalid()
            raise
        handle = self._runtime.submit(request.generate)
        self._sender.post(Opened(handle, channel, stream, outputs))


def load_tokenizer(config: ServingConfig) -> TextTokenizer:
    """The tokenizer of `tokenizer_dir`, by default of the model. Raises ConfigError."""
    return TextTokenizer.load(Path(config.tokenizer_dir or config.gpt_model_path))
