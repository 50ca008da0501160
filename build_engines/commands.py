"""One command of a build: run with a log and progress, and ended whatever happens.

Invariant: when `run_command` is left, by its end or by an exception, nothing that the command
started runs on: its process group, and what left the group but still hangs below it. (A daemon that
cut itself loose, and what a builder killed by SIGKILL was running, are out of reach; the lock that
the command inherited speaks for those.)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from build_engines.build_plan import Step
from tokenflow.errors import TokenFlowError

Progress = Callable[[str, float, str], None]
"""Called with the step, the seconds it has run and the last line that it printed."""

_POLL_S = 0.2
_TERM_S = 10.0
_TAIL_BYTES = 4096
_SHOWN_LINES = 3


class BuildError(TokenFlowError):
    """A command failed; the message has its last words and names its log."""


def run_command(step: Step, log_path: Path, lock: int, progress: Progress) -> None:
    """Run to the end. lock: a descriptor that the command inherits. Raises BuildError when it
    fails, and OSError when the log cannot be written."""
    with log_path.open("wb") as log:
        log.write(f"$ {shlex.join(step.argv)}\n".encode())
        log.flush()
        try:
            process = subprocess.Popen(
                step.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        except OSError as error:
            raise BuildError(f"{step.name}: cannot be started: {error}") from error
        try:
            _watch(step.name, process, log_path, progress)
        finally:
            _end(process)
    if process.returncode:
        raise BuildError(_failure(step, process.returncode, log_path))


def _watch(name: str, process: subprocess.Popen[bytes], log: Path, progress: Progress) -> None:
    started = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        progress(name, time.monotonic() - started, (_tail(log) or [""])[-1])
        if process.poll() is not None:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, then killed."""
    strays: set[tuple[int, str]] = set()
    try:
        if process.poll() is None:
            strays = _descendants(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
    finally:  # a second Ctrl-C only ends the waiting
        with contextlib.suppress(ProcessLookupError):  # workers too, and whoever ignored it
            os.killpg(process.pid, signal.SIGKILL)
        for pid, start in strays:
            if _stat(pid)[1:] == (start,):  # not another one with its number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> set[tuple[int, str]]:
    """Children, their children, and so on: number and start, which together are never reused."""
    parents = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found, below = set(), {pid}
    while below:
        below = {child for child, stat in parents.items() if stat and int(stat[0]) in below}
        found |= {(child, parents[child][1]) for child in below}
    return found


def _stat(pid: int) -> tuple[str, ...]:
    """Parent and start of a process; empty when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return fields[1], fields[19]


def _failure(step: Step, code: int, log_path: Path) -> str:
    words = " | ".join(_tail(log_path)[-_SHOWN_LINES:])
    how = f"ended with {code}"
    if code < 0:
        how = f"was killed by signal {-code}"
        if -code == signal.SIGKILL:
            how += " (out of memory?)"
    return f"{step.name}: {step.argv[0]} {how}: {words}; see {log_path}"


def _tail(log: Path) -> list[str]:
    """The last lines of a log, without empty ones."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    # A bar redraws its line with carriage returns; the last state counts.
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
