"""Workloads in files: our own layout both ways, and BurstGPT's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.lab.burstgpt import read_burstgpt
from perf.lab.mixes import READ_RATE_BOUNDS, Mix, OneRate
from perf.lab.setups import SETUPS, requests
from perf.lab.traces import COLUMNS, TraceError, read_trace, write_trace
from perf.virtual.values import SimRequest
from triton_backend import codec

HEADER = "arrival_time,num_prompt_tokens,max_tokens,read_rate"
seconds = st.floats(0.0, 1e9, allow_nan=False)


@st.composite
def singles(draw: st.DrawFn) -> SimRequest:
    num_prompt, max_tokens = draw(st.integers(1, 1 << 20)), draw(st.integers(1, 1 << 20))
    num_more = draw(st.none() | st.integers(0, 1 << 20))
    return SimRequest(
        arrival_time=draw(seconds),
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        read_rate=draw(st.none() | st.floats(*READ_RATE_BOUNDS)),
        priority=draw(st.floats(0.0, 1.0)),
        pausable=draw(st.booleans()),
        kind=draw(st.text(min_size=1, max_size=8).filter(lambda t: "\x00" not in t)),
        num_shared_tokens=draw(st.integers(0, num_prompt)),
        cancel_after_s=draw(st.none() | seconds),
        limit_tokens=None if num_more is None else max_tokens + num_more,
    )


@settings(max_examples=60, deadline=None)
@given(work=st.lists(singles(), max_size=12))
def test_what_is_written_reads_back_as_it_was(work: list[SimRequest]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write_trace(path, work)
        assert read_trace(path) == sorted(work, key=lambda r: r.arrival_time)


@pytest.mark.parametrize("name", ["conversations", "machines", "4090-a"])
def test_set_ups_read_back_as_they_were(tmp_path: Path, name: str) -> None:
    work = requests(SETUPS[name], seed=3)
    write_trace(tmp_path / "trace.csv", work)
    assert read_trace(tmp_path / "trace.csv") == work


def test_four_columns_are_enough_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "\ufeffread_rate,max_tokens,arrival_time,num_prompt_tokens\r\n5,9,0.5,8\r\n,7,1,6\r\n"
    )
    assert read_trace(path) == [
        SimRequest(arrival_time=0.5, num_prompt_tokens=8, max_tokens=9, read_rate=5.0),
        SimRequest(
            arrival_time=1.0, num_prompt_tokens=6, max_tokens=7, read_rate=None, kind="machine"
        ),
    ]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, "arrival_time"),
        ("\n", 1, "arrival_time"),
        ("arrival_time,num_prompt_tokens,max_tokens\n", 1, "read_rate"),
        (f"{HEADER},colour\n", 1, "colour"),
        (f"{HEADER},read_rate\n", 1, "read_rate"),
        (f"{HEADER}\n0,1,1,5\n0,1,1\n", 3, ""),
        (f"{HEADER}\n0,1,1,5,6\n", 2, ""),
        (f'{HEADER}\n0,1,1,"5\n', 2, ""),
        (f"{HEADER}\nnow,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\n-1,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\n1_000,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\n1 ,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\nnan,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\n2,1,1,5\n1,1,1,5\n", 3, "arrival_time"),
        (f"{HEADER}\n1e300,1,1,5\n", 2, "arrival_time"),
        (f"{HEADER}\n0,1.0,1,5\n", 2, "num_prompt_tokens"),
        (f"{HEADER}\n0,0,1,5\n", 2, "num_prompt_tokens"),
        (f"{HEADER}\n0,1,-1,5\n", 2, "max_tokens"),
        (f"{HEADER}\n0,1,1,0\n", 2, "read_rate"),
        (f"{HEADER}\n0,1,1,inf\n", 2, "read_rate"),
        (f"{HEADER}\n0,1,1,1e308\n", 2, "read_rate"),
        (f"{HEADER}\n0,1,1,1e-300\n", 2, "read_rate"),
        (f"{HEADER},cancel_after_s\n0,1,1,5,1e300\n", 2, "cancel_after_s"),
        (f"{HEADER},priority\n0,1,1,5,1.5\n", 2, "priority"),
        (f"{HEADER},priority\n0,1,1,5,\n", 2, "priority"),
        (f"{HEADER},pausable\n0,1,1,5,yes\n", 2, "pausable"),
        (f"{HEADER},kind\n0,1,1,5,\n", 2, "kind"),
        (f"{HEADER},num_shared_tokens\n0,1,1,5,2\n", 2, "num_shared_tokens"),
        (f"{HEADER},num_history_tokens\n0,1,1,5,1\n", 2, "num_history_tokens"),
        (
            f"{HEADER},conversation,num_history_tokens\n0,3,2,5,1,0\n1,9,1,5,1,6\n",
            3,
            "num_history_tokens",
        ),
        (
            f"{HEADER},conversation,num_history_tokens\n0,3,2,5,1,0\n1,4,1,5,1,5\n",
            3,
            "num_history_tokens",
        ),
    ],
)
def test_another_layout_is_refused_with_line_and_column(
    tmp_path: Path, text: str, line: int, column: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert (error.value.line, error.value.column) == (line, column)
    assert f"line {line}" in str(error.value)
    assert column in str(error.value)


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(f"{HEADER},kind\n0,1,1,5,tea\n0,1,1,5,café\n".encode("latin-1"))
    with pytest.raises(TraceError, match=r"line 3: .*utf-8"):
        read_trace(path)


def test_readers_may_be_as_slow_and_as_fast_as_the_server_takes_them() -> None:
    assert READ_RATE_BOUNDS == codec.READ_RATE_BOUNDS


def test_every_field_of_a_request_is_a_column() -> None:
    assert len(COLUMNS) == len(SimRequest.__dataclass_fields__)
    assert HEADER.split(",") == list(COLUMNS[:4])


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
100,ChatGPT,400,20,420,Conversation log
150,ChatGPT,400,0,400,API log
200,GPT-4,3000,1200,4200,Conversation log
300,GPT-4,0,0,0,Conversation log
500,GPT-4,3000,1096,4096,Conversation log
900,ChatGPT,40,50,90,API log
950,ChatGPT,41,51,92,API log
"""
MIX = Mix(readers=OneRate(6.0))


