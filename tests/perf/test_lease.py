"""The lease benchmark on a tiny workload: what its columns mean, and that it repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import lease
from perf.virtual.values import SimEngine, SimRequest, SimStep


def tiny() -> lease.Case:
    """Two readers in two slots, and a newcomer for whom one has to yield."""
    readers = [SimRequest(arrival_time=0.0, num_prompt_tokens=40, max_tokens=150) for _ in range(2)]
    newcomer = SimRequest(arrival_time=4.0, num_prompt_tokens=40, max_tokens=20, kind="newcomer")
    return lease.Case("tiny", (*readers, newcomer), SimEngine(max_batch_size=2))


def step(*handles: int, held: int = 4, used: int = 2) -> SimStep:
    return SimStep(
        start_time=0.0,
        step_s=0.5,
        handles=handles,
        num_waiting=0,
        num_held_blocks=held,
        num_used_blocks=used,
    )


def test_rows_compare_cancels_with_leases() -> None:
    rows = lease.run([tiny()], leases=(16, 64))
    by_mode = {row["mode"]: row for row in rows}
    assert list(by_mode) == ["cancel, all reserved", "cancel, as needed", "lease 16", "lease 64"]
    full, needed, short = (by_mode[m] for m in list(by_mode)[:3])
    # A cancel throws a token away. A lease is renewed ten times and each renewal misses a step;
    # one of them gives its place to the newcomer instead, without a cancel.
    assert full["num_lost_steps"] == full["num_pauses"] == 1
    assert full["num_lease_ends"] == 0
    assert int(short["num_lease_ends"]) >= 2 * (150 // 16)
    assert int(short["num_lost_steps"]) > 10
    assert float(full["held_per_used_block"]) > float(short["held_per_used_block"]) >= 1.0
    assert float(needed["held_per_used_block"]) == pytest.approx(1.0, abs=0.05)
    assert all(row["share_stalled"] == 0 for row in rows)
    assert lease.run([tiny()], leases=(16, 64)) == rows


def test_a_missed_step_lies_between_two_that_were_made() -> None:
    log = lease.StepLog()
    for handles in [(1, 2), (2,), (1, 2), (1,), (1,), (1, 2)]:
        log.note(step(*handles))
    assert log.num_missed == 1  # stream 1 once; stream 2 was away for longer
    assert log.held_per_used == 2.0
    assert log.occupancy(2) == pytest.approx(9 / 12)


def test_the_command_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lease.json"
    assert lease.main(["--output", str(path)], [tiny()]) == 0
    table = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(table.splitlines()) - 1 == 2 + len(lease.LEASES)
    assert all(row["mode"] in table for row in rows)
    assert lease.main(["--output", str(path), "--json"], [tiny()]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
