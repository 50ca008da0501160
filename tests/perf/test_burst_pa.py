"""What perf_analyzer is told, and its export read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perf import burst_pa, get_perf_analyzer
from perf.analysis import BenchmarkError, require_complete, to_stream
from perf.get_perf_analyzer import ToolError
from perf.workloads import ClientRequest
from tokenflow import metrics


def request(index: int, offset: float, max_tokens: int = 3) -> ClientRequest:
    return ClientRequest(
        request_id=f"r{index}",
        kind="newcomer",
        prompt=f"prompt {index}",
        num_prompt_tokens=5,
        max_tokens=max_tokens,
        read_rate=4,
        send_offset_s=offset,
    )


REQUESTS = [request(0, 0.0), request(1, 0.3), request(2, 10.0), request(3, 10.0)]


def entry(prompt: str, at_ns: int, responses: list[tuple[int, Any, str]]) -> dict[str, Any]:
    return {
        "timestamp": at_ns,
        "request_inputs": {"text_input": prompt, "max_tokens": 3},
        "response_timestamps": [at_ns + after for after, _, _ in responses],
        "response_outputs": [
            {"text_output": text, "num_output_tokens": num, "finish_reason": ""}
            for _, num, text in responses
        ],
    }


def export(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"experiments": [{"experiment": {}, "requests": list(entries)}], "version": "2.60.0"}


def test_gaps_add_up_to_the_times_of_sending() -> None:
    gaps = burst_pa.request_intervals(REQUESTS)
    assert gaps == [1000, 300_000, 9_700_000, 1]


def test_each_request_carries_its_reading_rate_as_a_float_tensor() -> None:
    (first, *rest) = burst_pa.input_data(REQUESTS)["data"]
    assert first["text_input"] == ["prompt 0"]
    assert (first["max_tokens"], first["end_id"], first["stream"]) == ([3], [-1], [True])
    # the tool takes a number without a decimal point for an integer and refuses it
    assert '"read_rate": [4.0]' in json.dumps(first)
    assert len(rest) == 3


def test_export_gives_receipt_times_per_token() -> None:
    ms = 1_000_000
    content = export(
        entry("prompt 1", 2000 * ms, [(50 * ms, [2], "ab"), (80 * ms, [1], "c")]),
        entry("prompt 0", 1000 * ms, [(10 * ms, 1, "a"), (20 * ms, 2, "bc"), (21 * ms, "", "")]),
    )
    zero, one = burst_pa.read_export(content, REQUESTS[:2], clock_offset_s=-1.0)
    assert zero.send_time == pytest.approx(0.0)
    assert zero.token_times == pytest.approx([0.01, 0.02, 0.02])
    assert zero.text == "abc"
    assert metrics.ttft_s(to_stream(one)) == pytest.approx(0.05)
    require_complete([zero, one])


def test_a_request_that_failed_or_came_twice_is_not_overlooked() -> None:
    good = entry("prompt 0", 0, [(1, 3, "abc")])
    with pytest.raises(BenchmarkError, match="no answer for r1"):
        burst_pa.read_export(export(good), REQUESTS[:2], 0.0)
    with pytest.raises(BenchmarkError, match="unexpected request"):
        burst_pa.read_export(export(good, good), REQUESTS[:1], 0.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://mirror.test/debian\n"),
        (
            "sources.list",
            "# deb http://no.test/debian x\ndeb [arch=amd64] http://mirror.test/debian/ x main\n",
        ),
    ],
)
def test_the_system_mirror_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    found = get_perf_analyzer.find_debian_mirror(tmp_path)
    assert found.rstrip("/") == "http://mirror.test/debian"


def test_without_a_mirror_the_way_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://mirror.test/ubuntu x main\n")
    with pytest.raises(ToolError, match="Debian 13"):
        get_perf_analyzer.find_debian_mirror(tmp_path)


def test_asking_for_help_downloads_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_perf_analyzer, "get_perf_analyzer", lambda _: pytest.fail("called"))
    with pytest.raises(SystemExit) as stopped:
        get_perf_analyzer.main(["--help"])
    assert stopped.value.code == 0
    assert "private folder" in capsys.readouterr().out
