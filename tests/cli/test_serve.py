"""`tokenflow serve` as a person starts it: real server, scripted engine, a stream, a clean end."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from build_engines.tiny import make_tiny_model
from triton_backend.installation import find_free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]


def read_until(stream, mark: str, limit_s: float) -> str:
    text, deadline = "", time.monotonic() + limit_s
    while mark not in text:
        assert time.monotonic() < deadline, text
        if select.select([stream], [], [], 0.2)[0]:
            chunk = os.read(stream.fileno(), 65536).decode()
            assert chunk, text
            text += chunk
    return text


def test_serve_streams_and_stops(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    ports = find_free_ports()
    command = [
        sys.executable, "-m", "tokenflow.cli.main", "serve", "--engine", "scripted",
        "--tokenizer-dir", str(model), "--http-port", str(ports.http),
        "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics),
        "--exit-timeout-s", "5",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        text = read_until(process.stdout, "Ctrl-C stops the server.", limit_s=60)
        words = shlex.split(next(line for line in text.splitlines() if "curl" in line))
        request = urllib.request.Request(words[2], data=words[words.index("-d") + 1].encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            events = [json.loads(line[5:]) for line in answer if line.startswith(b"data:")]
        assert [event["token_index"] for event in events] == sorted(
            event["token_index"] for event in events
        )
        assert events[-1]["finish_reason"] == "length"
        assert re.search(rf"gRPC streaming: +127.0.0.1:{ports.grpc}", text)
        # as Ctrl-C; SIGINT itself is ignored in children of a background job
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not list(tmp_path.glob("tokenflow-serve-*"))
    # the server is gone, so its port can be had again
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(words[2], timeout=2)
