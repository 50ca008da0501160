"""`tokenflow repo render`: a Triton model repository for what was built.

Owns its flags. The parameters follow from the manifest (build_engines.serving), the files are
written by triton_backend.repository. Invariant: a repository holds the models that were asked for
and no others, or nothing is written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenflow.errors import ConfigError

_DESCRIPTION = """\
Writes a complete model repository: for an engine that `tokenflow build` made, or for the embedded
engine and a checkpoint. Every parameter of the server can be given with --set; an unknown one is an
error."""


def add_parser(commands: Any) -> None:
    """Add `repo render` to the subcommands."""
    parser = commands.add_parser("repo", help="a Triton model repository for an engine")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    render = actions.add_parser(
        "render", help="write the repository", description=_DESCRIPTION
    )  # fmt: skip
    source = render.add_argument_group("what is served")
    source.add_argument("--engine-dir", type=Path, metavar="DIR", help="output of tokenflow build")
    source.add_argument("--manifest", type=Path, metavar="FILE", help="its manifest.json instead")
    source.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="checkpoint for the embedded engine"
    )
    render.add_argument(
        "--engine",
        default=None,
        metavar="NAME",
        help="trtllm, inflight (default: trtllm for a build, inflight for a checkpoint)",
    )
    render.add_argument(
        "--output", type=Path, required=True, metavar="REPO", help="folder to write"
    )
    render.add_argument(
        "--gpus",
        metavar="SETS",
        help='one engine for each set of GPUs: "0;1", or "0,1;2,3" with two GPUs each',
    )
    render.add_argument(
        "--split", action="store_true", help="sets may share GPUs: memory in even parts"
    )
    render.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="server parameter (repeatable)",
    )
    render.set_defaults(run=run_render)


def run_render(arguments: argparse.Namespace) -> int:
    """Write the repository and print its models. Raises ConfigError."""
    from build_engines import serving
    from triton_backend.repository import render_repository

    source = serving.find_source(
        _absolute(arguments.engine_dir),
        _absolute(arguments.manifest),
        _absolute(arguments.checkpoint),
    )
    default = serving.INFLIGHT if source.manifest is None else serving.TRTLLM
    models = serving.serving_models(
        source,
        arguments.engine or default,
        _settings(arguments.settings),
        serving.parse_gpus(arguments.gpus) if arguments.gpus is not None else (),
        split=arguments.split,
    )
    _require_own_folder(arguments.output, [model.name for model in models])
    for model in models:
        render_repository(model.config, arguments.output, model.name)
    print(f"{arguments.output}: {', '.join(model.name for model in models)}")
    return 0


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("set", f"wants NAME=VALUE, got {pair!r}")
        if name in settings:
            raise ConfigError(name, "is given twice")
        if "${" in value:
            raise ConfigError(name, f"must be filled in, got {value!r}")
        settings[name] = value
    return settings


def _require_own_folder(folder: Path, names: Sequence[str]) -> None:
    """The server loads every folder that it finds: one of an older rendering would be served."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("output", f"{folder} is not a folder")
    try:
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ConfigError("output", f"{folder} cannot be read: {error}") from error
    for name in found:
        if name not in names:
            raise ConfigError(
                "output", f"{folder} holds {name}, which is not part of it; move it away"
            )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()
