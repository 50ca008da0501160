"""The engine's process: an in-process executor at the other end of a channel.

Run as `python -m tokenflow.executor.host --fd N --parent-pid P` by `remote.RemoteExecutor`. Owns
the executor and the map between the proxy's request ids and the engine's. The main thread loads the
engine and then sends one message per batch of responses; the reader thread takes commands in order.

Invariants:
- Dies with its parent: the kernel kills it when the thread that created it ends, and the end of the
  channel ends it at once, in whatever state it is.
- Idle means blocked: no polling while the engine has no request, but for a moment after a hint
  about KV, which an idle engine may act on, and while its copies between the tiers run.
- An engine that fails for good (it takes no more requests) takes this process with it. What it had
  computed leaves first; its error responses do not, because no request is at fault: the end of
  the process is what tells the proxy, and the last line of the output tells why.
- No more than the window of unacknowledged messages leaves here, and the engine's next step waits
  for the same window (`ResponseOutbox.wait_open`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

import msgspec

from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import EngineError, EngineLostError, TokenFlowError
from tokenflow.executor.api import Executor, IterationStats, Request, Response
from tokenflow.executor.backpressure import ResponseOutbox
from tokenflow.executor.channel import (
    Ack,
    Cancel,
    EngineInfo,
    Enqueue,
    Failed,
    FrameBuffer,
    Locate,
    Progress,
    Ready,
    RequestSnapshot,
    Setup,
    Shutdown,
    TieringHint,
    ToHost,
    decode_to_host,
)
from tokenflow.executor.host_kv import HostKv
from tokenflow.executor.kv_api import KVCacheEvent
from tokenflow.executor.request_ids import RequestIds

EXIT_OK = 0
EXIT_LOAD_FAILED = 3
EXIT_PROTOCOL = 4
EXIT_ENGINE_FAILED = 5
EXIT_PARENT_GONE = 6

# Longest time that statistics of an iteration without responses (a prefill chunk) stay here.
_POLL = timedelta(milliseconds=50)
_RECV_BYTES = 1 << 16  # below the size from which each buffer is mapped anew
_PR_SET_PDEATHSIG = 1


class EngineFactory(Protocol):
    """Makes the executor that a host serves; `factory.create_engine` is the one of the product.

    on_progress(fraction, text) may be called while loading; before_step() is to be called before
    each step of the engine and blocks while the proxy is behind. Returns the executor and what it
    is.
    """

    def __call__(
        self,
        config: ServingConfig,
        *,
        on_progress: Callable[[float, str], None],
        before_step: Callable[[], None],
    ) -> tuple[Executor, EngineInfo]: ...


class EngineHost:
    """One engine served over one socket. `run` returns the exit code."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameBuffer()
        self._pending: deque[bytes] = deque()
        self._ids = RequestIds()
        self._loaded = threading.Event()
        self._busy = threading.Event()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._outbox: ResponseOutbox
        self._executor: Executor
        self._kv: HostKv

    def run(self) -> int:
        """Serve until the proxy asks for the end or goes away."""
        setup = self._next_message()
        if not isinstance(setup, Setup):
            raise EngineError(f"the first message is {type(setup).__name__}, not Setup")
        self._outbox = ResponseOutbox(self._socket, setup.window)
        threading.Thread(target=self._read_commands, name="engine-host-reader", daemon=True).start()
        try:
            self._executor, info = self._load(setup)
        except TokenFlowError as error:
            self._outbox.send_now(Failed(str(error)))
            return EXIT_LOAD_FAILED
        except (Exception, SystemExit) as error:
            _report_exception()
            self._outbox.send_now(Failed(f"{type(error).__name__}: {error}"[:4000]))
            return EXIT_LOAD_FAILED
        self._kv = HostKv(self._executor, self._outbox.send_now)
        info = msgspec.structs.replace(
            info, has_kv_events=self._kv.has_events, has_kv_tiering=self._kv.has_tiering
        )
        self._loaded.set()
        self._outbox.send_now(Ready(info))
        return self._pump()

    def _load(self, setup: Setup) -> tuple[Executor, EngineInfo]:
        module, _, function = setup.factory.partition(":")
        create: EngineFactory = getattr(importlib.import_module(module), function)
        return create(
            parse_parameters(setup.parameters),
            on_progress=lambda fraction, text: self._outbox.send_now(Progress(fraction, text)),
            before_step=self._outbox.wait_open,
        )

    # -- main thread ---------------------------------------------------------------------------

    def _pump(self) -> int:
        """Send what becomes ready, one message per batch, until the engine is shut down."""
        settled = not self._kv.has_events  # the first one says how large the tiers are
        while True:
            if settled:
                self._busy.wait()
                self._busy.clear()
            try:
                responses, stats, events, failed = self._pull()
            except Exception as error:
                if self._stopping.is_set():
                    break
                if isinstance(error, EngineLostError):
                    _report(str(error))
                    return EXIT_ENGINE_FAILED
                raise
            if self._stopping.is_set():
                break
            self._outbox.note_pull()
            errors = [response.error_msg for response in responses if response.has_error()]
            if failed:
                responses = [response for response in responses if not response.has_error()]
            is_quiet = not responses and not stats and not events
            if not is_quiet:
                self._outbox.push(self._ids.translate(responses), stats, events)
            if failed:
                _report(errors[-1] if errors else "the engine takes no more requests")
                return EXIT_ENGINE_FAILED
            expects_more = self._kv.expects_more(stats) or not self._ids.empty()
            settled = is_quiet and not expects_more
        # The reader shuts the engine down; what it owns outside of this process (workers of other
        # ranks, locks) must not be left because this thread saw the end first.
        self._stopped.wait()
        return EXIT_OK

    def _pull(
        self,
    ) -> tuple[list[Response], list[IterationStats], list[KVCacheEvent], bool]:
        """What is ready, and whether the engine has failed for good: then that is all there is."""
        responses = self._executor.await_responses(_POLL)
        failed = not self._executor.can_enqueue_requests()
        if failed and self._executor.get_num_responses_ready():
            responses += self._executor.await_responses(timedelta(0))
        stats = self._executor.get_latest_iteration_stats()
        return responses, stats, self._kv.drain_events(), failed

    # -- reader thread -------------------------------------------------------------------------

    def _read_commands(self) -> None:
        """Take commands in order until Shutdown; anything unexpected ends the process."""
        try:
            while True:
                message = self._next_message()
                if isinstance(message, Shutdown):
                    self._stop()
                    return
                if not self._loaded.is_set():
                    raise EngineError(f"{type(message).__name__} before the engine was ready")
                self._handle(message)
        except EngineError as error:
            _report(str(error))
            _exit(EXIT_PROTOCOL)
        except BaseException:
            _report_exception()
            _exit(EXIT_ENGINE_FAILED)

    def _handle(self, message: ToHost) -> None:
        if isinstance(message, Ack):
            self._outbox.acknowledge(message.seq)
        elif isinstance(message, Enqueue):
            self._enqueue(message)
            self._busy.set()
        elif isinstance(message, Cancel):
            engine_id = self._ids.engine_id(message.request_id)
            if engine_id is not None:
                self._executor.cancel_request(engine_id)
        elif isinstance(message, TieringHint):
            self._kv.hint(message)
            self._busy.set()
        elif isinstance(message, Locate):
            self._kv.ask(message)
        elif isinstance(message, RequestSnapshot):
            self._kv.request_snapshot()
        else:
            raise EngineError(f"unexpected {type(message).__name__}")

    def _enqueue(self, message: Enqueue) -> None:
        """A refusal (the engine's queue is full, or it does not have what a request asks for)
        becomes an error response: the proxy has long returned the ids. Of several that are refused
        together each is tried alone: one may be the cause, and it must not end the others. No
        responses where the engine has failed: the main thread ends the process.
        """
        if self._refusal(message.request_ids, message.requests) is None:
            return
        for request_id, request in zip(message.request_ids, message.requests, strict=True):
            error = self._refusal([request_id], [request])
            if error is not None and self._executor.can_enqueue_requests():
                self._outbox.post(
                    Response(request_id=request_id, client_id=request.client_id, error=str(error))
                )

    def _refusal(self, request_ids: Sequence[int], requests: Sequence[Request]) -> Exception | None:
        """Enqueue all of them, or none and return why."""
        try:
            self._ids.enqueue(request_ids, requests, self._executor)
        except Exception as error:
            return error
        return None

    def _stop(self) -> None:
        """Nobody can receive a response any more, so running requests are cut short."""
        if not self._loaded.is_set():
            _exit(EXIT_OK)
        self._outbox.close()
        for engine_id in self._ids.engine_ids():
            self._executor.cancel_request(engine_id)
        self._stopping.set()
        self._executor.shutdown()
        self._stopped.set()
        self._busy.set()

    # -- socket --------------------------------------------------------------------------------

    def _next_message(self) -> ToHost:
        """The next command; ends the process when the proxy has closed its end."""
        while not self._pending:
            try:
                data = self._socket.recv(_RECV_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                _exit(EXIT_PARENT_GONE)
            self._pending.extend(self._frames.feed(data))
        return decode_to_host(self._pending.popleft())


def _exit(code: int) -> NoReturn:
    """End at once, from any thread and state: destructors of a half-loaded engine help nobody."""
    os._exit(code)


def _report(message: str) -> None:
    """One line on stderr, which the proxy quotes; nobody may be left to read it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"engine process: {' '.join(message.split())}\n")
        sys.stderr.flush()


def _report_exception() -> None:
    with contextlib.suppress(OSError):
        traceback.print_exc()
        sys.stderr.flush()


def _prepare_process(parent_pid: int) -> None:
    """Undo what may be inherited from the parent and tie this process to its life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise EngineError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the request to the kernel took effect
        _exit(EXIT_PARENT_GONE)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the engine's process; never returns."""
    parser = argparse.ArgumentParser(description="Serve an engine over an inherited socket.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the channel")
    parser.add_argument("--parent-pid", type=int, required=True, help="process to die with")
    options = parser.parse_args(arguments)
    _prepare_process(options.parent_pid)
    os.set_inheritable(options.fd, False)
    logging.basicConfig(format="%(asctime)s engine %(levelname)s: %(message)s")
    logging.getLogger("tokenflow").setLevel(logging.INFO)
    try:
        code = EngineHost(socket.socket(fileno=options.fd)).run()
    except BaseException:
        _report_exception()
        code = EXIT_ENGINE_FAILED
    _exit(code)


if __name__ == "__main__":
    main()
