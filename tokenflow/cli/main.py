"""`tokenflow`: the command line of the distribution.

Every subcommand ends with 0, or with a line on stderr that says what to do: 1 for a failure, 2 for
a wrong command line, 130 for Ctrl-C. Subcommands import what they need when they run, so that help
is quick and the library works without the extras.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tokenflow.cli import bench, build, doctor, model, repo, serve, size
from tokenflow.errors import TokenFlowError

_DESCRIPTION = """\
Streams a language model from Triton Inference Server and pauses streams that are ahead of their
readers, so that newcomers of a burst start at once.

Start here:  tokenflow doctor    what this machine lacks
             tokenflow serve     a server with SmolLM2-135M; prints what to try
             tokenflow demo      one burst, with and without pausing
"""
_EXTRAS = {
    "torch": "engine", "transformers": "engine", "gguf": "engine", "safetensors": "engine",
    "pytriton": "server", "tritonclient": "client", "grpc": "client", "tokenizers": "client",
    "matplotlib": "perf",
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="tokenflow",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("tokenflow-triton"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (doctor, model, serve, bench, size, build, repo):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parsed = build_parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except TokenFlowError as error:
        print(f"tokenflow: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        print(
            f"tokenflow: error: {error.name} is not installed; run: "
            f"pip install 'tokenflow-triton[{extra}]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("tokenflow: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
