"""Puts NVIDIA's perf_analyzer into a private folder, on old systems too.

`python -m perf.get_perf_analyzer [DIR]` (default: .cache/perf_analyzer) leaves DIR/perf_analyzer,
a small script that runs it. Nothing is installed on the system. The program comes as a wheel by
pip. It was built against a newer glibc than many systems have: where it does not start, the newer
C and C++ libraries are taken from a newer Debian suite by `apt-get download`, with an apt state of
our own and the mirror that this system's apt already uses, and unpacked beside it.

Invariants: DIR/perf_analyzer exists only when it has answered `--version`; a second call is free.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tokenflow.errors import TokenFlowError

VERSION = "2.60.0"
WHEEL_PLATFORM = "manylinux_2_38_x86_64"
# The Debian suite whose libraries are new enough, and the packages that the program links.
SUITE = "trixie"
LIBRARY_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "perf_analyzer"

_PLAIN_WRAPPER = """#!/bin/sh
exec "{binary}" "$@"
"""
_LOADER_WRAPPER = """#!/bin/sh
exec "{libraries}/ld-linux-x86-64.so.2" --library-path "{libraries}" "{binary}" "$@"
"""


class ToolError(TokenFlowError):
    """perf_analyzer cannot be had on this machine; the message says why."""


def get_perf_analyzer(folder: Path = DEFAULT_FOLDER) -> Path:
    """The program's path; downloads it at the first call. Raises ToolError."""
    folder = folder.resolve()
    program = folder / "perf_analyzer"
    if program.exists():
        return program
    if platform.machine() != "x86_64":
        raise ToolError(f"perf_analyzer is built for x86_64 only, this is {platform.machine()}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="work-") as scratch:
        work = Path(scratch)
        binary = _fetch_wheel(folder, work)
        wrapper = work / "perf_analyzer"
        _write_wrapper(wrapper, _PLAIN_WRAPPER.format(binary=binary))
        if not answers(wrapper):
            libraries = _fetch_libraries(folder, work)
            _write_wrapper(wrapper, _LOADER_WRAPPER.format(libraries=libraries, binary=binary))
            if not answers(wrapper):
                raise ToolError("perf_analyzer does not start, even with newer libraries")
        wrapper.rename(program)
    return program


def answers(program: Path) -> bool:
    """True if `program --version` works here."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def find_debian_mirror(apt_folder: Path = Path("/etc/apt")) -> str:
    """The Debian mirror in this system's apt sources. Raises ToolError when there is none."""
    files = [apt_folder / "sources.list", *sorted(apt_folder.glob("sources.list.d/*"))]
    for path in files:
        if not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith(("URIs:", "deb ")):
                continue
            for address in re.findall(r"https?://\S+", line):
                if re.search(r"/debian/?$", address):
                    return str(address)
    raise ToolError(
        "perf_analyzer needs a newer glibc than this system has, and no Debian mirror is known to "
        "its apt; run it on Debian 13, Ubuntu 24.04 or newer"
    )


def _fetch_wheel(folder: Path, work: Path) -> Path:
    _run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--dest", str(work),
            f"perf_analyzer=={VERSION}",
        ],
        "pip could not download perf_analyzer",
    )  # fmt: skip
    wheel = next(work.glob("perf_analyzer-*.whl"), None)
    if wheel is None:
        raise ToolError("pip downloaded no perf_analyzer wheel")
    target = folder / "wheel"
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    binary = target / "perf_analyzer" / "bin" / "perf_analyzer"
    binary.chmod(0o755)
    return binary


def _fetch_libraries(folder: Path, work: Path) -> Path:
    """Unpack the newer libraries below `folder` and return where they lie."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ToolError("perf_analyzer needs a newer glibc than this system has")
    apt = work / "apt"
    for name in ("lists/partial", "cache/archives/partial", "sources", "packages"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources" / "suite.sources").write_text(
        f"Types: deb\nURIs: {find_debian_mirror()}\nSuites: {SUITE}\nComponents: main\n"
        f"Signed-By: {KEYRING}\n"
    )
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": apt / "sources",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
    }
    command = ["apt-get", "-qq"]
    for key, value in options.items():
        command += ["-o", f"{key}={value}"]
    _run([*command, "update"], f"apt could not read the suite {SUITE}")
    _run(
        [*command, "download", *LIBRARY_PACKAGES],
        "apt could not download the libraries",
        cwd=apt / "packages",
    )
    target = folder / "root"
    shutil.rmtree(target, ignore_errors=True)
    for package in (apt / "packages").glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(target)], f"cannot unpack {package.name}")
    return target / "usr" / "lib" / "x86_64-linux-gnu"


def _run(command: list[str], failure: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-2:]
        raise ToolError(f"{failure}: {' | '.join(words)}")


def _write_wrapper(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: an optional folder."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.get_perf_analyzer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER, metavar="DIR")
    try:
        print(get_perf_analyzer(parser.parse_args(arguments).folder))
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
