"""The proxy's end of the channel, and the engine's process behind it.

Owns the socket, the child process and the reader thread, which does everything here that may wait:
it receives messages, flushes commands that the socket did not take at once, copies the child's
output, and notices the end.

Invariants:
- `on_message` gets every message that the child managed to send, in order; then `on_end` is called
  exactly once, however the child ended. Both run in the reader thread.
- `send` never blocks and keeps the order of each thread's messages.
- After `close` no thread, descriptor or process is left, but for a process that the kernel cannot
  end yet (a device driver that hangs) and the thread that waits for it: both `kill` and `close`
  give it up after a bounded time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenflow.errors import LAST_OUTPUT, EngineError
from tokenflow.executor.backpressure import HINT_SHARE, CommandSender
from tokenflow.executor.channel import (
    FrameBuffer,
    FromHost,
    decode_from_host,
    encode,
)
from tokenflow.executor.process import (
    EngineProcess,
    LogTail,
    child_environment,
    python_executable,
)

logger = logging.getLogger("tokenflow")

_HOST_MODULE = "tokenflow.executor.host"
_RECV_BYTES = 1 << 16  # below the size from which each buffer is mapped anew
_STDERR_FD = 2
_EXIT_WAIT_S = 2.0


class EngineLink:
    """A running host process and the way to it.

    on_end(message): how the engine ended, as one line that may be shown to a client.
    log_path: file to which the child's output is appended; None = this process's stderr.
    exit_wait_s: from the end of the channel, or from SIGKILL, to the end of the process.
    process_type: the operating system's process, or a fake's.
    Raises EngineError when the process cannot be started.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[FromHost], None],
        on_end: Callable[[str], None],
        num_threads: int,
        max_backlog_bytes: int,
        log_path: Path | None,
        exit_wait_s: float = _EXIT_WAIT_S,
        process_type: type[EngineProcess] = EngineProcess,
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._exit_wait_s = exit_wait_s
        self._is_killed = False
        self._wake_lock = threading.Lock()
        self._is_released = False
        with contextlib.ExitStack() as opened:
            self._log_fd = _open_log(log_path)
            opened.callback(os.close, self._log_fd)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._wake_fd)
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            opened.callback(self._socket.close)
            with theirs:
                channel = ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
                self._process = process_type(
                    [python_executable(), "-m", _HOST_MODULE, *channel],
                    env=child_environment(os.environ, num_threads),
                    pass_fd=theirs.fileno(),
                    on_exit=self._wake,
                )
            opened.callback(os.close, self._process.stderr_fd)
            opened.callback(self._process.end, 0.0)
            self._log = LogTail(self._log_fd)
            self._sender = CommandSender(self._socket, self._wake, max_backlog_bytes)
            self._reader = threading.Thread(
                target=self._read, name="tokenflow-engine-channel", daemon=True
            )
            self._reader.start()
            self._release = opened.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def send(self, message: Any, *, bounded: bool = False) -> None:
        """Send a message without waiting; nothing happens when the engine is gone. Raises
        EngineError when it cannot be encoded, or (`bounded`) when too much waits already."""
        if not self._sender.send(encode(message), bounded=bounded):
            raise EngineError("the engine takes no commands and the buffer for them is full")

    def send_hint(self, message: Any) -> bool:
        """Send a message that may as well be lost: False when it was, because the engine does not
        read fast enough or the message is no message."""
        try:
            frame = encode(message)
        except EngineError:
            return False
        return self._sender.send(frame, bounded=True, share=HINT_SHARE)

    def kill(self) -> None:
        """End the process at once, in whatever state it is; never waits, safe from any thread until
        `close`."""
        self._process.send_signal(signal.SIGKILL)
        self._is_killed = True
        self._wake()

    def close(self, wait_s: float, terminate_wait_s: float) -> None:
        """Wait for the process to end by itself, then terminate and at last kill it; release
        everything. `on_end` has been called when this returns. Call once."""
        self._process.wait(wait_s)
        self._process.end(terminate_wait_s)
        self._is_killed = True
        self._wake()
        self._reader.join()
        with self._wake_lock:
            self._is_released = True
        self._release.close()

    def _wake(self) -> None:
        """Make the reader look around. A process that outlives `close` calls this late, when the
        descriptor may be somebody else's."""
        with self._wake_lock:
            if not self._is_released:
                os.eventfd_write(self._wake_fd, 1)

    # -- reader thread -------------------------------------------------------------------------

    def _read(self) -> None:
        """Serve the channel and the engine's output until the engine is gone."""
        failure = None
        try:
            self._serve()
        except EngineError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("the engine's channel failed")
            failure = f"{type(error).__name__}: {error}"
        self._sender.close()
        if not self._process.wait(0.0 if failure or self._is_killed else self._exit_wait_s):
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(self._exit_wait_s)
        self._drain_output()
        message = f"the engine process ended ({failure or self._process.describe_exit()})"
        last_line = self._log.last_line()
        self._on_end(message + LAST_OUTPUT + last_line if last_line else message)

    def _serve(self) -> None:
        """Returns at the end of the channel, or of the process once nothing is left to read, or
        when it was killed and neither end comes."""
        channel_fd, output_fd = self._socket.fileno(), self._process.stderr_fd
        os.set_blocking(output_fd, False)
        frames = FrameBuffer()
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(output_fd, select.POLLIN)
        while True:
            write = select.POLLOUT if self._sender.wants_write else 0
            poller.register(channel_fd, select.POLLIN | write)
            exited, killed = self._process.returncode is not None, self._is_killed
            ready = poller.poll(0 if exited else self._exit_wait_s * 1000 if killed else None)
            if (exited or killed) and not ready:
                return
            for fd, events in ready:
                if fd == channel_fd:
                    if events & select.POLLOUT:
                        self._sender.flush()
                    if events & ~select.POLLOUT and not self._receive(frames):
                        return
                elif fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif not self._read_output():
                    poller.unregister(output_fd)

    def _receive(self, frames: FrameBuffer) -> bool:
        """Handle what arrived; False at the end of the channel."""
        try:
            data = self._socket.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        for payload in frames.feed(data):
            self._on_message(decode_from_host(payload))
        return bool(data)

    def _read_output(self) -> bool:
        """Copy the engine's output; False at its end."""
        try:
            data = os.read(self._process.stderr_fd, _RECV_BYTES)
        except BlockingIOError:
            return True
        self._log.feed(data)
        return bool(data)

    def _drain_output(self) -> None:
        """What is left in the pipe. A process that inherited it may keep it open: never wait."""
        with contextlib.suppress(OSError):
            while data := os.read(self._process.stderr_fd, _RECV_BYTES):
                self._log.feed(data)


def _open_log(path: Path | None) -> int:
    try:
        if path is None:
            return os.dup(_STDERR_FD)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        target = "stderr" if path is None else str(path)
        raise EngineError(f"the engine's output cannot be written to {target}: {error}") from None
