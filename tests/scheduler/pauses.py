"""What became of the pauses of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tests.scheduler.outcomes import Outcome


def returns(run: Outcome) -> Iterator[tuple[dict[str, Any], float]]:
    """Each pause of a reader, and how many seconds after it ran dry that was over (below 0: before
    it ran dry); its `asked_time` is when the engine was asked to resume it. The slack of a machine
    is only a reckoning: it never runs dry."""
    away: dict[str, dict[str, Any]] = {}
    for name, time, fields in run.tracer.events:
        if name == "pause":
            away[fields["request_id"]] = {"time": time, "asked_time": math.inf, **fields}
        elif name == "resume" and fields["request_id"] in away:
            away[fields["request_id"]]["asked_time"] = time
        elif name in ("resumed", "finish", "cancel"):
            pause = away.pop(fields["request_id"], None)
            if pause is not None and _has_reader(run, pause):
                yield pause, time - pause["time"] - pause["slack_s"]


def _has_reader(run: Outcome, pause: dict[str, Any]) -> bool:
    return run.result.seqs[int(pause["request_id"]) - 1].request.read_rate is not None
