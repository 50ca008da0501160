"""What a running server costs: its processes, their memory, threads and descriptors, its gauges.

Owns the way from a `TritonServer` to the processes behind it and to the numbers of its /metrics.
Reads /proc and HTTP only; nothing here changes the server.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenflow.errors import TokenFlowError
from triton_backend.launcher import TritonServer

STUB = "triton_python_backend_stub"
ENGINE = "tokenflow.executor.host"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_METRIC_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_ACTIVE_STATES = ("running", "waiting", "paused")
_HTTP_TIMEOUT_S = 10.0


class MeasurementError(TokenFlowError):
    """Something that has to be there to be measured is not."""


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """One process. rss_bytes counts shared memory that it has mapped and touched."""

    rss_bytes: int
    num_threads: int
    num_fds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The server's own numbers, as of its last metric update.

    num_active: unfinished requests; num_used_blocks: referenced KV blocks.
    """

    num_active: int
    num_held: int
    num_used_blocks: int
    healthy: bool

    @property
    def is_empty(self) -> bool:
        """Nothing is left of any request."""
        return self.num_active == self.num_held == self.num_used_blocks == 0


def descendants(pid: int) -> list[int]:
    """Process ids of all children, grandchildren, … of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    found = [pid]
    for candidate in found:
        found.extend(child for child, parent in parents.items() if parent == candidate)
    return found[1:]


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def find_processes(server: TritonServer, mark: str) -> list[int]:
    """Process ids below the server whose command line contains `mark` (STUB or ENGINE)."""
    found = []
    for pid in descendants(server.pid or 0) if server.pid else []:
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def find_process(server: TritonServer, mark: str) -> int:
    """The only such process. Raises MeasurementError when there is none, or another one."""
    found = find_processes(server, mark)
    if len(found) != 1:
        raise MeasurementError(f"expected one process {mark} of the server, found {found}")
    return found[0]


def process_cost(pid: int) -> ProcessCost:
    """What a process takes now. Raises MeasurementError when it is gone."""
    process = Path(f"/proc/{pid}")
    try:
        num_pages = int((process / "statm").read_text().split()[1])
        num_threads = len(os.listdir(process / "task"))
        num_fds = len(os.listdir(process / "fd"))
    except OSError as error:
        raise MeasurementError(f"process {pid} is gone: {error}") from error
    return ProcessCost(num_pages * _PAGE_BYTES, num_threads, num_fds)


def shm_files(prefix: str) -> list[str]:
    """Names of the shared memory files with this prefix."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def shm_bytes(prefix: str) -> int:
    """Bytes that those files occupy (allocated, not nominal)."""
    total = 0
    for name in shm_files(prefix):
        with contextlib.suppress(OSError):
            total += os.stat(f"/dev/shm/{name}").st_blocks * 512
    return total


def read_metrics(server: TritonServer) -> dict[tuple[str, str], float]:
    """Every labelled sample of /metrics, by its name and its labels besides model and version."""
    host, port = server.metrics_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    values = {}
    for line in text.splitlines():
        match = _METRIC_LINE.fullmatch(line)
        if match:
            labels = [
                label
                for label in match.group(2).split(",")
                if label and not label.startswith(("model=", "version="))
            ]
            values[match.group(1), ",".join(labels)] = float(match.group(3))
    return values


def gauges_of(values: Mapping[tuple[str, str], float]) -> Gauges:
    """The gauges among the samples that `read_metrics` gave."""
    active = [values["tokenflow_active_requests", f'state="{state}"'] for state in _ACTIVE_STATES]
    return Gauges(
        num_active=int(sum(active)),
        num_held=int(values["tokenflow_held_requests", ""]),
        num_used_blocks=int(values["tokenflow_kv_blocks", 'state="used"']),
        healthy=values["tokenflow_healthy", ""] == 1.0,
    )


def wait_empty(server: TritonServer, timeout_s: float) -> Gauges:
    """Wait until nothing is left of any request; the gauges then, or the last ones seen when the
    time is over. Blocks."""
    deadline = time.monotonic() + timeout_s
    while True:
        gauges = gauges_of(read_metrics(server))
        if gauges.is_empty or time.monotonic() > deadline:
            return gauges
        time.sleep(0.05)


def log_faults(server: TritonServer) -> list[str]:
    """The exceptions in the server's log, each as its last line."""
    faults = []
    parts = server.log_path.read_text(errors="replace").split("Traceback (most recent call last):")
    for part in parts[1:]:
        ends = (line for line in part.splitlines()[1:] if line and not line.startswith(" "))
        faults.append(f"in the server's log: {next(ends, 'a cut traceback')}")
    return faults
