"""A small process that ends a stub whose server is gone, when the stub cannot do it itself.

A stub that calls into a dead server (a metric update, a response) waits there for ever with the
GIL held, so that no Python thread of it runs again, the watchdog's included. This process looks
from outside: it waits for the end of the server or of the stub, and if the server ended first and
the stub is still there after the grace time, it kills the stub; the engine's process follows its
parent. Descriptors of processes are used, so a recycled process id is never hit.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tokenflow.executor.process import child_environment, python_executable

_GRACE_S = 3.0


def start_warden(server_pid: int, stub_pid: int) -> subprocess.Popen[bytes]:
    """Start the process; it ends by itself with the stub. The caller reaps it."""
    return subprocess.Popen(
        [
            python_executable(),
            "-m",
            "triton_backend.warden",
            str(server_pid),
            str(stub_pid),
        ],
        env=child_environment(os.environ, 1),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(server_pid: int, stub_pid: int, grace_s: float = _GRACE_S) -> bool:
    """Wait until one of the two ends; True if the stub had to be killed."""
    try:
        stub_fd = os.pidfd_open(stub_pid)
    except ProcessLookupError:
        return False
    try:
        if _first_to_end(server_pid, stub_fd) == stub_fd:
            return False
        if _ends_within(stub_fd, grace_s):
            return False
        signal.pidfd_send_signal(stub_fd, signal.SIGKILL)
        return True
    finally:
        os.close(stub_fd)


def _first_to_end(server_pid: int, stub_fd: int) -> int | None:
    """`stub_fd` if the stub ended, None if the server did (or was gone already)."""
    try:
        server_fd = os.pidfd_open(server_pid)
    except ProcessLookupError:
        return None
    try:
        poller = select.poll()
        poller.register(stub_fd, select.POLLIN)
        poller.register(server_fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll()}
        return stub_fd if stub_fd in ended else None
    finally:
        os.close(server_fd)


def _ends_within(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
