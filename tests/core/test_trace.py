"""The trace file: what is written can be read, and a full disk costs the trace, not the server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tokenflow.trace import JsonLinesTracer


def test_lines_can_be_read_after_each_flush(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tracer = JsonLinesTracer(path)
    tracer.record("pause", 1.5, request_id="a", slack_s=2.0)
    tracer.flush()
    tracer.record("resume", 2.5, request_id="a")
    tracer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"event": "pause", "time": 1.5, "request_id": "a", "slack_s": 2.0},
        {"event": "resume", "time": 2.5, "request_id": "a"},
    ]


def test_a_full_disk_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    tracer = JsonLinesTracer(Path("/dev/full"))
    with caplog.at_level(logging.ERROR, "tokenflow"):
        for n in range(5):
            tracer.record("plan", float(n), text="x" * 10_000)
            tracer.flush()
        tracer.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_trace_that_cannot_be_opened_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        JsonLinesTracer(tmp_path / "no" / "trace.jsonl")
