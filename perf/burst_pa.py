"""The demo's burst by NVIDIA's own tool: perf_analyzer against a real server, once per policy.

What `tokenflow burst-pa` runs. perf_analyzer sends the same prompts at the same times over gRPC
streaming: `--request-intervals` makes the gaps, and a `read_rate` tensor per request tells how fast
its reader reads. Latencies come from its own export: what it prints for a decoupled model is the
time to the last token. A failed request raises BenchmarkError. Writes burst_pa.json, with the keys
of demo.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perf.analysis import BenchmarkError, failure
from perf.client import MODEL_NAME, ClientRecord, WorkloadRecord
from perf.comparison import compare, publish
from perf.get_perf_analyzer import get_perf_analyzer
from perf.workloads import ClientRequest
from tokenflow.metrics import percentile
from tokenflow.progress import Waiting
from triton_backend.launcher import TritonServer

RUN_TIMEOUT_S = 300.0
_LEAD_IN_US = 1000
_NS = 1e-9


def input_data(requests: Sequence[ClientRequest]) -> dict[str, Any]:
    """perf_analyzer's `--input-data`: one entry per request, in order of sending."""
    return {
        "data": [
            {
                "text_input": [request.prompt],
                "max_tokens": [request.max_tokens],
                "stream": [True],
                "end_id": [-1],
                "read_rate": [float(request.read_rate)],
                "return_num_output_tokens": [True],
            }
            for request in requests
        ]
    }


def request_intervals(requests: Sequence[ClientRequest]) -> list[int]:
    """perf_analyzer's `--request-intervals`: microseconds before each request."""
    offsets = [request.send_offset_s for request in requests]
    gaps = [round(gap * 1e6) for gap in np.diff(offsets)]
    return [_LEAD_IN_US, *(max(1, gap) for gap in gaps)]


def read_export(
    export: Mapping[str, Any], requests: Sequence[ClientRequest], clock_offset_s: float
) -> list[ClientRecord]:
    """Records of `--profile-export-file`, in the order of `requests`.

    clock_offset_s: what to add to the export's system clock to get CLOCK_MONOTONIC. A request is
    recognised by its prompt. A response counts `num_output_tokens` tokens; an empty final one, if
    there is any, counts none. Raises BenchmarkError when a request is missing or was sent twice.
    """
    by_prompt = {request.prompt: request for request in requests}
    found: dict[str, ClientRecord] = {}
    for entry in export["experiments"][0]["requests"]:
        prompt = _scalar(entry["request_inputs"]["text_input"])
        request = by_prompt.get(prompt)
        if request is None or request.request_id in found:
            raise BenchmarkError(f"perf_analyzer sent an unexpected request: {prompt[:60]!r}")
        record = ClientRecord(
            request_id=request.request_id,
            kind=request.kind,
            read_rate=request.read_rate,
            max_tokens=request.max_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            send_time=entry["timestamp"] * _NS + clock_offset_s,
        )
        for at, outputs in zip(
            entry["response_timestamps"], entry["response_outputs"], strict=True
        ):
            num_tokens = int(_scalar(outputs.get("num_output_tokens", 0)) or 0)
            record.token_times.extend([at * _NS + clock_offset_s] * num_tokens)
            record.text += str(_scalar(outputs.get("text_output", "")))
            record.finish_reason = (
                str(_scalar(outputs.get("finish_reason", ""))) or record.finish_reason
            )
        found[request.request_id] = record
    missing = [request.request_id for request in requests if request.request_id not in found]
    if missing:
        raise BenchmarkError(f"perf_analyzer reports no answer for {', '.join(missing)}")
    return [found[request.request_id] for request in requests]


def play_with_perf_analyzer(
    server: TritonServer, requests: list[ClientRequest], folder: Path, label: str
) -> WorkloadRecord:
    """Let perf_analyzer send the requests. Raises BenchmarkError when any of them failed."""
    program = get_perf_analyzer()
    data, intervals, export = (folder / name for name in ("in.json", "gaps.txt", "export.json"))
    data.write_text(json.dumps(input_data(requests)))
    intervals.write_text("".join(f"{gap}\n" for gap in request_intervals(requests)))
    command = [
        str(program), "-m", MODEL_NAME, "-u", server.grpc_url, "-i", "grpc", "--streaming",
        "--async", "--input-data", str(data), "--request-intervals", str(intervals),
        "--request-count", str(len(requests)), "--profile-export-file", str(export),
    ]  # fmt: skip
    start, clock_offset_s = time.monotonic(), time.monotonic() - time.time()
    _run(command, folder / "perf_analyzer.log", label)
    if not export.exists():
        raise BenchmarkError("perf_analyzer wrote no export")
    clients = read_export(json.loads(export.read_text()), requests, clock_offset_s)
    return WorkloadRecord(
        start_time=start, end_time=time.monotonic(), cpu_s=None, clients=clients, lags=[]
    )


def inter_token_s(record: WorkloadRecord) -> list[float]:
    """Gaps between tokens as they arrived, of all requests."""
    gaps = [np.diff(np.asarray(client.token_times)) for client in record.clients]
    return [float(gap) for gap in np.concatenate(gaps)]


def _run(command: Sequence[str], log_path: Path, label: str) -> None:
    with log_path.open("wb") as log, Waiting(f"{label}: perf_analyzer sends the burst") as waiting:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                waiting()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        raise BenchmarkError(f"perf_analyzer ended with {process.returncode}\n{tail}")


def _scalar(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def run(arguments: argparse.Namespace) -> int:
    """Run the burst as its flags say. Raises TokenFlowError."""
    get_perf_analyzer()
    played, result = compare(arguments, play_with_perf_analyzer)
    for name, runs in played.items():
        gaps = [gap for one in runs for gap in inter_token_s(one.record)]
        result[name]["inter_token_p50_s"] = percentile(gaps, 50)
        result[name]["inter_token_p99_s"] = percentile(gaps, 99)
    clients = [client for runs in played.values() for one in runs for client in one.record.clients]
    num_failed = sum(failure(client) is not None for client in clients)
    result["failed_requests"] = num_failed
    remark = f"{num_failed} of {len(clients)} requests failed, by perf_analyzer's own export"
    publish("burst_pa", result, arguments, [remark])
    return 0
