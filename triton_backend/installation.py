"""Finds a tritonserver on this machine and says what is missing to run it.

Owns the knowledge of where server, stub and shared libraries lie: in the `nvidia-pytriton` wheel of
this environment, else under /opt/tritonserver. The server's Python stub links libpython3.X.so, has
its prefix from the first `python3` on PATH and ignores PYTHONPATH; hence `environment`.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenflow.errors import ConfigError, TokenFlowError

SYSTEM_ROOT = Path("/opt/tritonserver")
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_STUB = "triton_python_backend_stub"
_MIN_SHM_BYTES = 64 * 1024 * 1024
_PYTHON_LOW, _PYTHON_HIGH = (3, 10), (3, 12)


class InstallationError(TokenFlowError):
    """No usable tritonserver; the message names the line to run."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """TCP ports of one server."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that keeps a server from running here. fix: the line to run, or what to change."""

    what: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Where the pieces are.

    libraries: folders for LD_LIBRARY_PATH, in order.
    needs_numpy_1: the stub was built before numpy 2 and misreads strings with it.
    """

    binary: Path
    backend_files: tuple[Path, ...]
    stub: Path
    libraries: tuple[Path, ...]
    needs_numpy_1: bool

    def make_backend_directory(self, target: Path) -> Path:
        """Lay out `target`/python with the backend and the stub of this Python; returns target.

        Links, not copies: nothing is written into the wheel, and several servers share it.
        """
        folder = target / "python"
        folder.mkdir(parents=True, exist_ok=True)
        for source in (*self.backend_files, self.stub):
            link = folder / source.name
            if not link.exists():
                link.symlink_to(source)
        return target

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with LD_LIBRARY_PATH and PATH so that server, stub and engine find theirs."""
        result = dict(base)
        folders = [str(folder) for folder in self.libraries]
        libpython = find_libpython()
        if libpython is not None:
            folders.append(str(libpython.parent))
        result["LD_LIBRARY_PATH"] = _joined(folders, base.get("LD_LIBRARY_PATH", ""))
        result["PATH"] = _joined([str(Path(sys.prefix) / "bin")], base.get("PATH", os.defpath))
        return result


def find_installation() -> Installation:
    """The server of the wheel, else the system's. Raises InstallationError with what to do."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        return _wheel_installation(Path(next(iter(spec.submodule_search_locations))))
    if (SYSTEM_ROOT / "bin" / "tritonserver").exists():
        return _system_installation(SYSTEM_ROOT)
    raise InstallationError(
        "no tritonserver found: neither the nvidia-pytriton wheel nor /opt/tritonserver; "
        "run: pip install 'tokenflow-triton[server]'"
    )


def find_free_ports(host: str = "127.0.0.1") -> Ports:
    """Three ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(3)]
    try:
        for sock in sockets:
            sock.bind((host, 0))
        http, grpc, metrics = (sock.getsockname()[1] for sock in sockets)
    finally:
        for sock in sockets:
            sock.close()
    return Ports(http=http, grpc=grpc, metrics=metrics)


def require_free_ports(ports: Ports, host: str = "127.0.0.1") -> None:
    """Raises ConfigError naming the host if it is no IPv4 address of this machine, or the first
    port that is no port, given twice, or in use."""
    try:
        find_free_ports(host)
    except OSError as error:
        raise ConfigError("host", f"{host} cannot be used: {error}") from None
    taken: dict[int, str] = {}
    for name in ("http", "grpc", "metrics"):
        port = getattr(ports, name)
        if not 1 <= port <= 65_535:
            raise ConfigError(f"{name}_port", f"must be in [1, 65535], got {port}")
        if port in taken:
            raise ConfigError(f"{name}_port", f"{port} is the {taken[port]}_port already")
        taken[port] = name
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                raise ConfigError(f"{name}_port", f"{port} cannot be used: {error}") from None


