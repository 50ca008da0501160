"""The demo of both KV tiers: its whole way, small; what it refuses to call a result; its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_engines.tiny import make_tiny_model
from perf.analysis import BenchmarkError
from perf.demo_kv import VARIANTS, collect, run_interleaved
from perf.demo_kv_checks import check_baseline, fullest_capacity, peak_pool_share
from perf.demo_kv_table import format_table, markdown_table, verdicts
from perf.trace_view import Iteration, RequestTimes, Trace
from perf.workloads import (
    KV_DEMO_ENGINE,
    NEWCOMER,
    READER,
    ClientRequest,
    FileTokenizer,
    kv_demo_workload,
)
from tests.perf.test_workloads import WordTokenizer

SETTINGS = {
    "engine": "scripted",
    "scripted_step_s": "0.02",
    "max_batch_size": "12",
    "tokens_per_block": "16",
    "max_tokens_in_paged_kv_cache": "304",
    "kv_cache_host_memory_bytes": str(64 * 16 * 1024),
    "slack_margin_s": "0.1",
    "min_quantum_s": "0.05",
}


def make_requests(tokenizer: FileTokenizer) -> list[ClientRequest]:
    def request(kind: str, index: int, max_tokens: int, offset: float) -> ClientRequest:
        prompt = f"{index}. {kind} asks for something to read"
        return ClientRequest(
            request_id=f"{kind}-{index}",
            kind=kind,
            prompt=prompt,
            num_prompt_tokens=len(tokenizer.encode(prompt)),
            max_tokens=max_tokens,
            read_rate=10.0,
            send_offset_s=offset,
        )

    readers = [request(READER, index, 120, 0.1 * index) for index in range(4)]
    return readers + [request(NEWCOMER, index, 8, 1.6) for index in range(2)]


@pytest.mark.e2e
@pytest.mark.alone
@pytest.mark.torch
def test_the_pool_is_short_and_the_host_makes_room(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    settings = {**SETTINGS, "tokenizer_dir": str(model)}
    variants = [v for v in VARIANTS if v.name in ("fcfs", "tokenflow_tiering")]
    requests = make_requests(FileTokenizer(model))
    result = collect(run_interleaved(1, requests, model, settings, variants), settings, variants)
    assert json.loads(json.dumps(result)) == result
    assert result["fcfs"]["num_pauses"] == result["fcfs"]["num_internal_pauses"] == 0
    values = result["tokenflow_tiering"]
    assert values["ttft_p99_ratio"] < 0.5
    assert values["num_pauses"] > 0
    assert values["num_offloaded_blocks"] > 0
    assert values["num_onboarded_blocks"] > 0
    assert values["num_recomputed_tokens"] == 0, "the host has room for all"
    assert values["peak_pool_share"] > 0.9
    assert values["peak_slots"] < 12
    assert [run["name"] for run in result["runs"]] == [v.name for v in variants]
    assert "KvTiering" in format_table(result)


def test_the_workload_is_as_documented() -> None:
    requests = kv_demo_workload(WordTokenizer())
    assert kv_demo_workload(WordTokenizer()) == requests
    readers = [r for r in requests if r.kind == READER]
    newcomers = [r for r in requests if r.kind == NEWCOMER]
    assert all(300 <= r.num_prompt_tokens <= 400 and 240 <= r.max_tokens <= 320 for r in readers)
    assert all(30 <= r.num_prompt_tokens <= 60 and 40 <= r.max_tokens <= 60 for r in newcomers)
    assert len({r.prompt[:40] for r in requests}) == len(requests), "nothing is shared"
    assert len(requests) < int(KV_DEMO_ENGINE["max_batch_size"])
    num_blocks = int(KV_DEMO_ENGINE["max_tokens_in_paged_kv_cache"]) // 32
    assert sum(r.num_blocks(32) for r in readers) > 1.5 * num_blocks


def make_trace(num_scheduled: list[int], num_blocks: list[int], arrivals: list[float]) -> Trace:
    """Steps of 0.1 s from 10 s on; requests of these reservations."""
    return Trace(
        requests={
            str(i): RequestTimes(
                request_id=str(i),
                arrival_time=at,
                num_prompt_tokens=1,
                max_tokens=1,
                num_blocks=size,
                end_time=None,
                pauses=(),
            )
            for i, (size, at) in enumerate(zip(num_blocks, arrivals, strict=True))
        },
        iterations=[
            Iteration(
                number=i,
                start_time=10 + 0.1 * i,
                end_time=10.1 + 0.1 * i,
                num_scheduled=size,
                num_active=len(num_blocks),
                num_ctx_tokens=0,
                free_num_blocks=20 - 5 * size,
            )
            for i, size in enumerate(num_scheduled)
        ],
    )


def test_a_baseline_that_lacks_blocks_only_is_one() -> None:
    trace = make_trace([2, 2, 2], [9, 9, 3], [0.0, 1.0, 2.0])
    check_baseline(trace, num_blocks=20, max_batch_size=4)
    assert peak_pool_share(trace, 20) == 0.5
    assert fullest_capacity(trace) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("num_scheduled", "num_blocks", "max_batch_size", "message"),
    [
        ([2, 2], [9, 8, 3], 4, "the baseline had room in 2 iterations"),
        ([2, 2], [9, 9, 3], 2, "used all slots"),
        ([3, 3], [5, 5, 5], 4, "nobody waited for blocks"),
    ],
)
def test_a_baseline_that_is_not_one_is_refused(
    num_scheduled: list[int], num_blocks: list[int], max_batch_size: int, message: str
) -> None:
    trace = make_trace(num_scheduled, num_blocks, [0.0, 1.0, 2.0])
    with pytest.raises(BenchmarkError, match=message):
        check_baseline(trace, num_blocks=20, max_batch_size=max_batch_size)


def summary(title: str, **changes: Any) -> dict[str, Any]:
    return {
        "title": title,
        "num_blocks": 96,
        "max_batch_size": 24,
        "ttft_p99_ratio": 0.1,
        "raw_ratio": 1.1,
        "stalls_by_pause": 0,
        "raw_throughput": 1234.5,
        "load": 0.4,
        "peak_slots": 9,
        **changes,
    }


def test_the_table_says_what_is_not_reached() -> None:
    result = {
        "names": ["fcfs", "tokenflow", "tokenflow_tiering"],
        "baseline": "fcfs",
        "fcfs": summary("first: all reserved", load=0.9, peak_slots=8),
        "tokenflow": summary("tokenflow: rules"),
        "tokenflow_tiering": summary("tokenflow: KvTiering", stalls_by_pause=2, raw_ratio=0.9),
    }
    good, bad, _, load = verdicts(result)
    assert load.endswith("allowed: 0.40")
    assert "NOT REACHED" not in good
    assert bad.count("NOT REACHED") == 2
    lines = format_table(result).splitlines()
    assert lines[0].split() == ["first", "tokenflow", "tokenflow"]
    assert "1,234.5 tok/s" in next(line for line in lines if line.startswith("raw throughput"))
    rows = markdown_table(result).split("\n\n")[0].splitlines()
    assert {row.count("|") for row in rows} == {5}
