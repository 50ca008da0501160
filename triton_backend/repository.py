"""Renders a model repository that tritonserver can load.

Owns the way from the templates in model_repo/ and a ServingConfig to a folder in which no `${...}`
is left. The model is named `ensemble`, the name that clients of tensorrtllm_backend use; a Python
model may carry it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tokenflow.config import ServingConfig, format_parameters
from tokenflow.errors import ConfigError

MODEL_NAME = "ensemble"
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_FILES = ("config.pbtxt", "1/model.py")


def render_repository(config: ServingConfig, target: Path) -> Path:
    """Write a ready model repository into `target` (made if missing) and return it.

    Paths in `config` are made absolute: the server does not run in the caller's folder. Raises
    ConfigError when a value cannot stand in config.pbtxt or the target cannot be written.
    """
    source = find_templates() / MODEL_NAME
    values = _parameter_values(config)
    model = target / MODEL_NAME
    try:
        for file in _FILES:
            text = (source / file).read_text(encoding="utf-8")
            if file.endswith(".pbtxt"):
                text = fill(text, values)
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


def _parameter_values(config: ServingConfig) -> dict[str, str]:
    values = format_parameters(config)
    for key in ("gpt_model_path", "tokenizer_dir", "trace_path"):
        if values[key]:
            values[key] = os.path.abspath(values[key])
    for key, value in values.items():
        if "\n" in value or "${" in value:
            raise ConfigError(key, f"cannot be written to config.pbtxt: {value!r}")
    return values
