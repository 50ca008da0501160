"""Decisions that were looked at once stay as they were; golden.py beside this changes them."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.golden import FOLDER, POLICY, SCENARIOS, decode_snapshot, encode_decision
from tokenflow.scheduler import plan


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_golden_decisions(name: str) -> None:
    entries = json.loads((FOLDER / f"{name}.json").read_text())
    assert entries
    for number, entry in enumerate(entries):
        decision = plan(decode_snapshot(entry["snapshot"]), POLICY)
        assert encode_decision(decision) == entry["decision"], f"{name}.json entry {number}"


def test_the_files_cover_every_kind_of_decision() -> None:
    reasons: set[str] = set()
    for name in SCENARIOS:
        for entry in json.loads((FOLDER / f"{name}.json").read_text()):
            reasons |= set(entry["decision"]["why"].values())
    assert reasons >= {
        "waiting",
        "for waiting",
        "due",
        "for due",
        "free room",
        "balance",
        "for balance",
        "growth",
    }
