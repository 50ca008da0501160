"""Starts and stops a real tritonserver on a rendered model repository.

Owns one server process with everything that belongs to it: its backend folder, its environment, its
ports, its log file and its shared memory regions. Invariants: the process leads a process group of
its own; it is asked to stop (SIGTERM) when the thread that started it dies; after `stop` no process
of the group and no shared memory file of its prefix is left.
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tokenflow.errors import TokenFlowError
from triton_backend.installation import (
    Installation,
    Ports,
    find_free_ports,
    find_installation,
)

# Runs in a small Python that then becomes tritonserver: the server must not outlive its launcher.
_BECOME_SERVER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
    sys.exit("prctl failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.05
_LOG_TAIL_LINES = 30
_MAX_CAUSE_LINES = 12
_CAUSE_LINE = re.compile(r"failed to (initialize Python stub|load|start)", re.IGNORECASE)
_LOG_TAIL_BYTES = 64 * 1024


class LaunchError(TokenFlowError):
    """The server could not be started; the message ends with what its log says."""


class TritonServer:
    """One tritonserver. Use as a context manager, or call start, wait_ready and stop.

    repository: a rendered model repository (repository.render_repository).
    ports: None picks three free ones.
    host: address that HTTP, gRPC and metrics listen on.
    log_path: file that receives the server's output; None = a temporary file that goes with stop.
    exit_timeout_s: how long the server lets streams in flight finish after SIGTERM.

    `start` must be called from a thread that lives as long as the server is wanted: the kernel
    sends the server SIGTERM when that thread ends.
    """

    def __init__(
        self,
        repository: Path,
        *,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        log_path: Path | None = None,
        exit_timeout_s: int = 30,
        extra_args: Sequence[str] = (),
        installation: Installation | None = None,
    ) -> None:
        self.repository = repository.resolve()
        self.host = host
        self.ports = ports or find_free_ports(host)
        self.exit_timeout_s = exit_timeout_s
        self.shm_prefix = f"tokenflow_{os.getpid()}_{secrets.token_hex(4)}_"
        self._extra_args = tuple(extra_args)
        self._installation = installation or find_installation()
        self._work_dir = Path(tempfile.mkdtemp(prefix="tokenflow-server-"))
        self.log_path = log_path or self._work_dir / "tritonserver.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP endpoint, as tritonclient.http takes it."""
        return f"{self._client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC endpoint, as tritonclient.grpc takes it."""
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of the Prometheus endpoint (path /metrics)."""
        return f"{self._client_host}:{self.ports.metrics}"

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver while it runs."""
        return self._process.pid if self.is_running() and self._process else None

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def is_running(self) -> bool:
        """True from `start` until the process has ended by itself or by `stop`."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and return at once; `wait_ready` tells when it serves.

        Raises LaunchError when the command cannot be run.
        """
        if self._process is not None:
            raise LaunchError("this server was started before; make a new TritonServer")
        backends = self._installation.make_backend_directory(self._work_dir / "backends")
        command = [
            sys.executable, "-I", "-S", "-c", _BECOME_SERVER, str(os.getpid()),
            str(self._installation.binary), *self._arguments(backends),
        ]  # fmt: skip
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._installation.environment(os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"cannot run {self._installation.binary}: {error}") from error

    def wait_ready(
        self, timeout_s: float = 120.0, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Block until every model is ready and /metrics answers (it comes last); `on_wait` is
        called at every look (progress bars).

        Raises LaunchError with the log's tail when the server ends or the time is over; the
        caller still has to `stop` it (the context manager does).
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.is_running():
                code = self._process.returncode if self._process else None
                raise LaunchError(f"tritonserver ended (exit code {code})\n{self.log_cause()}")
            if self._answers(self.ports.http, "/v2/health/ready") and self._answers(
                self.ports.metrics, "/metrics"
            ):
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"tritonserver was not ready after {timeout_s:.0f} s\n{self.log_tail()}"
                )
            if on_wait is not None:
                on_wait()
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code once the process ended by itself, or None after `timeout_s`."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float | None = None) -> int | None:
        """Stop the server and remove what it left; idempotent. Returns its exit code.

        SIGTERM first; SIGKILL for the whole group after `timeout_s` (default: the exit timeout
        plus 10 s). Open gRPC streams of clients keep a server from ending: close them before.
        """
        limit_s = self.exit_timeout_s + 10.0 if timeout_s is None else timeout_s
        code = None
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            code = self.wait(limit_s)
            self._end_group()
            if code is None:
                code = self._process.wait()
        remove_shared_memory(self.shm_prefix)
        shutil.rmtree(self._work_dir, ignore_errors=True)
        return code

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the server's output."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-num_lines:])

    def log_cause(self) -> str:
        """What the log says went wrong: its first failure with the lines that explain it, else the
        log's tail. (When a model cannot be loaded, tables of options follow the reason.)"""
        lines = self.log_tail(num_lines=1000).splitlines()
        for index, line in enumerate(lines):
            if _CAUSE_LINE.search(line):
                return "\n".join(lines[index : index + _MAX_CAUSE_LINES])
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def __enter__(self) -> TritonServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(timeout_s=5.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _arguments(self, backends: Path) -> list[str]:
        return [
            f"--model-repository={self.repository}",
            f"--backend-directory={backends}",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self.exit_timeout_s}",
            # config.pbtxt is complete, so the extra process that would complete it is not needed.
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            *self._extra_args,
        ]

    def _answers(self, port: int, path: str) -> bool:
        connection = http.client.HTTPConnection(self._client_host, port, timeout=1.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end_group(self) -> None:
        """Wait shortly for the stubs to follow the server, then kill what is left of the group."""
        assert self._process is not None
        group = self._process.pid
        deadline = time.monotonic() + (2.0 if self._process.poll() is not None else 0.0)
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(_POLL_S)
            os.killpg(group, signal.SIGKILL)


def remove_shared_memory(prefix: str) -> list[Path]:
    """Delete the /dev/shm files whose names start with `prefix`; returns what was deleted."""
    removed = []
    for name in glob.glob(f"/dev/shm/{glob.escape(prefix)}*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
            removed.append(Path(name))
    return removed
