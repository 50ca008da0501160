"""TritonPythonModel and the reading of Triton's requests, beside a stand-in for Triton's utilities,
which exist in its stub only."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_STAND_IN = """
import json, sys, types
class Anything(types.ModuleType):
    def __getattr__(self, name): return Anything
sys.modules["triton_python_backend_utils"] = Anything("x")
"""


def run(code: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", _STAND_IN + code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_ready_is_what_the_runtime_says() -> None:
    answers = run(
        "from tokenflow.runtime import RuntimeGauges\n"
        "from triton_backend.model import TritonPythonModel\n"
        "class Runtime:\n"
        "    healthy = True\n"
        "    def gauges(self): return RuntimeGauges(healthy=self.healthy)\n"
        "model = TritonPythonModel()\n"
        "model._runtime = runtime = Runtime()\n"
        "answers = [model.is_ready()]\n"
        "runtime.healthy = False\n"
        "print(json.dumps([*answers, model.is_ready()]))\n"
    )
    assert answers == [True, False]


def test_a_time_limit_is_found_wherever_triton_puts_it() -> None:
    """gRPC's is taken out of the parameters, that of HTTP generate stays there."""
    found = run(
        "from triton_backend.triton_io import read_request\n"
        "class Request:\n"
        "    def __init__(self, timeout, parameters): self.t, self.p = timeout, parameters\n"
        "    def inputs(self): return []\n"
        "    def parameters(self): return self.p\n"
        "    def timeout(self): return self.t\n"
        "    def request_id(self): return 'r'\n"
        "    def requested_output_names(self): return []\n"
        "cases = [(0, ''), (5, '{}'), (0, '{\"timeout\": 7, \"id\": \"r\"}')]\n"
        "print(json.dumps([read_request(Request(*case)).parameters for case in cases]))\n"
    )
    assert found == [{}, {"timeout": 5}, {"timeout": 7, "id": "r"}]
