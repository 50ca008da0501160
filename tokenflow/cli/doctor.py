"""`tokenflow doctor`: what this machine lacks, each with the line to run.

Problems keep a server from running and give exit code 1; notes only limit something.
"""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

# perf_analyzer's wheel is built against this glibc; older systems get the libraries beside it.
_PERF_ANALYZER_GLIBC = (2, 38)


def add_parser(commands: Any) -> None:
    """Add `doctor` to the subcommands."""
    parser = commands.add_parser("doctor", help="check this machine, with the line to run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print problems and notes; 1 when there is a problem."""
    from triton_backend.installation import check_machine

    problems = check_machine()
    for problem in problems:
        print(f"[problem] {problem.what}\n          {problem.fix}")
    for note in notes():
        print(f"[note]    {note}")
    if not problems:
        print("[ok]      this machine can run the server")
    return 1 if problems else 0


def notes() -> list[str]:
    """What works, but not as one may expect."""
    from build_engines.fetch import default_model_path
    from tokenflow.errors import ConfigError
    from triton_backend.installation import Ports, require_free_ports

    found = []
    try:
        require_free_ports(Ports())
    except ConfigError as error:
        found.append(f"{error}; choose other ports with `tokenflow serve --http-port …`")
    if not (default_model_path() / "config.json").exists():
        found.append("the model is not here yet; `tokenflow model fetch` gets it (93 MB)")
    if glibc_version() < _PERF_ANALYZER_GLIBC:
        found.append(
            f"glibc {'.'.join(map(str, glibc_version()))} is older than perf_analyzer wants; "
            "`tokenflow burst-pa` puts newer libraries beside it, nothing is installed"
        )
    num_cores = len(os.sched_getaffinity(0))
    if num_cores < 2:
        found.append("one core: engine, server and clients share it, expect stalls in the demo")
    return found


def glibc_version() -> tuple[int, int]:
    """(major, minor) of the C library; (0, 0) where it is not glibc."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return (0, 0)
    major, minor = version.split(".")[:2]
    return (int(major), int(minor))
