"""Import shim: Triton loads this file; the model itself is triton_backend.model.

The server's Python sees the site-packages of its environment but no PYTHONPATH. The package is
taken from where the repository was rendered, so that both are of one version; where that is gone,
from the environment if it is installed there, else from the checkout that holds this file.
"""

import importlib.util
import sys
from pathlib import Path

_PACKAGE_ROOT = "${package_root}"


def _make_importable() -> None:
    rendered_from, *parents = Path(_PACKAGE_ROOT), *Path(__file__).resolve().parents
    if not _holds_package(rendered_from) and importlib.util.find_spec("triton_backend") is not None:
        return
    for root in (rendered_from, *parents):
        if _holds_package(root):
            sys.path.insert(0, str(root))
            return
    raise ImportError("tokenflow-triton is not installed for the server's Python: " + sys.prefix)


def _holds_package(root: Path) -> bool:
    return (root / "triton_backend" / "model.py").exists()


_make_importable()

from triton_backend.model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
