"""Tables and the picture from a small made-up result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from perf import report
from perf.analysis import Run, ratios, summarise
from perf.client import ClientRecord, WorkloadRecord
from perf.plots import draw_demo, unread_over_time
from tokenflow.config import ServingConfig


def record(first_s: float) -> WorkloadRecord:
    clients = [
        ClientRecord(
            request_id=f"{kind}-0",
            kind=kind,
            read_rate=2.0,
            max_tokens=4,
            num_prompt_tokens=3,
            send_time=100.0,
            token_times=[100 + first_s, 100 + first_s, 103.0, 104.0],
        )
        for kind in ("reader", "newcomer")
    ]
    return WorkloadRecord(start_time=100.0, end_time=105.0, cpu_s=0.1, clients=clients, lags=[])


@pytest.fixture
def result() -> dict:
    runs = {
        name: Run(policy=name, clients=record(first).clients, visible_stalls=[], num_pauses=pauses)
        for name, first, pauses in (("fcfs", 2.0, 0), ("tokenflow", 0.5, 3))
    }
    made = {name: summarise([run]) for name, run in runs.items()}
    return {
        **made,
        "ratio": ratios(made["tokenflow"], made["fcfs"]),
        "runs": [{"policy": name, **summary} for name, summary in made.items()],
    }


def test_table_shows_both_policies_and_their_ratio(result: dict) -> None:
    lines = report.format_table(result).splitlines()
    first = next(line for line in lines if "P50" in line)
    assert first.split()[-5:] == ["2.00", "s", "0.50", "s", "0.250"]
    assert next(line for line in lines if line.startswith("pauses")).split() == ["pauses", "0", "3"]
    assert len({len(line) for line in lines}) == 1
    markdown = report.markdown_table(result).splitlines()
    assert {line.count("|") for line in markdown} == {5}
    assert {line.count("|") for line in report.runs_table(result).splitlines()} == {8}


def test_only_generated_blocks_are_rewritten() -> None:
    text = "a\n<!-- generated: parameters -->\nold\n<!-- end -->\nb old\n"
    new = report.regenerate(text)
    assert new.startswith("a\n<!-- generated: parameters -->\n| parameter |")
    assert new.endswith("<!-- end -->\nb old\n")
    assert "\nold\n" not in new
    assert report.regenerate(new) == new
    assert report.regenerate(text, names=("demo",)) == text
    with pytest.raises(KeyError):
        report.regenerate("<!-- generated: nothing -->\n<!-- end -->")


def test_figures_are_made_from_the_result_files_alone(result: dict, tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(json.dumps(result))
    text = "".join(
        f"<!-- generated: {name} -->\nold\n<!-- end -->\n" for name in ("demo", "burst_pa")
    )
    new = report.regenerate(text, results=tmp_path)
    assert new == (
        f"<!-- generated: demo -->\n{report.markdown_table(result)}\n<!-- end -->\n"
        "<!-- generated: burst_pa -->\n"
        "No results yet: run `make burst-pa`, then `make docs`.\n<!-- end -->\n"
    )
    assert "| burst: first token, P50 | 2.00 s | 0.50 s | 0.250 |" in new
    assert report.regenerate(new, results=tmp_path) == new
    stale = report.stale_documents(results=tmp_path, names=["demo"])
    assert [path.name for path in stale] == ["README.md", "benchmarks.md"]


def test_the_documents_list_the_current_parameters() -> None:
    # Not the figures: a benchmark that somebody ran must not make the tests fail.
    assert report.stale_documents(names=["parameters"]) == []


def test_the_table_has_a_row_per_parameter() -> None:
    rows = report.parameter_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [
        f.name for f in dataclasses.fields(ServingConfig)
    ]
    assert {row.count("|") for row in rows} == {5}
    assert "| `engine_process` | `true` | `true`, `false` |" in "\n".join(rows)
    assert "| `trace_path` | empty | text |" in "\n".join(rows)


def test_unread_rises_with_receipt_and_falls_with_reading() -> None:
    client = record(1.0).clients[0]
    unread = unread_over_time(client, np.array([100.9, 101.0, 101.5, 102.0, 103.0, 104.0]))
    # two tokens at 1 s: one is read at once, one half a second later; then each as it comes
    assert unread.tolist() == [0, 1, 0, 0, 0, 0]


def test_the_picture_is_drawn(result: dict, tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    draw_demo({"fcfs": record(2.0), "tokenflow": record(0.5)}, result, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
