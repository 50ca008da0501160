"""The speed of virtual time: what is timed, and what is printed of it."""

from __future__ import annotations

import json

import pytest

from perf import sim_speed
from perf.sim_speed import Load, Shares, part_of, rows, table, window_of

QUIET = Load(name="quiet", gpu="h200", is_quiet=True, max_tokens=60, num_streams=4)
BUSY = Load(name="busy", gpu="a6000", is_quiet=False, max_tokens=30, num_streams=5)


@pytest.fixture(scope="module")
def speeds() -> list[sim_speed.Speed]:
    return rows([QUIET, BUSY], num_runs=1)


def test_a_quiet_load_is_timed_while_all_run_and_nothing_is_planned(
    speeds: list[sim_speed.Speed],
) -> None:
    one_by_one, together = speeds[:2]
    assert (one_by_one.together, together.together) == (False, True)
    for speed in (one_by_one, together):
        assert speed.num_plans <= 2  # for the last token but one of the first to end, and its end
        assert 40 <= speed.num_steps <= 59
        assert speed.virtual_s > 0
        assert speed.times_real > 0
    assert one_by_one.num_steps == together.num_steps


def test_a_busy_load_is_timed_as_a_whole(speeds: list[sim_speed.Speed]) -> None:
    result = sim_speed._whole(BUSY, together=True)
    window = window_of(BUSY, result)
    assert window.begin_time == 0.0
    assert window.end_time == max(q.end_time for q in result.seqs)
    assert speeds[2].num_plans == speeds[3].num_plans > 5


def test_what_is_printed(speeds: list[sim_speed.Speed], capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(speeds).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("quiet")
    assert "together" in lines[2]
    sim_speed.main(["--json", "--runs", "1"], loads=[QUIET])
    data = json.loads(capsys.readouterr().out)
    assert [speed["together"] for speed in data["speeds"]] == [False, True]
    assert data["speeds"][0]["times_real"] > 0
    with pytest.raises(SystemExit):
        sim_speed.main(["--runs", "0"], loads=[QUIET])


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/x/tokenflow/inflight/moves.py", "engine"),
        ("/x/tokenflow/scheduler_view.py", "planner"),
        ("/x/tokenflow/kv_mirror.py", "what plans are made from"),
        ("/x/tokenflow/feedback.py", "sessions"),
        ("/x/perf/virtual/simulation.py", "events"),
        ("/lib/numpy/core/numeric.py", None),
    ],
)
def test_rooms_of_the_code(path: str, part: str | None) -> None:
    assert part_of(path) == part


def test_shares_add_up() -> None:
    shares = Shares()
    assert shares.result() == {}
    with shares:
        sim_speed._whole(Load(name="b", gpu="h200", is_quiet=False, max_tokens=60), together=False)
    assert sum(shares.result().values()) == pytest.approx(1.0)
    assert "engine" in shares.result()
