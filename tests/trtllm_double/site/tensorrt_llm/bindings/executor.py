"""The double under the name of the real module; sub-module `kv_cache` is an attribute, as there."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[5])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

from tests.trtllm_double.bindings import make_module  # noqa: E402

_MODULE = make_module()
globals().update({k: v for k, v in vars(_MODULE).items() if k not in ("__name__", "__doc__")})
