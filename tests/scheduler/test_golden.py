"""Decisions that were looked at once stay as they were; golden.py beside this changes them."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.golden import FOLDER, POLICY, SCENARIOS, decode_snapshot, encode_decision
from tokenflow.scheduler import plan
from tokenflow.types import SessionState

RESUMING = SessionState.RESUMING


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
        "prefetch",
        "write-through",
    }


@pytest.mark.parametrize(("name", "has_tiering"), [("tiers_by_rules", False), ("tiers_told", True)])
def test_both_ways_to_use_a_host_tier_are_covered(name: str, has_tiering: bool) -> None:
    """Blocks are loaded in both; only an engine that can be told is, and computes what it could
    load."""
    entries = json.loads((FOLDER / f"{name}.json").read_text())
    told = ("recompute", "prefetch", "offload")
    for part in told:
        assert any(entry["decision"].get(part) for entry in entries) is has_tiering, part
    loading = 0
    for entry in entries:
        snap = decode_snapshot(entry["snapshot"])
        assert snap.kv.num_host_blocks == 200
        assert snap.kv.has_tiering is has_tiering
        loading += bool(snap.sessions.num_host_blocks[snap.sessions.state == RESUMING].any())
    assert loading, "a resume that loads shows what it has on the link"