def find_libpython() -> Path | None:
    """libpython3.X.so.1.0 of this Python's version, where the build or the loader has it."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        str(Path(sys.base_prefix) / "lib"),
        f"/usr/lib/{platform.machine()}-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ]
    for folder in folders:
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    # Somewhere else on the loader's path: the folder does not matter then, the name does.
    found = ctypes.util.find_library(f"python{sys.version_info.major}.{sys.version_info.minor}")
    return Path("/usr/lib") / found if found else None


def check_machine(
    ports: Ports | None = None,
    *,
    host: str = "127.0.0.1",
    shm_path: Path = Path("/dev/shm"),
    python_version: Sequence[int] = tuple(sys.version_info[:2]),
) -> list[Problem]:
    """Everything that would keep a server from running here; empty when all is well.

    ports: also check that these are free.
    """
    version = ".".join(map(str, python_version))
    problems = []
    if not _PYTHON_LOW <= tuple(python_version) <= _PYTHON_HIGH:
        problems.append(
            Problem(
                what=f"Python {version}: the server's stub needs numpy < 2, so Python 3.10 to 3.12",
                fix="make setup PYTHON=python3.12   # or python3.11, python3.10",
            )
        )
    if find_libpython() is None:
        problems.append(
            Problem(
                what=f"libpython{version}.so.1.0 is missing; the server's stub links it",
                fix=f"sudo apt-get install libpython{version}   # Debian and Ubuntu",
            )
        )
    problems += _package_problems()
    problems += _shm_problems(shm_path)
    if ports is not None:
        try:
            require_free_ports(ports, host)
        except ConfigError as error:
            problems.append(Problem(what=str(error), fix="choose others: tokenflow serve -h"))
    return problems


def _package_problems() -> list[Problem]:
    try:
        installation = find_installation()
    except InstallationError as error:
        return [Problem(what=str(error).split(";")[0], fix="make setup")]
    if not installation.needs_numpy_1:
        return []
    problems = []
    try:
        numpy_version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        problems.append(Problem(what="numpy is not installed", fix="pip install 'numpy<2'"))
    else:
        if int(numpy_version.split(".")[0]) >= 2:
            problems.append(
                Problem(
                    what=f"numpy {numpy_version}: the server's stub needs numpy 1",
                    fix="pip install 'numpy<2'",
                )
            )
    return problems


def _shm_problems(path: Path) -> list[Problem]:
    fix = "run the container with --shm-size=1g, or: sudo mount -o remount,size=1g /dev/shm"
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return [Problem(what=f"{path} cannot be used: {error}", fix=fix)]
    if not os.access(path, os.W_OK):
        return [Problem(what=f"{path} is not writable for this user", fix=fix)]
    if free < _MIN_SHM_BYTES:
        free_mib, need_mib = free // 2**20, _MIN_SHM_BYTES // 2**20
        return [Problem(what=f"{path} has {free_mib} MiB free, needs {need_mib}", fix=fix)]
    return []


def _wheel_installation(package: Path) -> Installation:
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / _STUB
    if not stub.exists():
        raise InstallationError(f"nvidia-pytriton has no stub for Python {version} ({stub})")
    return Installation(
        binary=root / "bin" / "tritonserver",
        backend_files=tuple(root / "backends" / "python" / name for name in _BACKEND_FILES),
        stub=stub,
        libraries=(package.parent / "nvidia_pytriton.libs",),
        needs_numpy_1=True,
    )


def _system_installation(root: Path) -> Installation:
    backend = root / "backends" / "python"
    return Installation(
        binary=root / "bin" / "tritonserver",
        backend_files=tuple(backend / name for name in _BACKEND_FILES),
        stub=backend / _STUB,
        libraries=(root / "lib",),
        needs_numpy_1=False,
    )


def _joined(first: list[str], rest: str) -> str:
    return os.pathsep.join([*first, rest] if rest else first)
