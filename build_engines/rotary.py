"""Rotary positions in config.json: transformers 5 keeps them where older programs do not look.

Owns both forms: `rope_parameters` with `rope_theta` in it, as transformers 5 writes them; and
`rope_theta` and `rope_scaling` among the other fields. TensorRT-LLM 1.2's converters read the
latter alone (through transformers 4.57), and without them take a base of their own and no scaling:
an engine whose answers are noise, without a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenflow.errors import ConfigError


def require_older_names(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for what stands in `rope_parameters` alone."""
    for name, value in _older(config).items():
        if config.get(name) is None:
            raise ConfigError(
                name,
                "stands in rope_parameters alone, where TensorRT-LLM 1.2's converter does not "
                f'look; write "{name}": {json.dumps(value)} among the other fields of config.json',
            )


def add_older_names(folder: Path) -> None:
    """Give the config.json that transformers wrote into `folder` both forms."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **_older(config)}, indent=2) + "\n")


def _older(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `rope_parameters` says, in the older form; empty where it is not used."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    older: dict[str, Any] = {}
    if parameters.get("rope_theta") is not None:
        older["rope_theta"] = parameters["rope_theta"]
    if parameters.get("rope_type", "default") != "default":
        older["rope_scaling"] = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return older
