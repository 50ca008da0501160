"""Flags made from `ServingConfig`, so that a parameter is described in one place.

Invariant: every field of ServingConfig is a flag of `tokenflow serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from tokenflow.config import ServingConfig, parse_parameters

_DEST_PREFIX = "config_"


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field; values stay text and are judged by `parse_parameters`."""
    group = parser.add_argument_group(
        "server parameters", "the names of config.pbtxt, with dashes; see docs/operations.md"
    )
    for field in dataclasses.fields(ServingConfig):
        boolean = isinstance(field.default, bool)
        group.add_argument(
            flag_name(field.name),
            dest=_DEST_PREFIX + field.name,
            choices=field.metadata["choices"] or (("true", "false") if boolean else None),
            metavar=None if boolean or field.metadata["choices"] else "VALUE",
            help=_help(field.metadata["help"], field.default),
        )


def config_from_flags(arguments: argparse.Namespace, **overrides: str) -> ServingConfig:
    """The configuration that the flags describe; `overrides` fill those that were not given.

    Raises ConfigError naming the parameter.
    """
    values = dict(overrides)
    for field in dataclasses.fields(ServingConfig):
        given = getattr(arguments, _DEST_PREFIX + field.name)
        if given is not None:
            values[field.name] = given
    return parse_parameters(values)


def flag_name(field_name: str) -> str:
    """`--max-batch-size` of `max_batch_size`."""
    return "--" + field_name.replace("_", "-")


def _help(text: str, default: Any) -> str:
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    described = f"{text} (default: {shown})" if shown else text
    return described.replace("%", "%%")
