"""The baselines by name, as tests run them: a new planner each time."""

from __future__ import annotations

from collections.abc import Callable

from tokenflow.baselines import guide
from tokenflow.baselines.andes import AndesPlanner
from tokenflow.baselines.guide import GuidePolicy
from tokenflow.baselines.paper import PaperPlanner
from tokenflow.baselines.room import Planner
from tokenflow.baselines.sglang import SglangPlanner

PLANNERS: dict[str, Callable[[], Planner]] = {
    "sglang": lambda: SglangPlanner().plan,
    "andes": lambda: AndesPlanner().plan,
    "paper": lambda: PaperPlanner().plan,
    "guide": lambda: lambda snapshot: guide.plan(snapshot, GuidePolicy()),
}