def test_burstgpt_is_read_without_failures_and_scaled_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    path.write_text(BURSTGPT)
    work = read_burstgpt(path, mix=MIX, num_requests=3, num_rows=6, time_scale=0.01)
    assert [(r.num_prompt_tokens, r.max_tokens, r.read_rate) for r in work] == [
        (400, 20, 6.0),
        (3000, 1096, 6.0),
        (40, 50, 6.0),
    ]
    assert [r.arrival_time for r in work] == pytest.approx([0.0, 4.0, 8.0])
    more = read_burstgpt(path, mix=MIX, num_requests=4, max_context=4096)
    assert more[-1].arrival_time == pytest.approx(0.085)
    longer = read_burstgpt(path, mix=MIX, num_requests=5, max_context=4200)
    assert sorted(r.max_tokens for r in longer) == [20, 50, 51, 1096, 1200]


def test_a_sample_of_burstgpt_depends_on_its_seed_only(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    path.write_text(BURSTGPT)
    samples = [
        tuple(read_burstgpt(path, mix=MIX, num_requests=2, seed=seed)) for seed in (0, 0, 1, 2, 3)
    ]
    assert samples[0] == samples[1]
    assert len(set(samples)) > 1


def test_burstgpts_third_trace_has_more_columns(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n1.5,7,2.0,GPT-4,10,20,30,Conversation log\n"
    )
    (request,) = read_burstgpt(path, mix=MIX, num_requests=1)
    assert (request.num_prompt_tokens, request.max_tokens) == (10, 20)


def test_another_layout_than_burstgpts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "burstgpt.csv"
    path.write_text(BURSTGPT.replace("Log Type", "Kind"))
    with pytest.raises(TraceError, match="line 1, column Log Type"):
        read_burstgpt(path, mix=MIX)
    path.write_text(BURSTGPT.replace("3000,1096", "3000,many"))
    with pytest.raises(TraceError, match="line 6, column Response tokens"):
        read_burstgpt(path, mix=MIX)
    path.write_text(BURSTGPT.replace("100,", "1e300,", 1))
    with pytest.raises(TraceError, match="column Timestamp"):
        read_burstgpt(path, mix=MIX)
    path.write_text(BURSTGPT)
    with pytest.raises(ValueError, match="4 usable rows, 5 were asked for"):
        read_burstgpt(path, mix=MIX, num_requests=5)
