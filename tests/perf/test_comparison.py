"""The demo's whole way, small: real servers with the scripted engine, both policies, the files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from build_engines.tiny import make_tiny_model
from perf import burst_pa
from perf.analysis import BenchmarkError
from perf.comparison import collect, find_model, parse_settings, publish, run_interleaved
from perf.demo import play_demo
from perf.report import format_table
from perf.workloads import NEWCOMER, READER, ClientRequest, FileTokenizer

SETTINGS = {
    "engine": "scripted",
    "scripted_step_s": "0.02",
    "max_batch_size": "2",
    "tokens_per_block": "16",
    "max_tokens_in_paged_kv_cache": "512",
    "slack_margin_s": "0.1",
    "min_quantum_s": "0.05",
}


def make_requests(tokenizer: FileTokenizer) -> list[ClientRequest]:
    def request(kind: str, index: int, max_tokens: int, offset: float) -> ClientRequest:
        prompt = f"{kind} number {index} asks for something to read"
        return ClientRequest(
            request_id=f"{kind}-{index}",
            kind=kind,
            prompt=prompt,
            num_prompt_tokens=len(tokenizer.encode(prompt)),
            max_tokens=max_tokens,
            read_rate=10.0,
            send_offset_s=offset,
        )

    readers = [request(READER, index, 120, 0.0) for index in range(2)]
    return readers + [request(NEWCOMER, index, 8, 1.2) for index in range(2)]


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.torch
def test_newcomers_start_sooner_and_the_trace_explains_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = {**SETTINGS, "tokenizer_dir": str(model)}
    requests = make_requests(FileTokenizer(model))
    played = run_interleaved(1, requests, play_demo, model, settings)
    result = collect(played, requests, settings)
    (fcfs,), (tokenflow,) = played["fcfs"], played["tokenflow"]
    # the baseline kept its two slots full while the newcomers waited, and paused nobody
    assert fcfs.batch.num_full > 10
    assert fcfs.batch.idle_times == ()
    assert fcfs.run.num_pauses == 0
    assert tokenflow.run.num_pauses >= 1
    assert result["tokenflow"]["ttft_worst_s"] < 0.6 * result["fcfs"]["ttft_p50_s"]
    assert result["ratio"]["ttft_p50_s"] < 0.6
    # Γ is about 2 tokens in 20 ms
    assert 0.3 < fcfs.run.load < 1.0
    assert json.loads(json.dumps(result)) == result
    assert "first token, P50" in format_table(result)
    check_published(result, tmp_path / "results", capsys)


def check_published(
    result: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    publish("demo", result, argparse.Namespace(results=folder, json=False), ["a remark"])
    out = capsys.readouterr()
    assert format_table(result) in out.out
    assert f"a remark\nwritten: {folder / 'demo.json'}\n" in out.out
    assert json.loads((folder / "demo.json").read_text()) == result
    publish("demo", result, argparse.Namespace(results=folder, json=True), ["a remark"])
    out = capsys.readouterr()
    assert json.loads(out.out) == result
    assert out.err == ""  # the documents are not made from this folder


def test_settings_are_laid_over_the_demo_s() -> None:
    settings = parse_settings(["num_threads=2", "max_batch_size=4"])
    assert settings["num_threads"] == "2"
    assert settings["max_batch_size"] == "4"
    assert settings["max_tokens_in_paged_kv_cache"] == "4096"
    with pytest.raises(BenchmarkError, match="NAME=VALUE"):
        parse_settings(["num_threads"])
    with pytest.raises(BenchmarkError, match="--set scheduling_policy: each run has its own"):
        parse_settings(["scheduling_policy=fcfs-reserve"])


def test_a_folder_without_a_tokenizer_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(BenchmarkError, match=r"no tokenizer\.json at"):
        find_model(tmp_path)


def test_inter_token_gaps_do_not_cross_requests() -> None:
    from perf.client import ClientRecord, WorkloadRecord

    def client(times: list[float]) -> ClientRecord:
        return ClientRecord(
            request_id="r",
            kind=READER,
            read_rate=1,
            max_tokens=2,
            num_prompt_tokens=1,
            token_times=times,
        )

    record = WorkloadRecord(
        start_time=0,
        end_time=9,
        cpu_s=None,
        clients=[client([1, 3]), client([10, 10.5])],
        lags=[],
    )
    assert burst_pa.inter_token_s(record) == [2.0, 0.5]
