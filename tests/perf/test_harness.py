"""The client process of a benchmark run: its progress, its end, and the bound on its time."""

from __future__ import annotations

import sys

import pytest

from perf.analysis import BenchmarkError
from perf.harness import run_client

_SILENT = "import time; time.sleep(600)"
_TALKS_FOR_EVER = "while True: print(1, flush=True)"
_CLOSES_ITS_OUTPUT = "import os, time; os.close(1); time.sleep(600)"


def test_progress_lines_are_counted_and_the_exit_code_comes_back() -> None:
    code = """
import sys
print('{"tokens": 3}')
print("no progress, but a word of some library")
print(5)
print('{"other": 1}')
print('{"tokens": 8}')
sys.exit(7)
"""
    seen: list[int] = []
    assert run_client([sys.executable, "-c", code], seen.append, limit_s=60.0) == 7
    assert seen == [3, 8]


@pytest.mark.parametrize("code", [_SILENT, _TALKS_FOR_EVER, _CLOSES_ITS_OUTPUT])
def test_a_client_that_does_not_end_is_killed(code: str) -> None:
    with pytest.raises(BenchmarkError, match="did not end within 1 s"):
        run_client([sys.executable, "-c", code], lambda tokens: None, limit_s=1.0)
