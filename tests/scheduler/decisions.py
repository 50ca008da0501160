"""What plan() decides on snapshots by hand."""

from __future__ import annotations

from typing import Any

from tests.scheduler.build import snapshot
from tokenflow.policies import Policy, TokenflowPolicy
from tokenflow.scheduler import plan
from tokenflow.types import Decision

POLICY = TokenflowPolicy()


def decide(rows: list[dict[str, Any]], policy: Policy = POLICY, **limits: Any) -> Decision:
    return plan(snapshot(rows, **limits), policy)
