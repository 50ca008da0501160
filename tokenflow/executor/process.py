"""The engine's process as an operating system thing: start it, hear it, end it.

Owns the child process, the thread that created it and the last lines it wrote.

Invariants:
- Never a fork of this process: the child is a fresh interpreter with its own environment, its own
  session, and no descriptor but the one it is given.
- The child asks the kernel to be killed with its parent, which follows the *thread* that created
  it. So one permanent thread creates the child and then waits for its end; it ends after the child.
- The child is always reaped, and once only, by that thread, and never while somebody signals it: a
  signal cannot hit a process that was given the same id.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenflow.errors import EngineError

_TAIL_LINES = 40
_MAX_LINE_BYTES = 2000
_MAX_QUOTE = 400
_REAP_S = 5.0  # a killed process that the kernel cannot end yet must not hold us for ever
_WRITE_BYTES = 4096  # what a pipe that polls writable takes without blocking


def python_executable() -> str:
    """The interpreter of this environment. `sys.executable` is not one inside an embedding program
    (Triton's stub), so the environment's bin directory comes first."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [Path(sys.prefix, "bin", name) for name in (version, "python3")]
    if sys.executable and Path(sys.executable).name.startswith("python"):
        candidates.append(Path(sys.executable))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise EngineError(f"no Python interpreter found in {sys.prefix}/bin for the engine's process")


def child_environment(base: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """The engine's environment: `base`, this package importable, and OpenMP threads that sleep
    while they wait (spinning ones make a step many times slower beside a busy neighbour), which
    must be set before torch loads. num_threads: 0 leaves the number to the engine."""
    env = dict(base)
    env["OMP_WAIT_POLICY"] = "PASSIVE"
    if num_threads > 0:
        env["OMP_NUM_THREADS"] = str(num_threads)
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONSAFEPATH"] = "1"
    package_root = Path(__file__).resolve().parents[2]
    if not package_root.is_relative_to(sys.prefix):
        paths = [str(package_root), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


class LogTail:
    """Copies the child's output to a descriptor and remembers its last lines.

    A destination that is full is never waited for: what it does not take is dropped there.
    """

    def __init__(self, destination_fd: int) -> None:
        self._destination_fd = destination_fd
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = b""
        self._poller = select.poll()
        self._poller.register(destination_fd, select.POLLOUT)

    def feed(self, data: bytes) -> None:
        """Take output as it comes."""
        self._copy(data)
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[:_MAX_LINE_BYTES]
        self._lines.extend(_text(line) for line in lines if line.strip())

    def last_line(self) -> str:
        """The most telling line of the end: a fatal error's headline, else the last one; '' if
        nothing was written."""
        lines = [*self._lines, *([_text(self._partial)] if self._partial.strip() else [])]
        for line in reversed(lines):
            if line.startswith("Fatal Python error"):
                return line[:_MAX_QUOTE]
        return lines[-1][:_MAX_QUOTE] if lines else ""

    def _copy(self, data: bytes) -> None:
        for start in range(0, len(data), _WRITE_BYTES):
            try:
                if not self._poller.poll(0):
                    return
                os.write(self._destination_fd, data[start : start + _WRITE_BYTES])
            except OSError:
                return


class EngineProcess:
    """One child process.

    stderr_fd: where its output (both streams) is read from; the caller reads and closes it.
    on_exit: called once, in the spawner's thread, when the child is gone and reaped.
    Raises EngineError when it cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fd: int,
        on_exit: Callable[[], None],
    ) -> None:
        self._arguments = list(arguments)
        self._env = dict(env)
        self._pass_fd = pass_fd
        self._on_exit = on_exit
        self._child: subprocess.Popen[bytes] | None = None
        self._start_error: Exception | None = None
        self._started = threading.Event()
        self._exited = threading.Event()
        self._reaping = threading.Lock()  # held while the child is reaped or signalled
        self.stderr_fd, self._child_stderr_fd = os.pipe()
        self._spawner = threading.Thread(
            target=self._spawn_and_wait, name="tokenflow-engine-spawner", daemon=True
        )
        self._spawner.start()
        self._started.wait()
        os.close(self._child_stderr_fd)
        if self._start_error is not None:
            self._spawner.join()
            os.close(self.stderr_fd)
            raise EngineError(f"the engine's process cannot be started: {self._start_error}")

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        assert self._child is not None
        return self._child.returncode if self._exited.is_set() else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child's end; False when it still runs after `timeout_s`."""
        return self._exited.wait(timeout_s)

    def send_signal(self, number: int) -> None:
        """Signal the child unless it is gone. Safe from any thread."""
        with self._reaping:
            if not self._exited.is_set() and self._child is not None:
                with contextlib.suppress(ProcessLookupError):  # SIGCHLD ignored: nobody reaps
                    os.kill(self._child.pid, number)

    def end(self, grace_s: float) -> None:
        """Make sure that it is gone, with SIGTERM first and SIGKILL after `grace_s`; it is
        reaped and its thread joined."""
        if not self._exited.is_set():
            self.send_signal(signal.SIGTERM)
            if not self.wait(grace_s):
                self.send_signal(signal.SIGKILL)
        self._spawner.join(_REAP_S)

    def describe_exit(self) -> str:
        """How it ended, for an error message."""
        code = self.returncode
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def _spawn_and_wait(self) -> None:
        try:
            self._child = subprocess.Popen(
                self._arguments,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._child_stderr_fd,
                stderr=self._child_stderr_fd,
                pass_fds=(self._pass_fd,),
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._start_error = error
        finally:
            self._started.set()
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
            with self._reaping:
                self._child.wait()
                self._exited.set()
            self._on_exit()


def _text(line: bytes) -> str:
    return line[:_MAX_LINE_BYTES].decode("utf-8", "replace").strip()
