"""The decode benchmark runs and prints what it promises (on the tiny model; no times asserted)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perf.engine_step import BATCH_SIZES, main

pytestmark = pytest.mark.torch


def test_json_report(tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_model("llama")), "--num-threads", "1", "--steps", "4"]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [(b, 200) for b in BATCH_SIZES]
    assert all(row["ratio"] > 0 and row["ours"]["p50_ms"] > 0 for row in rows)
    assert "measuring" in captured.err


def test_a_missing_checkpoint_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path)])
    assert "no checkpoint" in capsys.readouterr().err
