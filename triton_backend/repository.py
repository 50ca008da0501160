"""Renders a model repository that tritonserver can load.

Owns the way from the templates in model_repo/ and a ServingConfig to a folder in which no `${...}`
is left and each parameter has its description above it; and what a repository may ask of Triton.
The model is named `ensemble`, the name that clients of tensorrtllm_backend use; a Python model may
carry it. Several engines of one server are several models, each with a name of its own.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenflow.config import ServingConfig, format_parameters
from tokenflow.errors import ConfigError

MODEL_NAME = "ensemble"
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_PARAMETER = re.compile(r'^parameters \{ key: "(\w+)"')
_NAME_LINE = f'name: "{MODEL_NAME}"\n'
_FILES = ("config.pbtxt", "1/model.py")


def render_repository(config: ServingConfig, target: Path, model_name: str = MODEL_NAME) -> Path:
    """Write a ready model into the repository `target` (made if missing) and return `target`.

    model_name: of the model's folder, for a repository with several. Paths in `config` are made
    absolute: the server does not run in the caller's folder. Raises ConfigError when a value cannot
    stand in config.pbtxt or the target cannot be written.
    """
    source = find_templates() / MODEL_NAME
    values = _parameter_values(config)
    model = target / model_name
    try:
        for file in _FILES:
            text = (source / file).read_text(encoding="utf-8")
            if file.endswith(".pbtxt"):
                text = _describe(fill(text, values))
                text = text.replace(_NAME_LINE, f'name: "{model_name}"\n', 1)
            else:
                text = fill(text, {"package_root": str(_PACKAGE_ROOT)})
            (model / file).parent.mkdir(parents=True, exist_ok=True)
            (model / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("model_repository", f"cannot write {model}: {error}") from error
    return target


def find_templates() -> Path:
    """The model_repo/ folder beside this package, in a checkout as in an installation."""
    folder = _PACKAGE_ROOT / "model_repo"
    if not (folder / MODEL_NAME / "config.pbtxt").exists():
        raise ConfigError("model_repository", f"the templates are missing ({folder})")
    return folder


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with every `${key}` replaced. Raises ConfigError for a key without a value."""

    def value(match: re.Match[str]) -> str:
        key = match.group(1)
        if key not in values:
            raise ConfigError(key, "the template asks for a value that is not configured")
        return values[key].replace("\\", "\\\\").replace('"', '\\"')

    # Comments may mention placeholders; only lines that are not comments are filled.
    lines = text.splitlines(keepends=True)
    return "".join(
        line if line.lstrip().startswith("#") else _PLACEHOLDER.sub(value, line) for line in lines
    )


def require_one_instance(model_config: Mapping[str, Any]) -> None:
    """Raises ConfigError unless Triton runs this model once.

    Each instance would load an engine of its own, on the same GPU, and a pause could reach another
    instance than the request it is about. model_config: as Triton gives it, defaults filled in.
    """
    groups = model_config.get("instance_group") or [{}]
    count = sum(int(group.get("count") or 1) * len(group.get("gpus") or [0]) for group in groups)
    if count != 1:
        raise ConfigError(
            "instance_group",
            f"asks for {count} instances, must be 1; several engines are several models: "
            "tokenflow repo render --gpus",
        )


def _describe(text: str) -> str:
    """config.pbtxt with a comment above each parameter: what ServingConfig says of it."""
    fields = {field.name: field for field in dataclasses.fields(ServingConfig)}
    defaults = format_parameters(ServingConfig())
    lines = []
    for line in text.splitlines(keepends=True):
        match = _PARAMETER.match(line)
        if match is not None:
            name = match.group(1)
            default = defaults[name] or "empty"
            lines.append(f"# {name}: {fields[name].metadata['help']} (default: {default})\n")
        lines.append(line)
    return "".join(lines)


def _parameter_values(config: ServingConfig) -> dict[str, str]:
    values = format_parameters(config)
    for key in ("gpt_model_path", "tokenizer_dir", "trace_path", "lora_prefetch_dir"):
        if values[key]:
            values[key] = os.path.abspath(values[key])
    for key, value in values.items():
        if "\n" in value or "${" in value:
            raise ConfigError(key, f"cannot be written to config.pbtxt: {value!r}")
    return values
