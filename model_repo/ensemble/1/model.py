"""Import shim: Triton loads this file; the model itself is triton_backend.model.

The server's Python sees the site-packages of its environment but no PYTHONPATH, so the package is
taken from there if installed, else from the checkout that the repository was rendered from, else
from the checkout that holds this file.
"""

import importlib.util
import sys
from pathlib import Path

_PACKAGE_ROOT = "${package_root}"


def _make_importable() -> None:
    if importlib.util.find_spec("triton_backend") is not None:
        return
    for root in (Path(_PACKAGE_ROOT), *Path(__file__).resolve().parents):
        if (root / "triton_backend" / "model.py").exists():
            sys.path.insert(0, str(root))
            return
    raise ImportError("tokenflow-triton is not installed for the server's Python: " + sys.prefix)


_make_importable()

from triton_backend.model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
